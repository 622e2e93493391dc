"""Rows whose observations are kept as single frames, and put together when they are read."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.data import bridge
from interop.data.index import as_int, flat_slots, whole_rows
from interop.host.rows import TorchRows, _extents, _Items, _on_host
from interop.shared.shared_int import in_shared_memory
from interop.storages.frame_scheme import OPEN, Plan, Scheme, bits, planned, refuse_strangers

# Counts: the row that is written next, rows stored, where in the ring of frames the next row begins, finals that are
# free again, finals ever used.
_NEXT, _STORED, _CURSOR, _FREE, _USED = range(5)


class FrameRows(TorchRows):
    """Rows on the host that are written one after the other around the ring. See `LazyFrameStorage`."""

    in_place = False  # observations are put together when they are read

    def __init__(self, scheme: Scheme, memory: Sequence[Tensor]) -> None:
        self.scheme, self.lanes, self.device = scheme, scheme.lanes, torch.device("cpu")
        self._plan: Plan | None = None
        self._tensors = list(memory)
        self._hold()

    def _hold(self) -> None:
        scheme, rest = self.scheme, len(self.scheme.rest)
        plain = [tensor.detach().as_subclass(Tensor) for tensor in self._tensors]
        self._rest = TorchRows(plain[:rest], self.lanes)
        tables = plain[rest:-5]
        self._tables = [bridge.numpy_view(table) for table in tables]
        self._frames = [_Items(table, ()) for table in tables]
        ring, shape = scheme.frame_rows * scheme.per_row, (scheme.frame_rows, scheme.per_row)
        self._rings = [TorchRows([table[:ring].view(*shape, *table.shape[1:])], (scheme.per_row,)) for table in tables]
        self._step, self._final, self._free, self._latest, self._counts = (each.numpy() for each in plain[-5:])
        self._extents = _extents(plain)
        # By leaf, as in any rows; None for observations, of which no memory is to be seen.
        self._plain: Any = self._by_leaf(plain[:rest])
        self._numpy: Any = self._by_leaf(self._rest._numpy)
        self._items: Any = self._by_leaf(self._rest._items)
        self._back = np.arange(scheme.stack - 1, -1, -1)

    def _by_leaf(self, of_rest: Any) -> list[Any]:
        held = dict(zip(self.scheme.rest, of_rest, strict=True))
        return [held.get(place) for place in range(len(self.scheme.leaves))]

    # ------------------------------------------------------------------ memory

    @property
    def memory(self) -> list[Tensor]:
        """All that is kept."""
        return self._tensors

    @property
    def tensors(self) -> list[Tensor]:
        """The leaves as a whole: copies of all observations."""
        return self.at(self.scheme.capacity, slice(None))

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
        self._final[: self._counts[_STORED] * self.scheme.per_row] = 0
        self._counts[[_NEXT, _STORED, _FREE, _USED]] = 0
        self._latest[OPEN] = 0

    # ------------------------------------------------------------------ reading

    def read(self, slots: Tensor, known: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        at = slots.cpu().numpy()
        found = dict(known or {})
        for place in self.scheme.rest:
            if place not in found:
                found[place] = self._items[place].read(slots, at)
        return self._whole(found, at, at.shape)

    def read_into(self, slots: Tensor, part: int, leaves: Sequence[Tensor], views: Sequence[np.ndarray]) -> None:
        at = slots.numpy()
        for place in self.scheme.rest:
            self._items[place].read_into(slots, at, part, leaves[place], views[place])
        for pair, found in zip(self.scheme.pairs, self._observations(at), strict=True):
            for place, leaf in zip(pair, found, strict=True):
                leaves[place][part] = leaf

    def at(self, filled: int, index: Any) -> list[Tensor]:
        slots = self._slots(filled, index)
        return self._whole(
            {place: self._plain[place][:filled][index] for place in self.scheme.rest}, slots, slots.shape
        )

    def _whole(self, rest: dict[int, Tensor], slots: np.ndarray, shape: tuple[int, ...]) -> list[Tensor]:
        """All leaves of the items at slots, in this shape."""
        for pair, found in zip(self.scheme.pairs, self._observations(slots.reshape(-1)), strict=True):
            rest.update(
                (place, leaf.reshape((*shape, *leaf.shape[1:]))) for place, leaf in zip(pair, found, strict=True)
            )
        return [rest[place] for place in range(len(self.scheme.leaves))]

    def _slots(self, filled: int, index: Any) -> np.ndarray:
        """The flat slots that an index over filled rows names, in the shape that it gives."""
        per_row, row = self.scheme.per_row, as_int(index)
        if row is None and not isinstance(index, slice):
            return torch.arange(filled * per_row, device="cpu").reshape(filled, *self.lanes)[index].numpy()
        rows = np.arange(filled)[index] if row is None else np.asarray(row % filled)
        return (rows[..., None] * per_row + np.arange(per_row)).reshape((*rows.shape, *self.lanes))

    def _observations(self, slots: np.ndarray) -> list[tuple[Tensor, Tensor]]:
        """For each pair the observations and next observations at flat slots, [n, ...] each."""
        here, following = self._places(slots)
        return [(self._taken(pair, here), self._taken(pair, following)) for pair in range(len(self._frames))]

    def _taken(self, pair: int, places: np.ndarray) -> Tensor:
        """Observations of a pair, of the frames at places, which lie one after the other."""
        found, stack = self._frames[pair].read(torch.from_numpy(places), places), self.scheme.stack
        if stack == 1:
            return found
        place = self.scheme.pairs[pair][0]
        shape, count = self.scheme.leaves[place].shape, len(places) // stack
        axis = 1 + len(shape) + self.scheme.axis(place)
        return found.view(count, stack, *found.shape[1:]).movedim(1, axis).reshape(count, *shape)

    def _places(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the frames of items at flat slots are, the oldest of each first, and those of their next observations."""
        scheme, per_row = self.scheme, self.scheme.per_row
        rows = slots if per_row == 1 else slots // per_row
        lane = 0 if per_row == 1 else slots % per_row
        newest = int(self._counts[_CURSOR]) - 1 - (int(self._counts[_NEXT]) - 1 - rows) % scheme.capacity
        final, finals = self._final.take(slots).astype(np.int64), scheme.frame_rows * per_row
        behind = (newest + 1) % scheme.frame_rows * per_row + lane
        behind = np.where(final > 0, finals - 1 + final, behind)
        if scheme.stack == 1:
            return newest % scheme.frame_rows * per_row + lane, behind
        step = self._step.take(slots)[:, None]
        here = newest[:, None] - np.minimum(step, self._back)
        here = here % scheme.frame_rows * per_row + (lane if per_row == 1 else slots[:, None] % per_row)
        if scheme.zeros:
            here[self._back > step] = finals + scheme.finals
        following = np.concatenate([here[:, 1:], behind[:, None]], 1)
        return here.reshape(-1), following.reshape(-1)

    # ------------------------------------------------------------------ writing

    def refuse(self, places: Any, leaves: Sequence[Tensor], in_order: bool) -> None:
        """See that these are the next rows and plan the write, or that the frames of items stay as they are.

        RuntimeError where neither is so, and for more trajectories than there is room for their last frames; ValueError
        for observations that are not made of the frames of their trajectory.
        """
        self._plan = None
        count = self._count_of_next(places) if in_order else 0
        if count:
            self._plan = self._planned(count, leaves)
        elif not self._is_as_stored(places, leaves):
            raise RuntimeError(
                f"each frame is stored once, in the order of writing: the next row to write is {self._counts[_NEXT]}, and "
                "other rows can be written only with the observations, ends and ids that they have; nothing was written"
            )

    def _count_of_next(self, places: Any) -> int:
        """How many rows resolved places name, if these are the next ones; 0 otherwise."""
        capacity, start = self.scheme.capacity, int(self._counts[_NEXT])
        rows = places[0] if isinstance(places, tuple) else places
        if not whole_rows(places):
            return 0
        if isinstance(rows, int):
            return int(rows == start)
        if isinstance(rows, range):
            return len(rows) if rows.start % capacity == start else 0
        named = np.arange(rows.start, rows.stop, rows.step or 1) if isinstance(rows, slice) else rows.numpy()
        expected = (start + np.arange(len(named))) % capacity if named.ndim == 1 else None
        return len(named) if expected is not None and np.array_equal(named, expected) else 0

    def _is_as_stored(self, places: Any, leaves: Sequence[Tensor]) -> bool:
        """Whether what says which frames items have is, in these leaves, what is stored."""
        if isinstance(places, range):
            places = torch.tensor([*places], dtype=torch.int64, device="cpu") % self.scheme.capacity
        slots = flat_slots(places, self.lanes).reshape(-1)
        if slots.size and slots.max() >= self._counts[_STORED] * self.scheme.per_row:
            return False
        held = self.read(torch.from_numpy(slots))
        return all(
            np.array_equal(bits(_on_host(leaves[place])).reshape(held[place].shape), bits(held[place]))
            for place in self.scheme.fixed
        )

    def _planned(self, count: int, leaves: Sequence[Tensor]) -> Plan:
        scheme = self.scheme
        held = [_on_host(leaf) if place in scheme.fixed else leaf for place, leaf in enumerate(leaves)]
        if held[0].ndim == len(self.lanes) + len(scheme.leaves[0].shape):  # one row, named by an int
            held = [leaf[None] for leaf in held]
        plan = planned(scheme, held, self._latest)
        if scheme.check:
            before = self._slots(scheme.capacity, int(self._counts[_NEXT]) - 1).reshape(-1)
            following = self._places(before)[1]
            refuse_strangers(scheme, plan, [bits(self._taken(pair, following)) for pair in range(len(scheme.pairs))])
        if plan.ends.any() or plan.cut.any():
            needed = np.count_nonzero(plan.ends[-scheme.capacity :])
            needed += np.count_nonzero(plan.cut) if count < scheme.capacity else 0
            over = self._final.reshape(scheme.capacity, -1)[self._rows_of_next(count)]
            room = scheme.finals - self._counts[_USED] + self._counts[_FREE] + np.count_nonzero(over)
            if needed > room:
                raise RuntimeError(
                    f"the data ends {needed} trajectories, and there is room for the last frames of {room} more: build "
                    f"the storage with more than finals={scheme.finals}; nothing was written"
                )
        return plan

    def _rows_of_next(self, count: int) -> Any:
        """The rows that stay of the next `count`."""
        capacity, start = self.scheme.capacity, int(self._counts[_NEXT])
        if start + count <= capacity:
            return slice(start, start + count)
        return (start + count - min(count, capacity) + np.arange(min(count, capacity))) % capacity

    def write_at(self, index: Any, leaves: Sequence[Tensor]) -> None:
        if self._plan is None:
            self._rest.write_at(index, [leaves[place] for place in self.scheme.rest])
        else:
            self.write_run(int(self._counts[_NEXT]), leaves)

    def write_run(self, start: int, leaves: Sequence[Tensor]) -> None:
        plan, self._plan = self._plan, None
        if plan is None:  # rows that have their frames
            capacity, count = self.scheme.capacity, leaves[0].shape[0]
            return self.write_at(torch.arange(start, start + count, device="cpu") % capacity, leaves)
        counts, count, capacity, per_row = self._counts, len(plan.step), self.scheme.capacity, self.scheme.per_row
        rows, kept = self._rows_of_next(count), slice(-capacity, None)
        self._keep_finals(plan, rows, kept)
        cursor = int(counts[_CURSOR])
        behind = (cursor + count) % self.scheme.frame_rows
        for table, ring, pair in zip(self._tables, self._rings, self.scheme.pairs, strict=True):
            newest, following = (self._newest(plan, place) for place in pair)
            ring.write_run(cursor, [newest])
            table[behind * per_row : (behind + 1) * per_row] = bridge.numpy_view(following[-1])
        self._step.reshape(capacity, per_row)[rows] = plan.step[kept]
        self._latest[:] = plan.latest
        self._rest.write_run(start, [plan.leaves[place] for place in self.scheme.rest])
        counts[_NEXT], counts[_CURSOR] = (start + count) % capacity, behind
        counts[_STORED] = min(int(counts[_STORED]) + count, capacity)
        return None

    def _newest(self, plan: Plan, place: int) -> Tensor:
        """The newest frames of observations that are to be written, [n, lanes, ...]."""
        frames = self.scheme.newest(plan.leaves[place], place)
        return frames.reshape(len(plan.step), self.scheme.per_row, *self.scheme.frame(place))

    def _keep_finals(self, plan: Plan, rows: Any, kept: slice) -> None:
        """Give back the finals of items that go, and keep those of items whose next frame will not be in the row behind."""
        scheme, per_row = self.scheme, self.scheme.per_row
        final = self._final.reshape(scheme.capacity, per_row)
        over = final[rows]
        if over.any():
            self._give_back(over)
            final[rows] = 0
        if not (plan.ends.any() or plan.cut.any()):
            return
        ended = plan.ends[kept].nonzero()
        cut = np.flatnonzero(plan.cut) if len(plan.step) < scheme.capacity else np.zeros(0, np.int64)
        taken = self._take(ended[0].size + cut.size)
        start, cursor = int(self._counts[_NEXT]), int(self._counts[_CURSOR])
        final[start - 1, cut] = taken[: cut.size] + 1
        numbers = np.zeros(plan.ends[kept].shape, np.int32)
        numbers[ended] = taken[cut.size :] + 1
        final[rows] = numbers
        into = scheme.frame_rows * per_row + taken
        for table, (_, following) in zip(self._tables, scheme.pairs, strict=True):
            last = bridge.numpy_view(self._newest(plan, following))[kept]
            table[into] = np.concatenate([table[cursor * per_row + cut], last[ended]])

    def _give_back(self, finals: np.ndarray) -> None:
        """Finals, counted from 1, of items that go; 0 for none."""
        gone = finals[finals > 0] - 1
        free = self._counts[_FREE]
        self._free[free : free + gone.size] = gone
        self._counts[_FREE] += gone.size

    def _take(self, count: int) -> np.ndarray:
        """Finals that are free: those that were used before others."""
        free, used = self._counts[_FREE], self._counts[_USED]
        again = min(count, int(free))
        self._counts[_FREE] -= again
        self._counts[_USED] += count - again
        return np.concatenate([self._free[free - again : free], np.arange(used, used + count - again)])
