"""Rows whose observations are kept as single frames, each once, and put together when they are read.

A table has the frames, in any order. Beside its other leaves an item has the numbers of its frames in the table: those of
the stack, the oldest first, and the newest one of the next observation. Items of one trajectory share frames.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.data import bridge
from interop.data.index import whole_rows
from interop.data.layout import LeafSpec
from interop.host.maps import in_shared_memory
from interop.host.rows import TorchRows
from interop.storages.lazy import untouched_zeros

_OPEN, _ID = range(2)  # of the latest row of each lane: whether its trajectory goes on, and its id
_NEXT, _STORED, _FREE, _USED = range(4)  # counts: row written next, rows stored, free frames, frames ever used
_AT_ONCE = 1 << 23  # bytes that are compared


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Which leaves of items are frames, and which say where trajectories end. Leaves are named by their place."""

    leaves: tuple[LeafSpec, ...]
    pairs: tuple[tuple[int, int], ...]  # observations and next observations
    ends: tuple[int, ...]  # a trajectory ends with an item for which one of these is true
    ids: int | None  # another value than in the row before begins a trajectory
    stack: int
    dim: int  # of an observation: the frames of a stack lie side by side along it
    zeros: bool  # stand before the first frame of a trajectory; otherwise that frame does
    check: bool
    capacity: int
    lanes: tuple[int, ...]
    finals: int  # room for frames with which trajectories end

    @functools.cached_property
    def per_row(self) -> int:
        return math.prod(self.lanes)

    @functools.cached_property
    def frames(self) -> int:
        """Frames in a table: zeros, those of all items, those before the oldest items and behind the newest, and finals."""
        return 1 + (self.capacity + self.stack) * self.per_row + self.finals

    @functools.cached_property
    def rest(self) -> tuple[int, ...]:
        """The leaves that are kept as they are."""
        pictures = {place for pair in self.pairs for place in pair}
        return tuple(place for place in range(len(self.leaves)) if place not in pictures)

    @functools.cached_property
    def fixed(self) -> tuple[int, ...]:
        """The leaves that say which frames items have: once written they stay."""
        pictures = sorted(place for pair in self.pairs for place in pair)
        return (*pictures, *self.ends, *(() if self.ids is None else (self.ids,)))

    def frame(self, place: int) -> tuple[int, ...]:
        """The shape of a frame of an observation."""
        shape = list(self.leaves[place].shape)
        if self.stack > 1:
            shape[self.dim] //= self.stack
        return tuple(shape)

    def axis(self, place: int) -> int:
        """The dim of the stack, counted from the end."""
        return self.dim if self.dim < 0 else self.dim - len(self.leaves[place].shape)

    def newest(self, leaf: Tensor, place: int) -> Tensor:
        """The newest frames of observations [n, *lanes, ...], as [items, ...]."""
        axis, size = self.axis(place), self.frame(place)
        items = leaf.detach().reshape(-1, *self.leaves[place].shape)
        return items if self.stack == 1 else items.narrow(axis, items.shape[axis] - size[axis], size[axis])

    def arrays(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of all that is kept: leaves, the frames of items, tables, and counters."""
        lead = (self.capacity, *self.lanes)
        rest = [self.leaves[place] for place in self.rest]
        tables = [self.leaves[obs] for obs, _ in self.pairs]
        return [
            *((spec.name, (*lead, *spec.shape), spec.dtype) for spec in rest),
            ("frames of items", (*lead, self.stack + 1), torch.int32),
            *(
                (spec.name, (self.frames, *self.frame(obs)), spec.dtype)
                for spec, (obs, _) in zip(tables, self.pairs, strict=True)
            ),
            ("free frames", (self.frames,), torch.int32),
            ("latest", (2, self.per_row), torch.int64),
            ("counts", (4,), torch.int64),
        ]

    def described(self) -> dict[str, Any]:
        """All but the leaves, as plain values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "leaves"}
        values["pairs"] = [list(pair) for pair in self.pairs]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclasses.dataclass
class _Write:
    """A checked write of the next rows."""

    leaves: list[Tensor]  # [n, *lanes, ...]
    index: np.ndarray  # [n, lanes, stack + 1]: the frames of items
    new: np.ndarray  # [2, n * lanes]: the frames that observations and next observations add; 0 for none
    latest: np.ndarray
    free: list[int]  # what is behind the first `kept` free frames
    kept: int
    used: int


class FrameRows(TorchRows):
    """Rows on the host that are written one after the other around the ring. See `LazyFrameStorage`."""

    in_place = False  # observations are put together when they are read
    on_host = True

    def __init__(self, scheme: Scheme, memory: Sequence[Tensor] | None = None) -> None:
        self.scheme, self.lanes, self.device = scheme, scheme.lanes, torch.device("cpu")
        self._write: _Write | None = None
        if memory is None:
            memory = [untouched_zeros(shape, dtype) for _, shape, dtype in scheme.arrays()]
            memory[-1][_USED] = 1  # the first frame is zeros
        self._tensors = list(memory)
        self._hold()

    def _hold(self) -> None:
        plain = [tensor.detach().as_subclass(Tensor) for tensor in self._tensors]
        count = len(self.scheme.rest) + 1
        self._kept = TorchRows(plain[:count], self.lanes)
        self._table = TorchRows(plain[count:-3], ())
        self._index = plain[count - 1].numpy().reshape(self.scheme.capacity, self.scheme.per_row, -1)
        self._free, self._latest, self._counts = (each.numpy() for each in plain[-3:])

    # ------------------------------------------------------------------ memory

    @property
    def memory(self) -> list[Tensor]:
        """All that is kept."""
        return self._tensors

    @property
    def tensors(self) -> list[Tensor]:
        """The leaves as a whole: copies of all observations."""
        return self.at(self.scheme.capacity, slice(None))

    def column(self, place: int) -> Tensor | None:
        """A leaf that is kept as it is; None for observations."""
        return self._kept.tensors[self.scheme.rest.index(place)] if place in self.scheme.rest else None

    def array(self, place: int) -> np.ndarray | None:
        return self._kept.array(self.scheme.rest.index(place)) if place in self.scheme.rest else None

    @property
    def host_arrays(self) -> None:
        """None: no journal guards frames."""
        return None

    @property
    def shared(self) -> bool:
        return all(tensor.is_shared() or tensor.numel() == 0 for tensor in self._tensors)

    def share(self) -> None:
        if not self.shared:
            try:
                self._tensors = [in_shared_memory(tensor) for tensor in self._tensors]
            finally:  # some may have moved when there was no memory for others
                self._hold()

    def clear(self) -> None:
        """Forget all rows."""
        self._counts[:] = 0
        self._counts[_USED] = 1
        self._latest[:] = 0

    # ------------------------------------------------------------------ reading

    def read(self, slots: Tensor, known: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        return self._whole(self._kept.read(slots))

    def at(self, filled: int, index: Any) -> list[Tensor]:
        return self._whole(self._kept.at(filled, index))

    def _whole(self, held: list[Tensor]) -> list[Tensor]:
        """All leaves of items; `held` are those that are kept as they are, and the frames."""
        *rest, index = held
        here, behind = self._observations(index[..., :-1]), self._observations(index[..., 1:])
        found = dict(zip(self.scheme.rest, rest, strict=True))
        for (obs, following), one, other in zip(self.scheme.pairs, here, behind, strict=True):
            found[obs], found[following] = one, other
        return [found[place] for place in range(len(self.scheme.leaves))]

    def _observations(self, index: Tensor) -> list[Tensor]:
        """For each pair the observations of frames [..., stack]."""
        frames = self._table.read(index.reshape(-1).long())
        made = []
        for found, (place, _) in zip(frames, self.scheme.pairs, strict=True):
            shape = self.scheme.leaves[place].shape
            if self.scheme.stack > 1:
                axis = 1 + len(shape) + self.scheme.axis(place)
                found = found.view(-1, self.scheme.stack, *found.shape[1:]).movedim(1, axis)
            made.append(found.reshape(*index.shape[:-1], *shape))
        return made

    # ------------------------------------------------------------------ writing

    def refuse(self, places: Any, leaves: Sequence[Tensor], in_order: bool) -> None:
        """Check that these are the next rows and prepare the write, or that the frames of items stay as they are.

        RuntimeError otherwise, and where there is no room for the last frames of trajectories; ValueError for observations
        that are not made of the frames of their trajectory.
        """
        self._write = None
        count = self._count_of_next(places) if in_order else 0
        if count:
            self._write = self._prepared(count, leaves)
        elif not self._is_as_stored(_index_of(places, self.scheme.capacity), leaves):
            raise RuntimeError(
                f"each frame is stored once, in the order of writing: the next row to write is {self._counts[_NEXT]}, and "
                "other rows can be written only with the observations, ends and ids that they have; nothing was written"
            )

    def _count_of_next(self, places: Any) -> int:
        """How many rows resolved places name, if these are the next ones; 0 otherwise."""
        rows = places[0] if isinstance(places, tuple) else places
        if not whole_rows(places):
            return 0
        if isinstance(rows, int):
            return int(rows == self._counts[_NEXT])
        if isinstance(rows, range | slice):
            named = np.arange(rows.start, rows.stop, rows.step or 1)
        else:
            named = np.asarray(rows)
        following = int(self._counts[_NEXT]) + np.arange(named.size)
        capacity = self.scheme.capacity
        return named.size if np.array_equal(named % capacity, following % capacity) else 0

    def _is_as_stored(self, index: Any, leaves: Sequence[Tensor]) -> bool:
        """Whether the leaves that say which frames items have are, in these, what is stored."""
        try:
            held = self.at(int(self._counts[_STORED]), index)
        except IndexError:  # of rows that are not stored
            return False
        return all(np.array_equal(_bits(leaves[place]), _bits(held[place])) for place in self.scheme.fixed)

    def _prepared(self, count: int, given: Sequence[Tensor]) -> _Write:
        """The write of the next rows: which frames it adds, which it gives back."""
        scheme, capacity, lanes = self.scheme, self.scheme.capacity, self.scheme.per_row
        shapes = [(count, *self.lanes, *spec.shape) for spec in scheme.leaves]
        leaves = [leaf.reshape(shape) for leaf, shape in zip(given, shapes, strict=True)]
        last = self._index[self._counts[_NEXT] - 1]  # [lanes, stack + 1]
        starts, ends, latest = self._boundaries(leaves)
        if scheme.check:
            self._refuse_others(leaves, starts, last)
        frames = _frames_of(starts, ends, last, scheme)
        kept = frames[-capacity:]
        numbers = np.zeros(2 * count * lanes, np.int32)  # of frames below 0, which are counted from the end
        going_on = np.flatnonzero(~starts[0])
        numbers[-1 - going_on] = last[going_on, -1]  # the next frame of the row before is that of this one
        missing = np.zeros(numbers.shape, np.bool_)
        missing[kept[kept < 0]] = True
        gone = self._given_back(count, {*kept[kept > 0].tolist(), *numbers[missing].tolist()})
        missing &= numbers == 0
        needed, free, used = int(np.count_nonzero(missing)), int(self._counts[_FREE]), int(self._counts[_USED])
        again = min(max(needed - len(gone), 0), free)
        fresh = max(needed - len(gone) - again, 0)
        if used + fresh > scheme.frames:
            raise RuntimeError(
                f"there is no room for {used + fresh - scheme.frames} of the frames with which trajectories end: build the "
                f"storage with more than finals={scheme.finals}; nothing was written"
            )
        found = [*gone[:needed], *self._free[free - again : free].tolist(), *range(used, used + fresh)]
        numbers[missing] = found[::-1]
        index = np.where(frames < 0, numbers[np.minimum(frames, -1)], frames)
        new = np.where(missing, numbers, 0)[::-1].reshape(2, -1)
        return _Write(leaves, index, new, latest, gone[needed:], free - again, used + fresh)

    def _boundaries(self, leaves: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where trajectories start and end in the next rows, bool [n, lanes] each, and the latest row after them."""
        shape = len(leaves[0]), self.scheme.per_row
        ended = np.zeros(shape, np.bool_)
        for place in self.scheme.ends:
            ended |= _bits(leaves[place]).reshape(shape) != 0
        starts = np.concatenate([self._latest[None, _OPEN] == 0, ended[:-1]])
        latest = np.stack([~ended[-1], np.zeros(shape[1])]).astype(np.int64)
        if self.scheme.ids is not None:
            ids = _bits(leaves[self.scheme.ids]).reshape(shape).astype(np.int64)
            starts |= np.diff(ids, axis=0, prepend=self._latest[None, _ID]) != 0
            latest[_ID] = ids[-1]
        return starts, np.concatenate([starts[1:], ended[-1:]]), latest

    def _given_back(self, count: int, wanted: set[int]) -> list[int]:
        """The frames that no item has any more once `count` rows are written, which have these of the stored ones."""
        capacity, start, stored = self.scheme.capacity, int(self._counts[_NEXT]), int(self._counts[_STORED])
        rows = np.arange(start, start + min(count, capacity)) % capacity
        over = self._index[rows[rows < stored]]
        if 0 < len(over) < stored:  # of the frames of these rows the oldest one that stays can have some
            wanted = {*wanted, *self._index[(start + count) % capacity].reshape(-1).tolist()}
        # Older frames of a row are those of the row before.
        frames = {*over[:1].reshape(-1).tolist(), *over[1:, :, -2:].reshape(-1).tolist()}
        return sorted(frames - wanted - {0})

    def write_run(self, start: int, leaves: Sequence[Tensor]) -> None:
        write, self._write, scheme = self._write, None, self.scheme
        if write is None:  # rows that keep their frames
            count = leaves[0].shape[0]
            return self.write_at(_index_of(range(start, start + count), scheme.capacity), leaves)
        for side, numbers in enumerate(write.new):
            items = numbers.nonzero()[0]
            if not items.size:
                continue
            into = numbers[items]
            apart = (items[1:] - items[:-1] != 1) | (into[1:] - into[:-1] != 1)
            cuts = [0, *(apart.nonzero()[0] + 1).tolist(), items.size]
            runs = [(int(items[cut]), int(into[cut]), stop - cut) for cut, stop in itertools.pairwise(cuts)]
            for table, pair in zip(self._table.tensors, scheme.pairs, strict=True):
                frames = scheme.newest(write.leaves[pair[side]], pair[side])
                for first, at, size in runs:
                    table[at : at + size].copy_(frames[first : first + size])
        index = torch.from_numpy(write.index.astype(np.int32).reshape(len(write.index), *self.lanes, -1))
        self._kept.write_run(start, [*(write.leaves[place] for place in scheme.rest), index])
        counts, stop = self._counts, write.kept + len(write.free)
        self._free[write.kept : stop], self._latest[:] = write.free, write.latest
        stored = min(int(counts[_STORED]) + len(index), scheme.capacity)
        counts[:] = (start + len(index)) % scheme.capacity, stored, stop, write.used
        return None

    def write_at(self, index: Any, leaves: Sequence[Tensor]) -> None:
        if self._write is not None:
            self.write_run(int(self._counts[_NEXT]), leaves)
            return
        index = _index_of(index, self.scheme.capacity)
        frames = self._kept.at(self.scheme.capacity, index)[-1].clone()
        self._kept.write_at(index, [*(leaves[place] for place in self.scheme.rest), frames])

    # ------------------------------------------------------------------ checks

    def _refuse_others(self, leaves: Sequence[Tensor], starts: np.ndarray, last: np.ndarray) -> None:
        """ValueError for observations that are not made of the frames of their trajectory: others would be read."""
        scheme, stack = self.scheme, self.scheme.stack
        expected = self._observations(torch.from_numpy(last[:, 1:]))
        for (place, following), before in zip(scheme.pairs, expected, strict=True):
            spec = scheme.leaves[place]
            obs, after = (_bits(leaves[each]).reshape(*starts.shape, *spec.shape) for each in (place, following))
            unlike = np.concatenate([_differ(obs[:1], _bits(before)[None]), _differ(obs[1:], after[:-1])])
            _refuse(
                unlike & ~starts,
                f"{spec.name} is not the next observation of the item before it in its trajectory. Mark where trajectories "
                "end (end_keys, or traj_key), and store environments that take turns side by side (ndim=2)",
            )
            if stack == 1:
                continue
            obs, after = (_split(each, stack, scheme.axis(place)) for each in (obs, after))  # [n, lanes, stack, ...]
            begin = obs[starts]
            padding = np.zeros_like(begin[:, :1]) if scheme.zeros else begin[:, -1:]
            unlike = np.zeros(starts.shape, np.bool_)
            unlike[starts] = _differ(begin[:, :-1], padding, 1)
            what = "zeros" if scheme.zeros else "its newest one"
            _refuse(
                unlike,
                f"{spec.name} begins a trajectory, and its older frames are not {what}: they would not be known. Record "
                "episodes from their first step on (see `padding`)",
            )
            _refuse(
                _differ(after[:, :, :-1], obs[:, :, 1:]),
                f"{scheme.leaves[following].name} does not begin with the last {stack - 1} frames of {spec.name}",
            )

    # ------------------------------------------------------------------ checkpoints

    def used(self, counts: Sequence[int] | np.ndarray | None = None) -> dict[str, list[np.ndarray]]:
        """The memory that is in use, or would be with other counts: views of rows, frames and numbers of free frames."""
        counts = self._counts if counts is None else counts
        return {
            "rows": [bridge.numpy_view(each)[: counts[_STORED]] for each in self._kept.tensors],
            "frames": [bridge.numpy_view(each)[: counts[_USED]] for each in self._table.tensors],
            "free": [self._free[: counts[_FREE]]],
            "latest": [self._latest],
            "counts": [self._counts],
        }

    def fits(self, counts: np.ndarray, filled: int) -> bool:
        """Whether saved counts can be those of so many rows."""
        scheme, least = self.scheme, (0, filled, 0, 1)
        most = scheme.capacity - 1, filled, scheme.frames, scheme.frames
        return bool((counts >= least).all() and (counts <= most).all())

    def is_sound(self) -> bool:
        """Whether items name frames that there are."""
        used, named = int(self._counts[_USED]), self.used()
        return all(
            not each.size or (each.min() >= 0 and each.max() < used) for each in (named["rows"][-1], *named["free"])
        )


def _index_of(places: Any, capacity: int) -> Any:
    """Resolved places as an index; a range is of rows around the ring."""
    return torch.arange(places.start, places.stop, device="cpu") % capacity if isinstance(places, range) else places


def _frames_of(starts: np.ndarray, ends: np.ndarray, last: np.ndarray, scheme: Scheme) -> np.ndarray:
    """The frames of rows, [n, lanes, stack + 1]; those that rows add are below 0, -1 for that of the first item."""
    count, lanes = starts.shape
    row, lane = np.arange(count)[:, None], np.arange(lanes)
    begun = np.maximum.accumulate(np.where(starts, row, -1), 0)[..., None]  # -1: before these rows
    wanted = row[..., None] - np.arange(scheme.stack - 1, -1, -1)
    frames = -1 - (np.maximum(wanted, begun) * lanes + lane[:, None])
    if scheme.zeros:
        frames[wanted < begun] = 0
    at, of, column = ((begun < 0) & (wanted < 0)).nonzero()
    frames[at, of, column] = last[of, at + column + 1]
    apart = ends | (row == count - 1)
    behind = np.where(apart, count * lanes + row * lanes + lane, (row + 1) * lanes + lane)
    return np.concatenate([frames, -1 - behind[..., None]], 2)


def _refuse(wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        row, lane = (int(each[0]) for each in wrong.nonzero())
        at = f"row {row}" + (f", lane {lane}" if wrong.shape[1] > 1 else "")
        raise ValueError(f"in {at} of the data {what}; nothing was written. check=False takes it as it is")


def _differ(left: np.ndarray, right: np.ndarray, dims: int = 2) -> np.ndarray:
    """Which of the arrays behind some leading dims are not the same. Takes little memory beside them."""
    step = max(1, _AT_ONCE * len(left) // max(1, left.nbytes))
    parts = [slice(start, start + step) for start in range(0, len(left), step)] or [slice(0)]
    return np.concatenate([(left[part] != right[part]).any(tuple(range(dims, left.ndim))) for part in parts])


def _split(obs: np.ndarray, stack: int, axis: int) -> np.ndarray:
    """Observations [n, lanes, ...] as [n, lanes, stack, ...]."""
    axis += obs.ndim
    return np.moveaxis(obs.reshape(*obs.shape[:axis], stack, -1, *obs.shape[axis + 1 :]), axis, 2)


def _bits(leaf: Tensor) -> np.ndarray:
    """The values of a tensor as they compare bit for bit."""
    values = bridge.numpy_view(leaf.detach().cpu().resolve_conj().resolve_neg())
    if values.dtype.kind not in "fc":
        return values
    size = values.dtype.itemsize
    return np.ascontiguousarray(values).view(f"u{size}" if size <= 8 else f"V{size}")
