"""Parts of a batch, each drawn from one buffer, put together."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from interop.buffers import collate
from interop.buffers.pending import Part as Request
from interop.buffers.places import owned
from interop.data import bridge
from interop.data.index import as_tensor
from interop.data.layout import Branch, Layout, unchecked
from interop.host.rows import TorchRows
from interop.samplers.reservation import Reservation
from interop.storages import TensorStorage
from interop.transforms.order import Order


@dataclasses.dataclass(slots=True)
class Part:
    """What one member gave."""

    place: int  # of the member
    info: dict[Any, Any]
    finish: Callable[[], Any] | None = None  # has the data gone through what the member has for it; takes no lock
    storage: TensorStorage | None = None  # or the data is what this one holds, in `leaves`
    leaves: list[Tensor] | None = None  # None where they were read into those of the whole batch


class Gathering:
    """Parts are drawn one after the other, each under the lock of its member, and put together when none is held.

    Items that come as they are stored, and are alike in all parts, are read into one tensor [parts, each, ...] for each
    leaf at once.
    """

    def __init__(self, parts: int, each: int, weighs: bool) -> None:
        self.parts: list[Part] = []
        self._lead = (parts, each)
        self._weighs = weighs  # whether some member says what items weigh: those of the others then weigh 1
        self._layout: Layout | None = None
        self._leaves: list[Tensor] = []
        self._views: list[np.ndarray] = []

    # ------------------------------------------------------------------ drawing, under the lock of a member

    def draw(self, request: Request, member: Any, collate_fn: Callable[[Any], Any] | None) -> None:
        """Another part, of `member`; `collate_fn` stands in for its own."""
        chosen, storage = member._collate_fn if collate_fn is None else collate_fn, request.storage
        plain = member._reads_slots and _comes_as_stored(member, chosen)
        if plain and isinstance(storage, TensorStorage) and not storage.packs:
            part = self._read(request.place, storage, *request.draw_slots())
            member._revision(part.info, request.key)
        else:
            data, info = member._gather(request)
            if collate_fn is not None and storage.is_live(info["index"]):
                data = owned(data)  # seen to for the member's own collate_fn only
            revise, order = member._revision(info, request.key), Order.of(member, info["index"], info)
            part = Part(
                request.place, info, finish=lambda: _finished(member, data, info["index"], chosen, revise, order)
            )
        if self._weighs and not member._sampler.takes_priorities:
            slots = _column(part.info["index"])
            part.info.setdefault("priority_weight", torch.ones(slots.shape[0], device=slots.device))
        self.parts.append(part)

    def _read(
        self, place: int, storage: TensorStorage, slots: Tensor, info: dict[Any, Any], leaves: list[Tensor]
    ) -> Part:
        rows, layout, number = storage.rows, storage.layout, len(self.parts)
        assert rows is not None and layout is not None  # something was drawn
        if leaves:
            return Part(place, info, storage=storage, leaves=leaves)
        if not isinstance(rows, TorchRows) or not rows.on_host or slots.shape[0] != self._lead[1]:
            return Part(place, info, storage=storage, leaves=rows.read(slots))
        if number == 0:
            shapes = [((*self._lead, *spec.shape), spec.dtype) for spec in layout.leaves]
            self._leaves = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in shapes]
            self._views = [bridge.numpy_view(leaf) for leaf in self._leaves]
            self._layout = layout
        if self._layout is None or not _same(layout, self._layout):
            return Part(place, info, storage=storage, leaves=rows.read(slots))
        rows.read_into(slots, number, self._leaves, self._views)
        return Part(place, info, storage=storage)

    # ------------------------------------------------------------------ putting together

    def whole(self) -> Any:
        """The batch [parts, each] where all parts are alike and come as they are stored; None otherwise."""
        first = self.parts[0]
        storage = first.storage
        leaves = None if storage is None else self._whole_leaves()
        told = None if leaves is None else _columns([part.info for part in self.parts])
        if storage is None or leaves is None or told is None:
            return None
        layout, lead = storage.layout, tuple(leaves[0].shape[:2])  # an epoch may have had fewer left in all members
        assert layout is not None
        if not (isinstance(layout.root, Branch) and layout.root.kind is TensorDict):
            return storage.build(leaves, lead)
        ids = _ids([(part.place, part.info) for part in self.parts], lead)
        shape = torch.Size((*lead, *layout.root.batch))
        index = _index(told.pop("index"), ids, shape, leaves[0].device)
        known = layout.places.get(("index",))
        if known is not None:
            leaves = [*leaves[:known], index, *leaves[known + 1 :]]  # what is built takes any entry
        data = storage.build(leaves, lead)
        _set(data, told if known is not None else {"index": index, **told}, 2)
        return data

    def _whole_leaves(self) -> list[Tensor] | None:
        if all(part.storage is not None and part.leaves is None for part in self.parts):
            return self._leaves
        found, layouts = [], []
        for part in self.parts:
            if part.storage is None or part.leaves is None or part.storage.layout is None:
                return None
            found.append(part.leaves)
            layouts.append(part.storage.layout)
        heads = {(leaves[0].shape[0], leaves[0].device) for leaves in found}
        if len(heads) > 1 or not all(_same(layout, layouts[0]) for layout in layouts):
            return None
        return [torch.stack(column) for column in zip(*found, strict=True)]

    def rows(self) -> list[Any]:
        """Each part for itself, after the collate function and transforms of its member, with its index if a tensordict."""
        made = []
        for number, part in enumerate(self.parts):
            if part.finish is not None:
                data = part.finish()
            else:
                assert part.storage is not None
                leaves = [leaf[number] for leaf in self._leaves] if part.leaves is None else part.leaves
                data = part.storage.build(leaves, (leaves[0].shape[0],))
            if isinstance(data, TensorDictBase):
                mark(data, part.place, part.info)
            made.append(data)
        return made


def mark(data: TensorDictBase, place: int, info: dict[Any, Any]) -> None:
    """Set in a part what its sampler said, and under "index" which member it is of."""
    slots = _column(info["index"])
    ids = torch.full((slots.shape[0],), place, dtype=torch.int64, device="cpu")
    if data.batch_size[:1] != ids.shape:
        raise RuntimeError(
            f"Failed to set the metadata of {ids.shape[0]} items in a sample of batch size {list(data.batch_size)}: the "
            "transforms and the collate_fn of a member must keep its first dim"
        )
    index = _index(slots, ids, data.batch_size, data.device)
    _set(data, {"index": index, **{key: value for key, value in info.items() if key != "index"}}, 1)


def described(parts: Sequence[tuple[int, dict[Any, Any]]], marked: bool) -> TensorDictBase:
    """What the members said, stacked: [parts, each] for samples that are marked with it, [parts] for others."""
    columns = _columns([info for _, info in parts])
    if columns is not None:
        lead = columns["index"].shape[: 1 + marked]
        told = TensorDict(
            {"index": TensorDict({"index": columns.pop("index"), "buffer_ids": _ids(parts, lead)}, lead)}, lead
        )
        return told.update(columns)
    rows: list[TensorDictBase] = []
    for place, info in parts:
        slots = _column(info["index"])
        batch = [slots.shape[0]] if marked else []
        ids = torch.full(batch, place, dtype=torch.int64, device="cpu")
        row = TensorDict({"index": TensorDict({"index": slots, "buffer_ids": ids}, batch)}, batch)
        for key, value in info.items():
            if key != "index":
                row.set(key, value)
        rows.append(row)
    stacked: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(rows, 0)
    return stacked.clone()


def asked(
    drawn: Reservation, storage: Any, members: Sequence[Any], collate_fns: Sequence[Any]
) -> tuple[list[Any], list[tuple[int, dict[Any, Any]]]]:
    """Parts and what is told about them, of a sampler or storage ensemble of the user's own."""
    index, rows, told = drawn.slots, [], []
    for (place, data), part, said in zip(storage.get(index), index.unbind(0), drawn.info.unbind(0), strict=True):
        slots = part["index"]
        row = (collate_fns[place] or members[place]._collate_fn)(data)
        told.append((place, {**dict(said.items(True, True)), "index": slots}))
        if isinstance(row, TensorDictBase):
            row = row.copy()
            mark(row, *told[-1])
        rows.append(row)
    return rows, told


def _comes_as_stored(member: Any, collate_fn: Callable[[Any], Any]) -> bool:
    """Whether nothing more is done to what was read."""
    plain = not len(member._transform) and not member._pin_memory and not member._revises
    return plain and collate_fn is collate.identity


def _finished(member: Any, data: Any, index: Any, collate_fn: Callable[[Any], Any], revise: Any, order: Any) -> Any:
    """What was read, after the collate function and transforms; free to be written to if a tensordict."""
    made = member._from_store(data, index, collate_fn, revise, order)
    if isinstance(made, TensorDictBase) and (made.is_locked or not member._marks_samples):
        return made.copy()
    return made


def _columns(infos: Sequence[dict[Any, Any]]) -> dict[Any, Tensor] | None:
    """What all infos have, stacked; None where they differ in more than values."""
    if any(info.keys() != infos[0].keys() for info in infos):
        return None
    columns = {}
    for key in infos[0]:
        column: list[Any] = [_column(info[key]) if key == "index" else info[key] for info in infos]
        first = column[0]
        if not all(
            isinstance(each, Tensor) and (each.shape, each.device) == (first.shape, first.device) for each in column
        ):
            return None
        columns[key] = torch.stack(column)
    return columns


def _column(index: Any) -> Tensor:
    """[n] for slots, [n, ndim] for coordinates."""
    if isinstance(index, Tensor):
        return index
    return torch.stack([as_tensor(each) for each in index], -1) if isinstance(index, tuple) else as_tensor(index)


def _ids(parts: Sequence[tuple[int, Any]], lead: Sequence[int]) -> Tensor:
    """The member of each part, or of each of its items."""
    places = np.array([place for place, _ in parts])
    return torch.from_numpy(places if len(lead) == 1 else places.repeat(lead[1]).reshape(lead))


def _index(slots: Tensor, ids: Tensor, shape: torch.Size, device: torch.device | None) -> TensorDictBase:
    """The entry "index" of a sample of batch size `shape`, whose first dims are those of ids."""
    entries = {"index": _expanded(slots, ids.ndim, shape), "buffer_ids": _expanded(ids, ids.ndim, shape)}
    if device is not None and device.type != "cpu":
        entries = {key: value.to(device) for key, value in entries.items()}
    return unchecked(entries, shape, device, None)


def _expanded(value: Tensor, lead: int, shape: torch.Size) -> Tensor:
    """The value repeated over the dims of `shape` after the first `lead`."""
    if len(shape) == lead:
        return value
    rest = value.shape[lead:]
    return value.reshape(*value.shape[:lead], *(1 for _ in shape[lead:]), *rest).expand(*shape, *rest).clone()


def _set(data: TensorDictBase, entries: dict[Any, Any], lead: int) -> None:
    shape = data.batch_size
    for key, value in entries.items():
        if isinstance(value, Tensor):
            value = value if value.ndim > lead else _expanded(value, lead, shape)
            value = value.to(data.device) if data.device is not None else value
        try:
            data.set(key, value)
        except RuntimeError as error:
            raise RuntimeError(f"Failed to set the metadata {key!r} in a sample of batch size {list(shape)}") from error


def _same(one: Layout, other: Layout) -> bool:
    return one is other or one == other
