"""The law of the next draw by brute force: every start and every window written down, for each rule."""

from operator import itemgetter
from typing import Any

import jax
import numpy as np

import fbuf
from fbuf import Buffer, Chances, Fifo, PerTrajectory, Prioritized, Shuffled, Slices
from tests.fbuf.compiled import clear, clear_many, extend, extend_many, sample, sample_many, update, update_many
from tests.fbuf.model import PrioritiesModel
from tests.fbuf.trajectory_model import ITEM, Rows, TrajectoriesModel, rows

CODES = list("........ttuubijj")


class LawModel:
    """The rows of one buffer, and the law of its next draw in plain Python: lists of items, and sets of what was drawn."""

    def __init__(self, buffer: Buffer, seed: int) -> None:
        self.buffer, self.random = buffer, np.random.default_rng(seed)
        self.rule: Any = buffer.sampler.starts if isinstance(buffer.sampler, Slices) else buffer.sampler
        self.epochs = self.rule.trajectories if isinstance(self.rule, PerTrajectory) else self.rule
        self.lanes, self.id = buffer.items_per_row, np.zeros(buffer.items_per_row, int)
        self.forget()

    def forget(self) -> None:
        """An empty model."""
        self.model = TrajectoriesModel(self.buffer.capacity, self.lanes)
        self.drawn: set[Any] = set()  # of this epoch: slots, starts or trajectories
        self.priorities = None
        self.unread: list[int] = []
        if isinstance(self.rule, Prioritized):
            slots = self.buffer.capacity * self.lanes
            self.priorities = PrioritiesModel(slots, self.rule.alpha, self.rule.eps, self.rule.new_items)

    def some_rows(self, count: int) -> Rows:
        """Rows of random ends and ids, which go on after the last ones."""
        new = rows(self.random.choice(CODES, (count, self.lanes)), self.id)
        self.id = new.id[-1]
        return new

    def written(self, new: Rows) -> dict[str, np.ndarray]:
        """Write rows into the model. Returns them as a batch for the buffer."""
        before, first = len(self.model.numbers()), self.model.time
        serials = self.model.write(new.ended, new.id if self.buffer.trajectories.id else None)  # type: ignore[union-attr]
        places = np.arange(first, self.model.time) % self.buffer.capacity * self.lanes
        slots = (places[:, None] + np.arange(self.lanes)).reshape(-1)
        if self.priorities is not None:
            self.priorities.written(slots[-self.buffer.capacity * self.lanes :])
        self.unread = (self.unread + slots.tolist())[-self.buffer.capacity * self.lanes :]
        if isinstance(self.buffer.sampler, Slices) or len(self.model.numbers()) != before:
            self.drawn = set()
        return new.batch(serials, self.buffer.lanes)

    def some_priorities(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots and priorities, zero among them, which the model has from now on."""
        assert self.priorities is not None
        count = self.buffer.capacity * self.lanes
        slots = self.random.integers(-1, count + 1, 6).astype(np.int32)
        given = self.random.choice([0.0, 0.0, 0.25, 0.5, 1, 2, 4, np.nan], 6).astype(np.float32)
        self.priorities.update(slots, given)
        return slots, given

    def drawn_as(self, draw: Any, units: int) -> None:
        """Note a draw of that many items or slices, which counts in epochs. Each of them had a chance."""
        if isinstance(self.epochs, Shuffled) and len(self.left()) < (units if self.epochs.drop_last else 1):
            self.drawn = set()
        first = (draw.slots if draw.starts is None else draw.starts)[draw.valid].tolist()
        if isinstance(self.epochs, Shuffled):
            assert all(self.unit_of(slot) not in self.drawn for slot in first)
            self.drawn |= {self.unit_of(slot) for slot in first}
        self.unread = [slot for slot in self.unread if slot not in first]

    def unit_of(self, slot: int) -> Any:
        """What an epoch returns once: the slot, or its trajectory."""
        if not isinstance(self.rule, PerTrajectory):
            return slot
        return next(each.slots for each in self.model.stored() if slot in each.slots)

    def left(self) -> list[Any]:
        """What is left of the epoch."""
        rule = self.buffer.sampler
        if isinstance(self.rule, PerTrajectory):
            assert isinstance(rule, Slices)
            units = [each.slots for each in self.model.stored() if len(each.slots) >= rule.shortest]
        else:
            units = (
                self.model.starts(rule.shortest, rule.period) if isinstance(rule, Slices) else [*self.model.numbers()]
            )
        return [each for each in units if each not in self.drawn]

    def chances_of_starts(self) -> dict[int, float]:
        """The chance of each start, or of each slot."""
        rule = self.buffer.sampler
        if isinstance(self.epochs, Shuffled):
            left = self.left()
            if not left:
                self.drawn = set()
                left = self.left()
            if isinstance(self.rule, PerTrajectory):
                assert isinstance(rule, Slices)
                choices = [slots[: max(len(slots) - rule.length + 1, 1)] for slots in left]
                return {slot: 1 / len(left) / len(slots) for slots in choices for slot in slots}
            return {slot: 1 / len(left) for slot in left}
        if isinstance(self.rule, Fifo):
            return dict.fromkeys(self.unread[:1], 1.0)
        if isinstance(self.rule, PerTrajectory):
            assert isinstance(rule, Slices)
            return self.model.chances_per_trajectory(rule.shortest, rule.length)
        least, period = (rule.shortest, rule.period) if isinstance(rule, Slices) else (1, 1)
        return self.model.chances(least, None if self.priorities is None else self.priorities.values(), period)

    def windows(self) -> dict[int, tuple[int, ...]]:
        """The slots that a slice from each start has; of single items the slot."""
        rule, stored = self.buffer.sampler, self.model.stored()
        if not isinstance(rule, Slices):
            return {slot: (slot,) for each in stored for slot in each.slots}
        return {
            slot: each.slots[max(place - rule.burn_in, 0) : place + rule.length]
            for each in stored
            for place, slot in enumerate(each.slots)
        }

    def chances(self) -> np.ndarray:
        """The chance of each slot, float64."""
        found, windows = np.zeros(self.buffer.capacity * self.lanes), self.windows()
        for start, chance in self.chances_of_starts().items():
            found[list(windows[start])] += chance
        return found

    def assert_law(self, law: Chances) -> None:
        """This is the law."""
        expected, starts, windows = self.chances(), self.chances_of_starts(), self.windows()
        assert law.probability is not None
        np.testing.assert_allclose(law.probability, expected, rtol=2e-5, atol=0)
        stored = sorted(self.model.numbers())
        assert sorted(np.flatnonzero(law.reason != 1)) == stored
        np.testing.assert_array_equal(law.reason == 0, expected > 0)
        rows = sum(chance * len(windows[start]) for start, chance in starts.items())
        np.testing.assert_allclose(law.probability.sum(), rows, rtol=2e-5)
        if isinstance(self.buffer.sampler, Slices):
            assert law.starts is not None
            np.testing.assert_allclose(law.starts[list(starts)], list(starts.values()), rtol=2e-5)
            assert law.starts.sum() == (1 if starts else 0) or abs(law.starts.sum() - 1) < 1e-9


class ChanceModel(LawModel):
    """A buffer, and its model."""

    def __init__(self, buffer: Buffer, seed: int) -> None:
        super().__init__(buffer, seed)
        self.state = buffer.init(ITEM)

    def clear(self) -> None:
        """Empty the buffer."""
        self.state = clear(self.buffer, self.state)
        self.forget()

    def write(self, new: Rows) -> None:
        """Write rows."""
        self.state, _ = extend(self.buffer, self.state, self.written(new))

    def write_some(self, count: int) -> None:
        """Write rows of random ends and ids."""
        self.write(self.some_rows(count))

    def update(self) -> None:
        """Give some slots priorities, zero among them."""
        if self.priorities is not None:
            self.state = update(self.buffer, self.state, *self.some_priorities())

    def draw(self, count: int) -> None:
        """Draw that many items or slices, which counts in epochs."""
        key = jax.random.key(int(self.random.integers(2**31)))
        self.state, _, draw = sample(self.buffer, self.state, key, count * unit(self.buffer))
        self.drawn_as(jax.tree.map(np.asarray, draw), count)

    def assert_same(self) -> None:
        """The buffer says the same."""
        self.assert_law(self.buffer.chances(self.state))

    def resize(self, capacity: int) -> None:
        """Give the buffer another capacity, and the model: row 0 is the oldest one that stays."""
        old, before = self.buffer.capacity, self.model
        kept = min(before.time, old, capacity)
        first = before.time - kept
        self.buffer, self.state = fbuf.resize(self.buffer, self.state, capacity)
        moved = {
            time % old * self.lanes + lane: (time - first) * self.lanes + lane
            for time in range(first, before.time)
            for lane in range(self.lanes)
        }
        after = TrajectoriesModel(capacity, self.lanes)
        after.all, after.time = before.all, kept
        for trajectory in (each for lane in after.all for each in lane):
            trajectory.times = [time - first for time in trajectory.times]
        self.model = after
        if isinstance(self.rule, PerTrajectory):
            last = {moved[unit[-1]] for unit in self.drawn if unit[-1] in moved}
            self.drawn = {each.slots for each in after.stored() if each.slots[-1] in last}
        else:
            self.drawn = {moved[slot] for slot in self.drawn if slot in moved}
        self.unread = [moved[slot] for slot in self.unread if slot in moved]
        if self.priorities is not None:
            given = np.full(capacity * self.lanes, -1, np.float32)
            given[list(moved.values())] = self.priorities.given[list(moved)]
            self.priorities.given = given
            if self.priorities.holder >= 0 and self.priorities.holder not in moved:
                self.priorities.highest, self.priorities.holder = np.float32(1), -1
            self.priorities.holder = moved.get(self.priorities.holder, -1)


class ManyChanceModels:
    """Many histories of one buffer: the same calls, with other rows, priorities and keys, in one program each."""

    def __init__(self, buffer: Buffer, seeds: range) -> None:
        self.buffer, self.models = buffer, [LawModel(buffer, seed) for seed in seeds]
        self.random = np.random.default_rng(seeds.start)
        self.empty = jax.tree.map(lambda leaf: np.stack([leaf] * len(seeds)), buffer.init(ITEM))
        self.states = self.empty

    def write(self, count: int) -> None:
        """Write that many rows of random ends and ids."""
        batches = [model.written(model.some_rows(count)) for model in self.models]
        self.states, _ = extend_many(self.buffer, self.states, jax.tree.map(lambda *leaves: np.stack(leaves), *batches))

    def update(self) -> None:
        """Give some slots priorities, zero among them."""
        if self.models[0].priorities is not None:
            slots, given = zip(*[model.some_priorities() for model in self.models], strict=True)
            self.states = update_many(self.buffer, self.states, np.stack(slots), np.stack(given))

    def draw(self, count: int) -> None:
        """Draw that many items or slices, which counts in epochs."""
        keys = jax.random.split(jax.random.key(int(self.random.integers(2**31))), len(self.models))
        self.states, draws = sample_many(self.buffer, self.states, keys, count * unit(self.buffer))
        draws = jax.tree.map(np.asarray, draws)
        for i, model in enumerate(self.models):
            model.drawn_as(jax.tree.map(itemgetter(i), draws), count)

    def clear(self) -> None:
        """Empty the buffers."""
        self.states = clear_many(self.buffer, self.states)
        for model in self.models:
            model.forget()

    def assert_same(self, step: int = 1) -> None:
        """The buffers say the same, or one of `step` of them."""
        states = jax.tree.map(np.asarray, self.states)
        for i in range(int(self.random.integers(step)), len(self.models), step):
            self.models[i].assert_law(self.buffer.chances(jax.tree.map(itemgetter(i), states)))


def unit(buffer: Buffer) -> int:
    """The items of a row of a batch."""
    return buffer.sampler.length if isinstance(buffer.sampler, Slices) else 1
