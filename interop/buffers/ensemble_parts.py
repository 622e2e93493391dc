"""The parts of a batch of an ensemble: joined to a batch, and split again for updates of priorities."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from interop.buffers.tensordict_buffer import include
from interop.data.index import as_tensor
from interop.data.tensordicts import entries_of, of_entries


@dataclasses.dataclass
class MemberPart:
    """The part of a batch that one member made. Its info has the index as one tensor."""

    place: int  # the number of the member
    data: Any
    info: dict[Any, Tensor]

    def __post_init__(self) -> None:
        index: Any = self.info["index"]
        if not isinstance(index, Tensor):
            columns = [as_tensor(column) for column in index] if isinstance(index, tuple) else None
            self.info = {**self.info, "index": as_tensor(index) if columns is None else torch.stack(columns, -1)}

    @property
    def slots(self) -> Tensor:
        return self.info["index"]

    def marked(self) -> Any:
        """The data with the info among its entries, and a nested "index" that names the member of each item."""
        data = self.data
        info = self.info
        slots = self.slots
        count = slots.shape[0]
        if isinstance(data, LazyStackedTensorDict) and len(data.tensordicts) == count:
            return self._marked_items(data)
        shape = data.batch_size
        entries = entries_of(data)
        if shape[:1] != (count,):
            raise RuntimeError(
                f"Failed to set the metadata of {count} items in a sample of batch size {list(shape)}: the transforms and "
                "the collate_fn of a member must keep its first dim"
            )
        steps = shape[1:]
        device = data.device
        if steps:  # items that are trajectories
            slots = slots.reshape(count, *(1 for _ in steps), *slots.shape[1:]).expand(*shape, *slots.shape[1:]).clone()
        if device is not None and device.type != "cpu":
            slots = slots.to(device)
            info = {key: value.to(device) for key, value in info.items()}
        ids = torch.full(shape, self.place, device=slots.device)
        index = of_entries({"index": slots, "buffer_ids": ids}, shape, device)
        if entries is not None and not steps and all(type(key) is str for key in info):
            return of_entries({**entries, **info, "index": index}, shape, device)
        data = data.copy()  # a collate function may have returned stored items
        include(data, {**info, "index": index}, apart=False)
        return data

    def _marked_items(self, data: LazyStackedTensorDict) -> TensorDictBase:
        """A lazy stack, along the first dim, of the items of one, whose own dims may differ, with their rows of the info."""
        marked = []
        for number, item in enumerate(data.tensordicts):
            row = {key: value[number : number + 1] for key, value in self.info.items()}
            [part] = MemberPart(self.place, item.unsqueeze(0), row).marked().unbind(0)
            marked.append(part)
        return lazy_stack(marked, 0)


def assembled(parts: Sequence[MemberPart], collate_fn: Callable[[Any], Any]) -> Any:
    """The batch of all parts. Tensordicts get the infos as entries."""
    are_marked = all(isinstance(part.data, TensorDictBase) for part in parts)
    return collate_fn([part.marked() if are_marked else part.data for part in parts])


def info_of(parts: Sequence[MemberPart]) -> TensorDictBase:
    """A copy of the infos of all parts: [parts, items] for tensordicts, [parts] for other data."""
    are_marked = all(isinstance(part.data, TensorDictBase) for part in parts)
    rows: list[TensorDictBase] = []
    for part in parts:
        batch = part.slots.shape[:1] if are_marked else torch.Size([])
        ids = torch.full(batch, part.place, device="cpu")
        row = TensorDict({"index": TensorDict({"index": part.slots, "buffer_ids": ids}, batch)}, batch)
        for key, value in part.info.items():
            if key != "index":
                row.set(key, value)
        rows.append(row)
    stacked: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(rows, 0)
    return stacked.clone()


def items_of(data: TensorDictBase) -> Iterator[tuple[TensorDictBase, TensorDictBase]]:
    """The items [n] of a sample, and their "index" with one slot an item.

    Parts and items that are not alike come one by one. KeyError for data without the index of an ensemble.
    """
    if isinstance(data, LazyStackedTensorDict) and data.stack_dim == 0 and data.ndim > 1:
        for part in data.tensordicts:
            yield from _items_of_part(part)
    else:
        yield from _numbered(data.flatten(0, 1) if data.ndim > 1 else data)


def _items_of_part(data: TensorDictBase) -> Iterator[tuple[TensorDictBase, TensorDictBase]]:
    if isinstance(data, LazyStackedTensorDict) and data.stack_dim == 0:
        for item in data.tensordicts:
            yield from _numbered(item.unsqueeze(0))
    else:
        yield from _numbered(data)


def _numbered(items: TensorDictBase) -> Iterator[tuple[TensorDictBase, TensorDictBase]]:
    index = items.get("index", None)
    if not isinstance(index, TensorDictBase) or not {"index", "buffer_ids"} <= set(index.keys()):
        raise KeyError('the sample has no "index" of an ensemble: pass one that came from sample(), with its index')
    count = items.batch_size[0]
    slots = index["index"]
    ids = index["buffer_ids"]
    rest = -1 if count else 1
    slots = slots.reshape(count, rest, slots.shape[ids.ndim :].numel())[:, 0]
    yield items, TensorDict({"index": slots, "buffer_ids": ids.reshape(count, rest)[:, 0]}, [count])
