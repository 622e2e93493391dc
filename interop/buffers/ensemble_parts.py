"""The parts of a batch of an ensemble: put together, and told apart again."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from interop.buffers import collate
from interop.buffers.tensordict_buffer import include
from interop.data.index import as_tensor
from interop.data.tensordicts import densely_stacked, of_entries


@dataclasses.dataclass
class MemberPart:
    """A part of a batch, as a member made it."""

    place: int  # of the member
    data: Any
    info: dict[Any, Tensor]

    def __post_init__(self) -> None:
        index: Any = self.info["index"]
        if not isinstance(index, Tensor):
            columns = [as_tensor(each) for each in index] if isinstance(index, tuple) else None
            self.info = {**self.info, "index": as_tensor(index) if columns is None else torch.stack(columns, -1)}

    @property
    def count(self) -> int:
        return int(self.info["index"].shape[0])


def assembled(parts: Sequence[MemberPart], collate_fn: Callable[[Any], Any]) -> Any:
    """The batch of all parts. Tensordicts get the infos as entries, with a nested "index" that names the members."""
    if not all(isinstance(part.data, TensorDictBase) for part in parts):
        return collate_fn([part.data for part in parts])
    columns = _columns(parts) if collate_fn is collate.stack else None
    batch = None if columns is None else densely_stacked([part.data for part in parts])
    if columns is not None and batch is not None:
        _mark(batch, columns, _ids(parts).reshape(len(parts), -1))
        return batch
    rows = [part.data.copy() for part in parts]  # a collate function may return stored items
    for row, part in zip(rows, parts, strict=True):
        _mark(row, part.info, _ids([part]))
    return collate_fn(rows)


def info_of(parts: Sequence[MemberPart]) -> TensorDictBase:
    """The infos of all parts: [parts, items] for tensordicts, [parts] for other data."""
    marked = all(isinstance(part.data, TensorDictBase) for part in parts)
    rows: list[TensorDictBase] = []
    for part in parts:
        slots = part.info["index"]
        batch = slots.shape[:1] if marked else torch.Size([])
        ids = _ids([part]) if marked else torch.tensor(part.place, device="cpu")
        row = TensorDict({"index": TensorDict({"index": slots, "buffer_ids": ids}, batch)}, batch)
        for key, value in part.info.items():
            if key != "index":
                row.set(key, value)
        rows.append(row)
    stacked: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(rows, 0)
    return stacked.clone()


def items_of(data: TensorDictBase, keys: Sequence[Any]) -> Iterator[TensorDictBase]:
    """The items of a sample of an ensemble, [n, ...], with their "index" and the entries at `keys`; parts that are not
    alike one by one. KeyError without the index of an ensemble."""
    if isinstance(data, LazyStackedTensorDict) and data.stack_dim == 0 and data.ndim > 1:
        for row in data.unbind(0):
            yield from items_of(row, keys)
        return
    index = data.get("index", None)
    if not isinstance(index, TensorDictBase) or not {"index", "buffer_ids"} <= set(index.keys()):
        raise KeyError('the sample has no "index" of an ensemble: pass one that came from sample(), with its index')
    chosen = data.select("index", *keys, strict=False)
    yield chosen.flatten(0, 1) if data.ndim > 1 else chosen


def first_slots(index: TensorDictBase, count: int) -> TensorDictBase:
    """The "index" of `count` items, some of whose dims may be steps, with one slot for each item."""
    slots, ids = index["index"], index["buffer_ids"]
    width = slots.shape[ids.ndim :].numel()
    rest = -1 if count else 1
    entries = {"index": slots.reshape(count, rest, width)[:, 0], "buffer_ids": ids.reshape(count, rest)[:, 0]}
    return TensorDict(entries, [count])


def _mark(data: TensorDictBase, info: dict[Any, Tensor], ids: Tensor) -> None:
    """Set an info, and which member each item is of, in data whose first dims are those of `ids`."""
    shape, lead = data.batch_size, ids.ndim
    if shape[:lead] != ids.shape:
        raise RuntimeError(
            f"Failed to set the metadata of {list(ids.shape)} items in a sample of batch size {list(shape)}: the "
            "transforms and the collate_fn of a member must keep its first dim"
        )

    def expanded(value: Tensor) -> Tensor:
        steps = shape[lead:]  # of rows that are trajectories
        if steps:
            rest = value.shape[lead:]
            value = value.reshape(*ids.shape, *(1 for _ in steps), *rest).expand(*shape, *rest).clone()
        return value if data.device is None else value.to(data.device)

    entries = {"index": expanded(info["index"]), "buffer_ids": expanded(ids)}
    index = of_entries(entries, shape, data.device)
    include(data, {**info, "index": index}, apart=False)


def _ids(parts: Sequence[MemberPart]) -> Tensor:
    """The member of each item."""
    return torch.from_numpy(np.repeat([part.place for part in parts], [part.count for part in parts]))


def _columns(parts: Sequence[MemberPart]) -> dict[Any, Tensor] | None:
    """The infos stacked, [parts, items]; None where they differ in more than values."""
    first = parts[0].info
    if any(part.info.keys() != first.keys() for part in parts):
        return None
    columns = {}
    for key in first:
        column = [part.info[key] for part in parts]
        if len({(each.shape, each.device) for each in column}) > 1:
            return None
        columns[key] = torch.stack(column)
    return columns
