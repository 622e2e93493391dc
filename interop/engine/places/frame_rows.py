"""Rows whose observations are kept as single frames, each once, and put together when they are read.

A table of frames has, one after the other: a frame of zeros; the next frame of the newest row, one a lane; a ring of
capacity + stack - 1 rows with the newest frame of each item; and the last frames of trajectories, the finals. Each item has
the numbers of its frames in the table: those of its stack, the oldest first, and the newest frame of its next observation.
That one is the frame of the next row, unless a trajectory ends in between.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.data import bridge
from interop.data.index import whole_rows
from interop.data.layout import LeafSpec
from interop.engine.places.heap import untouched_zeros
from interop.host import markers
from interop.host.markers import END, FIRST, Markers
from interop.host.rows import TorchRows

_OPEN, _ID, _AGE = range(3)  # of the newest row of each lane: whether its trajectory goes on, its id, steps before it
_WRITTEN, _FREE, _USED = range(3)  # counts: rows ever written, free finals, finals ever used
_AT_ONCE = 1 << 20  # bytes that are compared
_LOOKED_FOR = 4096  # stored rows in which interleaved trajectories are looked for


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Which leaves of items are frames, and which mark the ends of trajectories. Leaves are named by their place."""

    leaves: tuple[LeafSpec, ...]
    pairs: tuple[tuple[int, int], ...]  # observations and next observations
    ends: tuple[int, ...]  # a trajectory ends with an item for which one of these is true
    ids: tuple[int, ...]  # another value than in the previous row begins a trajectory
    firsts: tuple[int, ...]  # a trajectory begins with an item for which one of these is true
    masks: tuple[int, ...]  # false for padding, which is a trajectory of its own
    stack: int
    dim: int  # of an observation: the frames of a stack lie side by side along it
    zeros: bool  # zeros precede the first frame of a trajectory; otherwise copies of that frame do
    check: bool
    capacity: int
    lanes: tuple[int, ...]
    finals: int

    @functools.cached_property
    def per_row(self) -> int:
        return math.prod(self.lanes)

    @property
    def ring_rows(self) -> int:
        return self.capacity + self.stack - 1

    @functools.cached_property
    def first_final(self) -> int:
        return 1 + (1 + self.ring_rows) * self.per_row

    @property
    def frames(self) -> int:
        """The number of frames in a table."""
        return self.first_final + self.finals

    @functools.cached_property
    def rest(self) -> tuple[int, ...]:
        """The leaves that are kept as they are."""
        pictures = {place for pair in self.pairs for place in pair}
        return tuple(place for place in range(len(self.leaves)) if place not in pictures)

    @property
    def fixed(self) -> set[int]:
        """The leaves that determine the frames of items."""
        marks = (*self.ends, *self.ids, *self.firsts, *self.masks)
        return {*(place for pair in self.pairs for place in pair), *marks}

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
        """The newest frames of observations [..., *shape]."""
        leaf = leaf.detach()
        if self.stack == 1:
            return leaf
        axis = self.axis(place)
        size = leaf.shape[axis] // self.stack
        return leaf.narrow(axis, leaf.shape[axis] - size, size)

    def arrays(self) -> list[tuple[str, str, tuple[int, ...], torch.dtype]]:
        """Part, name, shape and dtype of all memory: leaves, frames of items, tables, and counters."""
        lead = (self.capacity, *self.lanes)
        rest = [self.leaves[place] for place in self.rest]
        tables = [(self.leaves[obs], (self.frames, *self.frame(obs))) for obs, _ in self.pairs]
        return [
            *(("items", spec.name, (*lead, *spec.shape), spec.dtype) for spec in rest),
            ("items", "frames of items", (*lead, self.stack + 1), torch.int32),
            *(("frames", spec.name, shape, spec.dtype) for spec, shape in tables),
            ("counters", "free finals", (self.finals,), torch.int32),
            ("counters", "newest row", (3, self.per_row), torch.int64),
            ("counters", "counts", (3,), torch.int64),
        ]

    def described(self) -> dict[str, Any]:
        """All but the leaves and the marks of trajectories, which only count for new rows, as plain values."""
        hidden = ("leaves", "ends", "ids", "firsts", "masks")
        values = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in hidden
        }
        values["pairs"] = [list(pair) for pair in self.pairs]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclasses.dataclass
class _Write:
    """A checked write of the next rows."""

    leaves: Sequence[Tensor]  # [n, *lanes, ...]
    index: np.ndarray  # [1 + n, lanes, stack + 1]: the frames of items, from the previous row on
    closing: np.ndarray  # [1 + n, lanes]: whether the next frame of an item is a final
    finals: np.ndarray  # the numbers of these finals
    newest: np.ndarray  # [3, lanes]
    free: np.ndarray  # the finals that stay free
    used: int


class FrameRows(TorchRows):
    """Rows on the host that are written one after the other around the ring. See `LazyFrameStorage`."""

    in_place = False  # observations are put together when they are read
    on_host = True
    host_arrays = None  # no journal guards frames

    def __init__(self, scheme: Scheme, memory: Sequence[Tensor] | None = None) -> None:
        self.scheme, self.lanes, self.device = scheme, scheme.lanes, torch.device("cpu")
        self._write: _Write | None = None
        self._tensors = list(memory or [untouched_zeros(shape, dtype) for _, _, shape, dtype in scheme.arrays()])
        self._hold()

    def _hold(self) -> None:
        scheme = self.scheme
        plain = [tensor.detach().as_subclass(Tensor) for tensor in self._tensors]
        kept = len(scheme.rest) + 1
        self._kept, self._tables = TorchRows(plain[:kept], self.lanes), plain[kept:-3]
        self._table = TorchRows(self._tables, ())
        rings = [table[1 + scheme.per_row : scheme.first_final] for table in self._tables]
        self._ring = TorchRows([ring.view(-1, *self.lanes, *ring.shape[1:]) for ring in rings], self.lanes)
        self._index = plain[kept - 1].numpy().reshape(scheme.capacity, scheme.per_row, -1)
        self._back = np.arange(scheme.stack - 1, -2, -1)  # rows between an item and its frames; -1 is the next row
        self._ring_start = 1 + scheme.per_row + np.arange(scheme.per_row)[:, None]  # of each lane
        self._free, self._newest, self.counts = (each.numpy() for each in plain[-3:])

    @property
    def fixed(self) -> Collection[int]:
        return self.scheme.fixed

    @property
    def stored(self) -> int:
        return min(int(self.counts[_WRITTEN]), self.scheme.capacity)

    # ------------------------------------------------------------------ memory

    def column(self, place: int) -> Tensor | None:
        return self._kept.column(self.scheme.rest.index(place)) if place in self.scheme.rest else None

    def array(self, place: int) -> np.ndarray | None:
        return self._kept.array(self.scheme.rest.index(place)) if place in self.scheme.rest else None

    def copies(self, filled: int) -> list[Tensor]:
        return [tensor.clone() for tensor in self._tensors]

    def clear(self) -> None:
        """Forget all rows."""
        self.counts[:] = 0
        self._newest[:] = 0

    def used(self, counts: np.ndarray | None = None) -> dict[str, list[np.ndarray]]:
        """Views of the memory in use, or of the memory that other counts would use."""
        written, free, used = (self.counts if counts is None else counts).tolist()
        scheme, tables = self.scheme, list(map(bridge.numpy_view, self._tables))
        stop = 1 + (1 + min(written, scheme.ring_rows)) * scheme.per_row
        return {
            "counts": [self.counts],
            "newest": [self._newest],
            "free": [self._free[:free]],
            "rows": [bridge.numpy_view(each)[: min(written, scheme.capacity)] for each in self._kept.tensors],
            "frames": [table[:stop] for table in tables],
            "finals": [table[scheme.first_final : scheme.first_final + used] for table in tables],
        }

    # ------------------------------------------------------------------ reading

    def read(self, slots: Tensor, known: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        found = self._whole(self._kept.read(slots))
        for place, leaf in (known or {}).items():
            found[place] = leaf
        return found

    def at(self, filled: int, index: Any) -> list[Tensor]:
        return self._whole(self._kept.at(filled, index))

    def _whole(self, kept: list[Tensor]) -> list[Tensor]:
        """All leaves of items, from those that are kept as they are and the frames of the items."""
        *rest, index = kept
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

    def before_write(self) -> tuple[Any, ...]:
        """What `put_back` needs. O(lanes and finals)."""
        per_row, last = self.scheme.per_row, (int(self.counts[_WRITTEN]) - 1) % self.scheme.capacity
        heads = [table[1 : 1 + per_row].clone() for table in self._tables]
        return last, heads, *(each.copy() for each in (self._index[last], self._free, self._newest, self.counts))

    def put_back(self, before: tuple[Any, ...]) -> None:
        """Be as before a write, but for rows that it has overwritten: it can be checked and made again."""
        last, heads, index, self._free[:], self._newest[:], self.counts[:] = before
        self._index[last] = index
        for table, head in zip(self._tables, heads, strict=True):
            table[1 : 1 + self.scheme.per_row] = head

    def refuse(self, places: Any, leaves: Sequence[Tensor], in_order: bool) -> None:
        """Check and prepare the write of the next rows.

        RuntimeError for other rows, or where there is no room for the last frames of trajectories; ValueError for
        observations that are not made of the frames of their trajectory.
        """
        self._write = None
        rows = places[0] if isinstance(places, tuple) else places
        if isinstance(rows, int):
            rows, leaves = range(rows, rows + 1), [leaf.unsqueeze(0) for leaf in leaves]
        following, capacity = int(self.counts[_WRITTEN]) % self.scheme.capacity, self.scheme.capacity
        known = in_order and whole_rows(places) and isinstance(rows, range | slice) and rows.step in (1, None)
        if not known or rows.start % capacity != following or rows.stop <= rows.start:
            raise RuntimeError(
                f"each frame is stored once, in the order of writing: the next row to write is {following}. Use set_() or "
                "update_() to edit entries of stored items other than observations, ends and ids; nothing was written"
            )
        self._write = self._prepared(leaves)

    def _prepared(self, leaves: Sequence[Tensor]) -> _Write:
        scheme, count, lanes = self.scheme, len(leaves[0]), self.scheme.per_row
        written, free, used = self.counts.tolist()
        previous = self._index[(written - 1) % scheme.capacity]
        was_open = self._newest[_OPEN] != 0

        # Where trajectories start and end.
        marks = self._marks([leaf.reshape(count, lanes, *leaf.shape[1 + len(self.lanes) :]) for leaf in leaves])
        before = self._stored_marks(1) if written else None
        starts = markers.starts(marks, before)
        ended = marks.flags & END != 0
        if scheme.stack > 1:
            self._refuse_interleaved(marks, before, starts)
        newest = np.zeros((3, lanes), np.int64)
        if scheme.ids:
            newest[_ID] = marks.ids[-1, :, 0]
        if scheme.check:
            self._check(leaves, starts, previous)

        # The frames of each item.
        row = np.arange(count)[:, None]
        age = row - np.maximum.accumulate(np.where(starts, row, -1 - self._newest[_AGE]), 0)
        newest[_OPEN], newest[_AGE] = ~ended[-1], age[-1]
        index = np.empty((1 + count, lanes, scheme.stack + 1), np.int32)
        index[0], new = previous, index[1:]
        back = np.minimum(self._back, age[..., None])
        new[...] = (written + row[..., None] - back) % scheme.ring_rows * lanes + self._ring_start
        if scheme.zeros:
            new[self._back > age[..., None]] = 0
        index[0, was_open, -1] = new[0, was_open, -2]
        new[-1, :, -1] = self._ring_start[:, 0] - lanes

        # The last frames of trajectories that are stored after the write, and those that are free.
        closing = np.concatenate([starts[:1] & was_open, starts[1:], ended[-1:]])
        closing[: max(1 + count - scheme.capacity, 0)] = False
        over = (written + np.arange(min(count, scheme.capacity))) % scheme.capacity
        last = self._index[over[over < self.stored], :, -1]
        available = np.concatenate([self._free[:free], last[last >= scheme.first_final] - scheme.first_final])
        needed = int(np.count_nonzero(closing))
        fresh = max(needed - available.size, 0)
        if used + fresh > scheme.finals:
            raise RuntimeError(
                f"there is no room for {used + fresh - scheme.finals} of the frames with which trajectories end: build the "
                f"storage with more than finals={scheme.finals}; nothing was written"
            )
        kept = available.size + fresh - needed
        finals = available[kept:]
        if needed:
            finals = scheme.first_final + np.concatenate([finals, np.arange(used, used + fresh)])
            index[closing, -1] = finals
        return _Write(leaves, index, closing, finals, newest, available[:kept], used + fresh)

    def _marks(self, leaves: Sequence[Tensor]) -> Markers:
        """The markers of rows [n, lanes, ...]."""
        scheme, shape = self.scheme, leaves[0].shape[:2]
        groups = (scheme.ids, scheme.ends, scheme.firsts, scheme.masks)
        found = ([_numbers(leaves[place]).reshape(shape) for place in group] for group in groups)
        return Markers.of((shape[0], shape[1]), *found)

    def _stored_marks(self, count: int) -> Markers:
        """The markers of the newest rows, `count` at most, the oldest first."""
        scheme, written = self.scheme, int(self.counts[_WRITTEN])
        rows = torch.arange(written - min(count, self.stored), written, device="cpu") % scheme.capacity
        columns: dict[int, Tensor] = {}
        for place in (*scheme.ids, *scheme.ends, *scheme.firsts, *scheme.masks):
            column = self.column(place)
            assert column is not None
            columns[place] = column[rows].reshape(len(rows), scheme.per_row)
        empty = torch.zeros(len(rows), scheme.per_row, device="cpu")
        return self._marks([columns.get(place, empty) for place in range(len(scheme.leaves))])

    def _refuse_interleaved(self, marks: Markers, before: Markers | None, starts: np.ndarray) -> None:
        """ValueError where a row continues a trajectory with rows of others in between: its frames are not before it."""
        first = marks.flags & FIRST != 0
        if before is None:
            first[0] = True
        if not marks.ids.shape[-1] or starts.shape[1] > 1 or not (starts & ~first).any():
            return  # lanes are environments. An end before a row says nothing: it may be that of another environment
        every = marks
        if before is not None:
            known = self._stored_marks(_LOOKED_FOR)
            every = Markers(np.concatenate([known.ids, marks.ids]), np.concatenate([known.flags, marks.flags]))
        last = markers.previous(every)
        apart = ((last >= 0) & (last < np.arange(-1, len(last) - 1)))[len(last) - len(starts) :]
        if apart.any():
            raise ValueError(
                f"row {int(apart.argmax())} of the data continues a trajectory with rows of others in between, and its "
                "older frames are taken from the rows before it: store parallel environments side by side (ndim=2), or one "
                "trajectory after the other; nothing was written"
            )

    def write_run(self, start: int, leaves: Sequence[Tensor], index: Tensor | None = None) -> None:
        write, self._write, scheme = self._write, None, self.scheme
        assert write is not None, "rows are checked by `refuse` first"
        count, written = len(write.leaves[0]), int(self.counts[_WRITTEN])
        for table, (_, place) in zip(self._tables, scheme.pairs, strict=True):
            frames = scheme.newest(write.leaves[place], place).reshape(count, scheme.per_row, *table.shape[1:])
            if write.finals.size:
                (row, lane), finals = map(torch.from_numpy, write.closing.nonzero()), torch.from_numpy(write.finals)
                before = row == 0  # the frames of the previous row are in the table
                table[finals[before]] = table[1 + lane[before]]
                table[finals[~before]] = frames[row[~before] - 1, lane[~before]]
            table[1 : 1 + scheme.per_row] = frames[-1]
        self._ring.write_run(
            written % scheme.ring_rows, [scheme.newest(write.leaves[obs], obs) for obs, _ in scheme.pairs]
        )
        if written:
            self._index[(written - 1) % scheme.capacity] = write.index[0]
        frames_of = torch.from_numpy(write.index[1:]).reshape(count, *self.lanes, -1)
        self._kept.write_run(start, [*(write.leaves[place] for place in scheme.rest), frames_of])
        self._free[: len(write.free)], self._newest[:] = write.free, write.newest
        self.counts[:] = written + count, len(write.free), write.used

    def write_at(self, index: Any, leaves: Sequence[Tensor]) -> None:
        self.write_run(int(self.counts[_WRITTEN]) % self.scheme.capacity, leaves)

    def _check(self, leaves: Sequence[Tensor], starts: np.ndarray, previous: np.ndarray) -> None:
        """ValueError for observations that are not made of the frames of their trajectory: others would be read."""
        scheme, stack = self.scheme, self.scheme.stack
        expected = self._observations(torch.from_numpy(previous[:, 1:]))
        for (place, following), before in zip(scheme.pairs, expected, strict=True):
            spec = scheme.leaves[place]
            obs, after = (_bits(leaves[each]).reshape(*starts.shape, *spec.shape) for each in (place, following))
            unlike = np.concatenate([_differ(obs[:1], _bits(before)[None]), _differ(obs[1:], after[:-1])])
            _refuse(
                unlike & ~starts,
                f"{spec.name} is not the next observation of the previous item in its trajectory. Mark where trajectories "
                "end (end_keys, or traj_key), and store parallel environments side by side (ndim=2)",
            )
            if stack == 1:
                continue
            obs, after = (_split(each, stack, scheme.axis(place)) for each in (obs, after))  # [n, lanes, stack, ...]
            first = obs[starts][None]
            older = np.zeros_like(first[:, :, :1]) if scheme.zeros else first[:, :, -1:]
            unlike = np.zeros(starts.shape, np.bool_)
            unlike[starts] = _differ(first[:, :, :-1], older)[0]
            _refuse(
                unlike,
                f"{spec.name} begins a trajectory, and its older frames are not {'zeros' if scheme.zeros else 'its newest'}"
                ": record episodes from their first step on (see `padding`)",
            )
            _refuse(
                _differ(after[:, :, :-1], obs[:, :, 1:]),
                f"{scheme.leaves[following].name} does not begin with the last {stack - 1} frames of {spec.name}",
            )


def _refuse(wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        row, lane = (int(each[0]) for each in wrong.nonzero())
        at = f"row {row}" + (f", lane {lane}" if wrong.shape[1] > 1 else "")
        raise ValueError(f"in {at} of the data {what}; nothing was written. check=False takes it as it is")


def _differ(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Which items of arrays [n, lanes, ...] are not equal. Compares a part at a time, which takes little memory."""
    found = np.zeros(left.shape[:2], np.bool_)
    step = max(1, _AT_ONCE * len(left) // max(1, left.nbytes))
    for start in range(0, len(left), step):
        part = slice(start, start + step)
        found[part] = (left[part] != right[part]).any(tuple(range(2, left.ndim)))
    return found


def _split(obs: np.ndarray, stack: int, axis: int) -> np.ndarray:
    """Observations [n, lanes, ...] as [n, lanes, stack, ...]."""
    axis += obs.ndim
    return np.moveaxis(obs.reshape(*obs.shape[:axis], stack, -1, *obs.shape[axis + 1 :]), axis, 2)


def _numbers(leaf: Tensor) -> np.ndarray:
    """A tensor as an array of numbers that NumPy knows."""
    held = leaf.detach().cpu()
    found: np.ndarray = (held.double() if held.is_floating_point() else held).numpy()
    return found


def _bits(leaf: Tensor) -> np.ndarray:
    """The values of a tensor as integers or bytes, which compare bit for bit."""
    values = bridge.numpy_view(leaf.detach().cpu().resolve_conj().resolve_neg())
    if values.dtype.kind not in "fc":
        return values
    size = values.dtype.itemsize
    return np.ascontiguousarray(values).view(f"u{size}" if size <= 8 else f"V{size}")
