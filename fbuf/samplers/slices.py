"""Runs of consecutive items of one trajectory."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, UInt8

from fbuf import checks, trajectories
from fbuf.fusion import computed_once, divmod_unsigned, entry, loop_variant, one_kernel_loop, two_or_more, zero_after
from fbuf.keywords import checked
from fbuf.samplers import windows
from fbuf.samplers.chances import Chances, Reason, says_its_chances
from fbuf.samplers.protocol import Draw, Excluding, InEpochs, Sampler
from fbuf.samplers.uniform import Uniform
from fbuf.short_text import ShortText
from fbuf.timeline import TrajectoryTimeline
from fbuf.trajectories import OPEN, Queued, TrajectoryState
from fbuf.writers import RingState, moved

_FEW = 16  # items up to which a loop over them is faster on the CPU than kernels over all


@checked
@dataclasses.dataclass(frozen=True)
class PerTrajectory:
    """Starts: each trajectory with `least` stored items equally often, then each whole slice in it equally often.

    A trajectory that is shorter than a slice is drawn from its first stored item on. The sampler `trajectories` draws
    among them: `Uniform()`, or `Shuffled()` for each once an epoch. A write begins another epoch. `draw.size` counts
    trajectories, and `draw.smallest` is the smallest probability in the draw; that of all is not known.

    Args:
        trajectories: the sampler that draws among the trajectories.

    Args:
        trajectories: the sampler that draws among the trajectories.
    """

    keeps_priorities = False

    trajectories: Sampler = Uniform()

    def __post_init__(self) -> None:
        _refuse_slots("trajectories", self.trajectories, InEpochs)

    @property
    def without_replacement(self) -> bool:
        """Whether a drawn trajectory does not come again in this epoch."""
        return self.trajectories.without_replacement


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Written:
    """A write, for samplers of several rows.

    Attributes:
        before: the index before the write.
        after: the index after it.
        ring: the ring after it.
        leaving: [] int32: how many entries of the sampler can no longer be drawn, if it counts them.
        queued: the queue of the sampler after the write, if it is known already.
        count: rows; the last `capacity` are kept.

    Attributes:
        before: the index before the write.
        after: the index after it.
        ring: the ring after it.
        leaving: TODO.
        queued: TODO.
        count: TODO.
    """

    before: TrajectoryState
    after: TrajectoryState
    ring: RingState
    leaving: Array
    queued: Queued | None
    count: int = dataclasses.field(metadata={"static": True})

    @property
    def ending(self) -> int:
        """The number of rows that may have become the end of a trajectory: the previous one and the new ones."""
        return min(self.count + 1, self.after.number.shape[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class SlicesState(ShortText):
    """The starts that can be drawn. They enter and leave the queue in the order of their rows.

    Attributes:
        starts: state of the rule that draws among the starts.
        queue: [items + 1] int32: a ring of slots that can be drawn: starts, or the ends of trajectories.
        head: [] int32: the oldest entry of the queue.
        count: [] int32: entries of the queue, or without a queue the number of starts.
        going: [lanes] int32: all lanes, first those whose latest trajectory is open and long enough.
        going_count: [] int32: how many lanes of `going` are such.
        least: of the rule; a rule with another one refuses the state.

    Attributes:
        starts: state of the rule that draws among the starts.
        queue: TODO.
        head: TODO.
        count: TODO.
        going: TODO.
        going_count: [] int32: how many lanes of `going` are such.
        least: TODO.
    """

    starts: Any
    queue: Array | None
    head: Array
    count: Array
    going: Array | None
    going_count: Array
    least: int = dataclasses.field(metadata={"static": True})


@checked
@dataclasses.dataclass(frozen=True)
class Slices:
    """Slices of `length` consecutive items of one trajectory; they never cross its end, or the cursor of the ring.

    `sample(..., batch_size)` draws batch_size / length slices: leaves, `draw.slots` and `draw.mask` are [slices, burn_in +
    length, ...]. A start is an item with at least `least` stored items of its trajectory from it on (with `PerTrajectory`
    fewer). A slice that the end of the trajectory cuts short repeats the last item, with `mask` False. `burn_in` items
    come in front of the start, masked if the trajectory had not begun or they are overwritten. The `Buffer` needs
    `trajectories`.

    Args:
        length: items from the start on.
        starts: the sampler of starts: `Uniform()`, `Shuffled()` (each once an epoch, which ends with a write),
            `Prioritized()` (by the priority of the start), or `PerTrajectory()`.
        least: `length` by default: no slice is cut short. With 1 every item is a start: windows of n steps, for returns.
        burn_in: items in front, to warm up a recurrent state (R2D2: Kapturowski et al., 2019).

    A draw costs O(slices * (length + log capacity)), a write O(rows * log capacity).
    """

    needs_order = True

    length: int
    starts: Sampler | PerTrajectory = Uniform()
    least: int | None = dataclasses.field(default=None, kw_only=True)
    burn_in: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", checks.as_int("length", self.length))
        object.__setattr__(self, "least", self.length if self.least is None else checks.as_int("least", self.least))
        if self.shortest > self.length:
            raise ValueError(f"least={self.least} is more than length={self.length}")
        object.__setattr__(self, "burn_in", checks.as_int("burn_in", self.burn_in, least=0))
        if not isinstance(self.starts, PerTrajectory):
            _refuse_slots("starts", self.starts, InEpochs | Excluding)

    @classmethod
    def by_count(
        cls,
        count: int,
        batch_size: int,
        starts: Sampler | PerTrajectory = Uniform(),  # a frozen rule
        *,
        least: int | None = None,
        burn_in: int = 0,
    ) -> "Slices":
        """Slices of such a length that `count` of them make a batch of `batch_size` items."""
        count, batch_size = checks.as_int("count", count), checks.as_int("batch_size", batch_size)
        if batch_size % count:
            raise ValueError(f"batch_size={batch_size} is not a multiple of count={count}")
        return cls(batch_size // count, starts, least=least, burn_in=burn_in)

    @property
    def keeps_priorities(self) -> bool:
        """Whether `update` changes how often slices are drawn."""
        return self.starts.keeps_priorities

    @property
    def without_replacement(self) -> bool:
        """Whether a drawn start, or trajectory, does not come again in this epoch."""
        return self.starts.without_replacement

    @property
    def shortest(self) -> int:
        """The number of items of the shortest slice."""
        assert self.least is not None
        return self.least

    @property
    def known(self) -> Literal["all", "flags", "starts", "ends"]:
        """How the state knows the starts.

        All items are starts; the rule `starts` excludes the others; or there is a queue, of starts or of ends of
        trajectories.
        """
        if isinstance(self.starts, PerTrajectory):
            return "ends"
        if self.shortest == 1:
            return "all"
        return "flags" if isinstance(self.starts, Excluding) else "starts"

    @property
    def _places(self) -> Sampler:
        return self.starts.trajectories if isinstance(self.starts, PerTrajectory) else self.starts

    def check(self, capacity: int) -> None:
        """ValueError if no slice fits into a ring of `capacity` rows."""
        if self.length + self.burn_in > capacity:
            raise ValueError(f"slices of {self.burn_in} + {self.length} rows do not fit in capacity={capacity}")

    def init(self, capacity: int, lanes: int) -> SlicesState:
        """State over `capacity` empty rows."""
        items = capacity * lanes
        excludes = isinstance(self.starts, Excluding) and self.known == "flags"
        return SlicesState(
            starts=self.starts.init_excluding(items) if excludes else self._places.init(items),  # type: ignore[union-attr]
            queue=jnp.zeros(items + 1, jnp.int32) if self.known in ("starts", "ends") else None,
            head=jnp.zeros((), jnp.int32),
            count=jnp.zeros((), jnp.int32),
            going=jnp.zeros(lanes, jnp.int32) if self.known == "ends" else None,
            going_count=jnp.zeros((), jnp.int32),
            least=self.shortest,
        )

    # ------------------------------------------------------------------ writes

    def written(self, state: SlicesState, slots: Int[Array, " items"], write: Written) -> SlicesState:
        """State after rows were written; slots are those of the kept rows."""
        if isinstance(self._places, InEpochs):
            state = dataclasses.replace(state, starts=self._places.restart(state.starts))
        if self.known == "all":
            return dataclasses.replace(state, starts=self._places.written(state.starts, slots))
        if isinstance(self.starts, Excluding):
            entered, entries = self._begun(write)
            changed, allowed = self._changed_starts(slots, entries, entered, write)
            starts = self.starts.written_excluding(state.starts, slots, changed, allowed)
            return dataclasses.replace(
                state, starts=starts, count=state.count - write.leaving + jnp.sum(entered, dtype=jnp.int32)
            )
        assert state.queue is not None
        queued = write.queued
        if queued is None:
            queued = self.pushed((state.queue, state.head, state.count), write)
        state = dataclasses.replace(state, queue=queued[0], head=queued[1], count=queued[2])
        if self.known == "ends":
            latest, lanes = write.after.latest, jnp.arange(write.after.latest.size)
            began = trajectories.began(write.after, latest, lanes)
            length = jnp.minimum((write.ring.written[0] - began).astype(jnp.int32), write.ring.size)
            long_enough = write.after.is_open & (length >= self.shortest)
            going, going_count = _first_those(long_enough)
            state = dataclasses.replace(state, going=going, going_count=going_count)
        return state

    @functools.partial(jax.jit, static_argnums=0)  # eagerly, its loop would be compiled in every call
    def pushed(self, queued: Queued, write: Written) -> Queued:
        """The queue after a write."""
        if self.known == "ends" and (write.count + 1) * write.after.latest.size <= _FEW:
            return one_kernel_loop(self._ends_one_by_one, self._all_pushed)(queued, write)
        return self._all_pushed(queued, write)

    def _all_pushed(self, queued: Queued, write: Written) -> Queued:
        queue, head, count = queued
        entered, entries = self._closed(write) if self.known == "ends" else self._begun(write)
        room = jnp.uint32(queue.size - 1)
        begin = (head.astype(jnp.uint32) + write.leaving.astype(jnp.uint32)) % room
        count = count - write.leaving
        last, entered, entries = (begin + count.astype(jnp.uint32)) % room, entered.reshape(-1), entries.reshape(-1)
        place = (last + jnp.cumsum(entered, dtype=jnp.uint32) - entered) % room
        at, values = two_or_more((jnp.where(entered, place, room), jnp.where(entered, entries, 0)))
        queue = queue.at[at].set(values, mode="promise_in_bounds")
        return queue, begin.astype(jnp.int32), count + jnp.sum(entered, dtype=jnp.int32)

    def leaving(self, index: TrajectoryState, ring: RingState, count: int) -> Int[Array, ""]:
        """How many counted entries a write of `count` rows will remove. Call it before the write."""
        capacity, lanes = index.number.shape
        kept, reach = min(count, capacity), self.shortest - 1
        over = _rows_from(ring.cursor, 0, kept, capacity)
        ahead = _rows_from(ring.cursor, reach, kept, capacity)
        number = index.number[ahead]
        # Rows that the write overwrites, and that begin a run of `least` stored rows of one trajectory.
        left = ((over < ring.size) & (np.arange(kept) < capacity - reach))[:, None] & (index.number[over] == number)
        if self.known == "ends":  # and the last of these rows closes the trajectory
            last = trajectories.latest_row(index, number, jnp.arange(lanes, dtype=jnp.int32)[None])
            left &= last == trajectories.time_of(ring, ahead, capacity)[:, None]
            left &= ~(index.is_open[None] & (number == index.latest[None]))
        return jnp.sum(left, dtype=jnp.int32)

    def _begun(self, write: Written) -> tuple[Array, Array]:
        """For each new row whether an older row became a start with it, and the slot of that row."""
        capacity, lanes = write.after.number.shape
        kept, reach = min(write.count, capacity), self.shortest - 1
        number = write.after.number
        back = _rows_from(write.ring.cursor, -kept - reach, kept, capacity)
        new = _rows_from(write.ring.cursor, -kept, kept, capacity)
        entered = _is_stored(write.ring, kept + reach, kept)[:, None] & (number[back] == number[new])
        return entered, back[:, None] * lanes + jnp.arange(lanes, dtype=jnp.int32)[None]

    def _changed_starts(
        self, slots: Array, entries: Array, entered: Bool[Array, "rows lanes"], write: Written
    ) -> tuple[Array, Array]:
        """The slots of new rows and of rows that became starts, and whether each is a start."""
        kept, reach = entered.shape[0], self.shortest - 1
        spare = jnp.where(_is_stored(write.ring, kept + reach, kept)[:, None], entries, -1)
        new_is = jnp.zeros(entered.shape, jnp.bool_)
        if kept > reach:  # the first new rows are starts, if enough new rows follow them
            new_is = new_is.at[: kept - reach].set(entered[reach:])
        changed = jnp.concatenate([spare.reshape(-1), slots])
        return changed, jnp.concatenate([entered.reshape(-1), new_is.reshape(-1)])

    def _closed(self, write: Written) -> tuple[Array, Array]:
        """Of the previous row and the new rows: whether each ends a trajectory that is long enough, and their slots."""
        items = write.ending * write.after.latest.size
        return jax.vmap(functools.partial(self._closed_at, write))(jnp.arange(items, dtype=jnp.int32))

    def _closed_at(self, write: Written, k: Array) -> tuple[Bool[Array, ""], Int[Array, ""]]:
        """The same for the item `k` of these rows."""
        capacity, lanes = write.after.number.shape
        step, lane = divmod_unsigned(k, lanes)
        row = moved(write.ring.cursor, step - write.ending, capacity)
        at = trajectories.place_of_one(write.after, write.ring, row, lane)
        closed = (at.kind != OPEN) & (at.after == 0) & (at.before + 1 >= self.shortest)
        if write.count < capacity:  # the previous row is in the queue already, if it ended its trajectory
            closed &= (step > 0) | entry(write.before.is_open, lane)
        return (write.ending - step <= write.ring.size) & closed, row * lanes + lane

    def _ends_one_by_one(self, queued: Queued, write: Written) -> Queued:
        def body(k: Array, queued: Queued) -> Queued:
            ring, leaving = loop_variant((write.ring, write.leaving), k)
            closed, slot = self._closed_at(dataclasses.replace(write, ring=ring), k)
            return trajectories.queue_moved(queued, jnp.where(k == 0, leaving, 0), closed.astype(jnp.int32), slot)

        return jax.lax.fori_loop(zero_after(write.leaving), write.ending * write.after.latest.size, body, queued)

    # ------------------------------------------------------------------ draws

    def sample(
        self,
        state: SlicesState,
        key: Array,
        batch_size: int,
        size: Int[Array, ""],
        index: TrajectoryState,
        ring: RingState,
    ) -> tuple[SlicesState, Draw]:
        """Draw slices."""
        if batch_size % self.length:
            raise ValueError(f"batch_size={batch_size} is not a multiple of the slice length, {self.length}")
        count = batch_size // self.length
        if isinstance(self.starts, PerTrajectory):
            state, draw = self._of_trajectories(state, key, count, index, ring)
        else:
            drawable = size if self.known == "all" else state.count
            starts, draw = self.starts.sample(state.starts, key, count, drawable)
            state = dataclasses.replace(state, starts=starts)
        queue: Any = (state.queue, state.head) if self.known == "starts" else None
        slots, mask, starts = windows.of(self.burn_in, self.length, queue, draw.slots, draw.valid, index, ring)
        return state, dataclasses.replace(draw, slots=slots, mask=mask, starts=starts)

    def _of_trajectories(
        self, state: SlicesState, key: Array, count: int, index: TrajectoryState, ring: RingState
    ) -> tuple[SlicesState, Draw]:
        assert isinstance(self.starts, PerTrajectory) and state.going is not None
        assert state.queue is not None
        drawn, draw = self.starts.trajectories.sample(state.starts, key, count, state.count + state.going_count)
        ends = state.queue, state.head, state.count, state.going
        slots, probability, smallest = windows.starts_within(
            self.length, key, ends, (draw.slots, draw.valid, draw.probability), index, ring
        )
        draw = dataclasses.replace(draw, slots=slots, probability=probability, smallest=smallest)
        return dataclasses.replace(state, starts=drawn), draw

    def update(self, state: SlicesState, slots: Int[Array, " batch"], priorities: Array) -> SlicesState:
        """Give items new priorities, which count while they are starts."""
        if isinstance(self.starts, PerTrajectory):
            raise TypeError("PerTrajectory keeps no priorities: use Slices(starts=fbuf.Prioritized(...))")
        return dataclasses.replace(state, starts=self.starts.update(state.starts, slots, priorities))

    def clear(self, state: SlicesState) -> SlicesState:
        """State over the same rows, all empty again."""
        head, count, going_count = (jnp.zeros((), jnp.int32) for _ in range(3))  # apart, or they could not be donated
        return dataclasses.replace(
            state, starts=self._places.clear(state.starts), head=head, count=count, going_count=going_count
        )

    # ------------------------------------------------------------------ on the host

    def chances(self, state: SlicesState, line: TrajectoryTimeline, intact: np.ndarray | None = None) -> Chances:
        """The law of the next slice, over all slots, on the host: not inside jit. O(items * (burn_in + length)).

        Args:
            state: of these slices.
            line: all stored rows.
            intact: bool [slots]: items whose frames are all stored; all, by default.
        """
        own, slots = self._chances_of_starts(state, line), line.slots
        reasons = np.full(line.capacity * line.lanes, Reason.NOT_WRITTEN, np.uint8)
        if own.probability is None:
            reasons[slots] = np.where(line.stored < self.shortest, Reason.TOO_SHORT, Reason.UNKNOWN)
            return Chances(None, reasons)
        before, after, whole = self._reach(line, intact)
        start, reason = np.where(whole, own.probability[slots], 0), np.where(whole, own.reason[slots], Reason.LOST)
        is_start = self._are_starts(line)
        mass, rows = np.zeros(slots.shape), slots.shape[0]
        why = np.where(line.stored < self.shortest, np.uint8(Reason.TOO_SHORT), np.uint8(Reason.LOST))
        for offset in sorted(range(-min(self.burn_in, rows - 1), min(self.length, rows)), key=abs, reverse=True):
            # A slice that begins in a row of `here` has the row `offset` rows on, in `there`.
            here = slice(max(-offset, 0), rows - max(offset, 0))
            there = slice(max(offset, 0), rows - max(-offset, 0))
            reached = (after[here] >= offset) & (before[here] >= -offset) & is_start[here]
            mass[there] += np.where(reached, start[here], 0)
            why[there] = np.where(reached, reason[here], why[there])
        probability, starts = np.zeros((2, reasons.size))
        probability[slots], starts[slots] = mass, start
        reasons[slots] = np.where(mass > 0, np.uint8(Reason.NONE), why)
        return Chances(probability, reasons, starts)

    def priorities(self, state: SlicesState, size: int) -> np.ndarray | None:
        """Those of items, which count while they are starts: see `Sampler.priorities`."""
        return None if isinstance(self.starts, PerTrajectory) else self.starts.priorities(state.starts, size)

    def starts_that_reach(self, slot: int, line: TrajectoryTimeline, intact: np.ndarray | None = None) -> np.ndarray:
        """Slots of the starts of which slices have the item at a slot in use, the oldest first. O(items)."""
        (position,), (lane,) = line.positions(np.asarray([slot]))
        before, after, whole = (table[:, lane] for table in self._reach(line, intact))
        at = np.arange(line.rows.size)
        reached = position - at <= np.minimum(after, self.length - 1)
        reached &= at - position <= np.minimum(before, self.burn_in)
        reached &= (line.number[:, lane] == line.number[position, lane]) & self._are_starts(line)[:, lane] & whole
        return line.slots[reached, lane]

    def _are_starts(self, line: TrajectoryTimeline) -> np.ndarray:
        """bool [rows, lanes]: the starts, whether they can be drawn now or not."""
        if not isinstance(self.starts, PerTrajectory):
            return line.after + 1 >= self.shortest
        choices = np.maximum(line.stored - self.length + 1, 1)
        return (line.stored >= self.shortest) & (line.before < choices)

    def _reach(self, line: TrajectoryTimeline, intact: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How far slices may reach from each row, backwards and forwards; and whether it may be a start."""
        if intact is None:
            return line.before, line.after, np.ones(line.before.shape, bool)
        whole, at = intact[line.slots], np.arange(line.rows.size)[:, None]
        ahead = np.minimum.accumulate(np.where(whole, line.rows.size, at)[::-1])[::-1] - at - 1
        behind = at - np.maximum.accumulate(np.where(whole, -1, at)) - 1
        return np.minimum(line.before, behind), np.minimum(line.after, ahead), whole

    def _chances_of_starts(self, state: SlicesState, line: TrajectoryTimeline) -> Chances:
        """The law of the next start, over all slots; without regard to frames."""
        slots = line.capacity * line.lanes
        if not says_its_chances(self._places):
            return Chances.unknown(slots)
        if isinstance(self.starts, PerTrajectory):
            return self._chances_per_trajectory(state, line)
        drawn = line.slots.size if self.known in ("all", "flags") else int(state.count)
        own = self.starts.chances(state.starts, drawn)
        if own.probability is None:
            return Chances.unknown(slots)
        if self.known in ("all", "flags"):
            return own.over(slots)
        entries = self._entries(state)
        probability, reasons = np.zeros(slots), np.full(slots, Reason.TOO_SHORT, np.uint8)
        probability[entries], reasons[entries] = own.probability, own.reason
        return Chances(probability, reasons)

    def _chances_per_trajectory(self, state: SlicesState, line: TrajectoryTimeline) -> Chances:
        slots = line.capacity * line.lanes
        last = np.concatenate([self._entries(state), self._newest_open(state, line)])
        own = self._places.chances(state.starts, last.size)
        if own.probability is None:
            return Chances.unknown(slots)
        shape = line.before.shape
        of_trajectory, reason = np.zeros(shape), np.full(shape, Reason.TOO_SHORT, np.uint8)
        at, lane = line.positions(last)
        of_trajectory[at, lane], reason[at, lane] = own.probability, own.reason
        end, lanes = np.arange(shape[0])[:, None] + line.after, np.arange(line.lanes)
        share = of_trajectory[end, lanes] / np.maximum(line.stored - self.length + 1, 1)
        probability, reasons = np.zeros(slots), np.full(slots, Reason.NOT_WRITTEN, np.uint8)
        probability[line.slots] = np.where(self._are_starts(line), share, 0)
        reasons[line.slots] = reason[end, lanes]
        return Chances(probability, reasons)

    def _entries(self, state: SlicesState) -> np.ndarray:
        """The entries of the queue, the oldest first."""
        assert state.queue is not None
        queue = np.asarray(state.queue)
        return queue[(int(state.head) + np.arange(int(state.count))) % (queue.size - 1)].astype(np.int64)

    def _newest_open(self, state: SlicesState, line: TrajectoryTimeline) -> np.ndarray:
        """The newest slots of the lanes whose latest trajectory is open and long enough, in the order of places."""
        assert state.going is not None
        lanes = np.asarray(state.going)[: int(state.going_count)].astype(np.int64)
        return line.slots[-1, lanes] if line.rows.size else lanes

    def resized(self, state: SlicesState, line: TrajectoryTimeline, kept: int, capacity: int) -> SlicesState:
        """State over `capacity` rows, of which the first are the newest `kept` rows of `line`, in this order.

        On the host: not inside jit. O(capacity).
        """
        lanes, dropped = line.lanes, line.rows.size - kept
        slots, items = line.slots[dropped:].reshape(-1), capacity * lanes
        after = self.init(capacity, lanes)
        if self.known in ("all", "flags"):
            starts = self._places.resized(state.starts, line.slots.size, slots, items)
            gone = 0 if self.known == "all" else int(self._are_starts(line)[:dropped].sum())
            return dataclasses.replace(after, starts=starts, count=state.count - gone)
        entries = self._entries(state)
        at, lane = line.positions(entries)
        if self.known == "ends":  # those with enough rows left
            stays = np.minimum(line.before[at, lane], at - dropped) + 1 >= self.shortest
        else:
            stays = at >= dropped
        queue, places = (at - dropped)[stays] * lanes + lane[stays], np.flatnonzero(stays)
        padded = np.zeros(items + 1, np.int32)
        padded[: queue.size] = queue
        after = dataclasses.replace(after, queue=jnp.array(padded), count=jnp.asarray(queue.size, jnp.int32))
        drawable = entries.size
        if self.known == "ends":
            newest = self._newest_open(state, line) % lanes
            stored = np.minimum(line.before[-1, newest] + 1, kept) if line.rows.size else newest
            stays = np.flatnonzero(stored >= self.shortest)
            going = np.concatenate([newest[stays], np.setdiff1d(np.arange(lanes), newest[stays])])
            after = dataclasses.replace(
                after, going=jnp.array(going, jnp.int32), going_count=jnp.asarray(stays.size, jnp.int32)
            )
            places, drawable = np.concatenate([places, drawable + stays]), drawable + newest.size
        return dataclasses.replace(after, starts=self._places.resized(state.starts, drawable, places, items))


@functools.partial(jax.jit, static_argnums=0)
def write(
    rule: Any,
    state: Any,
    index: TrajectoryState,
    before: RingState,
    ring: RingState,
    marks: UInt8[Array, "n lanes"],
    ids: Any,
) -> Written:
    """A write of one row or more with these marks and ids; `before` and `ring` are the ring before and after it."""
    count, (capacity, lanes) = marks.shape[0], index.number.shape
    known = rule.known if isinstance(rule, Slices) else "all"
    reach = None if known == "all" else rule.shortest - 1
    queued = (state.queue, state.head, state.count) if known == "starts" else None
    trajectories.check_ids(index, ids)

    def whole(
        index: TrajectoryState, before: RingState, marks: Array, ids: Any, queued: Queued | None, ring: RingState
    ) -> Any:
        leaving = jnp.zeros((), jnp.int32)
        if reach is not None:  # a barrier: it reads the index before it is overwritten, so XLA copies nothing
            leaving, before = computed_once((rule.leaving(index, before, count), before))
        after = trajectories.written(index, before, marks, ids)
        if queued is not None:
            queued = rule.pushed(queued, Written(index, after, ring, leaving, None, count))
        return after, leaving, queued

    if count * lanes <= _FEW and count + (reach or 0) < capacity:
        one_by_one = functools.partial(trajectories.written_one_by_one, reach, known == "ends")
        after, leaving, queued = one_kernel_loop(one_by_one, whole)(index, before, marks, ids, queued, ring)
    else:
        after, leaving, queued = whole(index, before, marks, ids, queued, ring)
    return Written(index, after, ring, leaving, queued, count)


def _refuse_slots(name: str, sampler: Any, following: Any) -> None:
    """TypeError for a sampler that cannot draw among entries that each write renumbers; those of `following` can."""
    checks.rule(name, sampler, Sampler)
    if isinstance(sampler, Slices):
        raise TypeError(f"{name}={sampler!r} draws slices: pass a sampler of single items")
    if sampler.needs_order:
        raise TypeError(f"{name}={sampler!r} needs the order of writing, which starts of slices do not have")
    if not isinstance(sampler, following) and jax.tree.leaves(jax.eval_shape(lambda: sampler.init(1))):
        raise TypeError(f"{name}={sampler!r} keeps a state of slots: it cannot draw among entries that writes renumber")


def _first_those(flags: Bool[Array, " n"]) -> tuple[Int[Array, " n"], Int[Array, ""]]:
    """All places, first those of true flags, both in their order; and how many these are."""
    before = jnp.cumsum(flags, dtype=jnp.int32)
    count, own = before[-1], jnp.arange(flags.shape[0], dtype=jnp.int32)
    to = jnp.where(flags, before - 1, count + own - before)
    at, places = two_or_more((to, own))
    return jnp.zeros_like(own).at[at].set(places, mode="promise_in_bounds"), count


def _rows_from(cursor: Array, offset: int, count: int, capacity: int) -> Int[Array, " count"]:
    """`count` consecutive rows of the ring from cursor + offset on."""
    steps = jnp.asarray((np.arange(count) + offset) % capacity, jnp.int32)
    return moved(cursor, steps, capacity)


def _is_stored(ring: RingState, age: int, count: int) -> Bool[Array, " count"]:
    """Which of `count` rows are stored; the first was written `age` rows ago."""
    return jnp.asarray(age - np.arange(count) <= np.iinfo(np.int32).max) & (
        jnp.asarray(np.minimum(age - np.arange(count), 2**31 - 1), jnp.int32) <= ring.size
    )
