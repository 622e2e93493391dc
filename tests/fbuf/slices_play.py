"""A buffer that draws slices, played beside its model; and the buffers that it is played with."""

import dataclasses
from typing import Any

import jax
import numpy as np

from fbuf import Buffer, PerTrajectory, Prioritized, Shuffled, Slices, Trajectories
from tests.fbuf.compiled import clear, extend, sample, update
from tests.fbuf.model import PrioritiesModel, assert_tree_is_exact
from tests.fbuf.trajectory_model import ITEM, Rows, TrajectoriesModel, rows

ENDS, ALL = Trajectories("terminated", "truncated"), Trajectories("terminated", "truncated", "id")
RANKED = Prioritized(alpha=1, eps=0.125, stratified=True, new_items="highest_stored")
EVER = Prioritized(alpha=0.5, eps=0)
MANY = 2048  # draws, in which each start of a small ring comes

CASES: list[Any] = [
    (Buffer(7, Slices(3), trajectories=ALL), (1, 3, 11)),
    (Buffer(6, Slices(4, least=2, burn_in=1), trajectories=ENDS, lanes=(2,)), (1, 8)),
    (Buffer(7, Slices(3, EVER), trajectories=ENDS), (1, 3, 11)),
    (Buffer(5, Slices(3, RANKED, least=2, burn_in=2), trajectories=ALL, lanes=(2, 1)), (1, 3, 11)),
    (Buffer(7, Slices(3, PerTrajectory()), trajectories=ALL, lanes=(2,)), (1, 3, 11)),
    (Buffer(7, Slices(2, Shuffled()), trajectories=ENDS), (1, 9)),
]
MORE: list[Any] = [
    (Buffer(7, Slices(7), trajectories=ALL), (1, 3, 11)),
    (Buffer(4, Slices(3, least=1), trajectories=ALL, lanes=(3,)), (1, 2, 9)),
    (Buffer(1, Slices(1), trajectories=ENDS), (1, 3)),
    (Buffer(6, Slices(2, burn_in=4), trajectories=ALL), (1, 6, 13)),
    (Buffer(6, Slices(6, EVER, least=5), trajectories=ALL, lanes=(2,)), (1, 2, 7)),
    (Buffer(6, Slices(2, RANKED, least=1), trajectories=ENDS), (1, 5)),
    (Buffer(1, Slices(1, PerTrajectory()), trajectories=ALL, lanes=(2,)), (1, 3)),
    (Buffer(7, Slices(4, PerTrajectory(), least=1, burn_in=3), trajectories=ENDS), (1, 3, 7)),
    (Buffer(6, Slices(4, PerTrajectory(), least=3), trajectories=ALL, lanes=(3,)), (1, 2, 14)),
    (Buffer(6, Slices(6, PerTrajectory()), trajectories=ENDS), (1, 2, 14)),
    (Buffer(6, Slices(3, Shuffled(), least=1), trajectories=ALL, lanes=(2,)), (1, 2, 14)),
    (Buffer(6, Slices(3, Shuffled(), least=2, burn_in=1), trajectories=ALL, lanes=(2,)), (1, 2, 14)),
    (Buffer(7, Slices(3, PerTrajectory(Shuffled()), least=2), trajectories=ALL, lanes=(2,)), (1, 3, 11)),
    (Buffer(7, Slices(3, PerTrajectory(Shuffled(drop_last=True))), trajectories=ENDS), (1, 3, 11)),
]


def name(what: Any) -> str:
    return f"{what.capacity}x{what.lanes}-{what.sampler}" if isinstance(what, Buffer) else str(what)


class Play:
    """A buffer and its model, side by side."""

    def __init__(self, buffer: Buffer, seed: int = 0) -> None:
        assert isinstance(buffer.sampler, Slices)
        self.buffer, self.rule, self.starts = buffer, buffer.sampler, buffer.sampler.starts
        self.random, self.state = np.random.default_rng(seed), buffer.init(ITEM)
        self.model, self.priorities = TrajectoriesModel(buffer.capacity, buffer.items_per_row), None
        if isinstance(self.starts, Prioritized):
            self._forget(self.starts.alpha)

    def _forget(self, alpha: float) -> None:
        assert isinstance(self.starts, Prioritized)
        slots = self.buffer.capacity * self.buffer.items_per_row
        self.priorities = PrioritiesModel(slots, alpha, self.starts.eps, self.starts.new_items)

    def clear(self) -> None:
        self.state = clear(self.buffer, self.state)
        self.model.clear()
        if self.priorities is not None:
            self._forget(self.priorities.alpha)

    def write(self, new: Rows) -> None:
        assert self.buffer.trajectories is not None
        serials = self.model.write(new.ended, new.id if self.buffer.trajectories.id else None)
        self.state, slots = extend(self.buffer, self.state, new.batch(serials, self.buffer.lanes))
        if self.priorities is not None:
            self.priorities.written(np.asarray(slots)[-self.buffer.capacity :].reshape(-1))

    def update(self) -> None:
        """New priorities for a few slots, stored or not, starts or not, equal or not, some of no use."""
        assert self.priorities is not None
        count = self.buffer.capacity * self.buffer.items_per_row
        slots = self.random.integers(-1, count + 1, 6).astype(np.int32)
        given = self.random.choice([0.0, 0.25, 0.5, 1, 2, 4, np.nan], 6).astype(np.float32)
        self.state = update(self.buffer, self.state, slots, given)
        self.priorities.update(slots, given)

    def reweight(self) -> None:
        assert self.priorities is not None and isinstance(self.starts, Prioritized)
        self.priorities.alpha = float(self.random.choice([0.5, 1, 2]))
        starts = self.starts.reweight(self.state.sampler.starts, self.priorities.alpha)
        self.state = dataclasses.replace(self.state, sampler=dataclasses.replace(self.state.sampler, starts=starts))

    def chances(self) -> dict[int, float]:
        """What the model says of each start that can be drawn."""
        if isinstance(self.starts, PerTrajectory):
            return self.model.chances_per_trajectory(self.rule.shortest, self.rule.length)
        return self.model.chances(self.rule.shortest, None if self.priorities is None else self.priorities.values())

    def drawable(self) -> int:
        """How many starts there are, or trajectories."""
        if isinstance(self.starts, PerTrajectory):
            return sum(len(each.slots) >= self.rule.shortest for each in self.model.stored())
        return len(self.model.starts(self.rule.shortest))

    def draw(self, count: int) -> Any:
        """A draw of which all rows are what the model says."""
        key = jax.random.key(int(self.random.integers(2**31)))
        self.state, items, draw = sample(self.buffer, self.state, key, count * self.rule.length)
        draw, serials = jax.tree.map(np.asarray, draw), np.asarray(items["serial"])
        chances = self.chances()
        assert draw.size == self.drawable()
        assert draw.starts.shape == (count,) and draw.mask.shape == draw.slots.shape == serials.shape
        assert not draw.mask[~draw.valid].any()
        assert set(draw.starts[draw.valid].tolist()) <= set(chances)
        if chances:
            if isinstance(self.starts, PerTrajectory):
                assert draw.smallest == draw.probability.min()
            else:
                np.testing.assert_allclose(draw.smallest, min(chances.values()), rtol=1e-5)
        for start in np.unique(draw.starts[draw.valid]).tolist():
            of_start = draw.valid & (draw.starts == start)
            window, inside = self.model.window(start, self.rule.length, self.rule.burn_in)
            np.testing.assert_array_equal(serials[of_start], [window] * of_start.sum())
            np.testing.assert_array_equal(draw.mask[of_start], [inside] * of_start.sum())
            np.testing.assert_allclose(draw.probability[of_start], chances[start], rtol=1e-5)
        return draw

    def draw_all(self) -> None:
        """Enough draws that each start comes, and no other; with Shuffled, each once an epoch."""
        if isinstance(self.starts, Shuffled):
            wanted, found = set(self.chances()), list[int]()
            for _ in range(0, len(wanted) + 1, 4):
                draw = self.draw(4)
                assert draw.valid.sum() == min(4, len(wanted) - len(found))
                found += draw.starts[draw.valid].tolist()
                if len(found) == len(wanted):
                    break
            assert sorted(found) == sorted(wanted)
            return
        draw, chances = self.draw(MANY), self.chances()
        if isinstance(self.starts, PerTrajectory) and isinstance(self.starts.trajectories, Shuffled):
            assert draw.valid.sum() == (0 if self.starts.trajectories.drop_last else self.drawable())
            return
        assert draw.valid.all() if chances else not draw.valid.any()
        likely = {slot for slot, chance in chances.items() if chance * MANY > 25}
        assert likely <= set(draw.starts.tolist())
        if self.priorities is None:
            assert likely == set(chances)
        else:
            assert_tree_is_exact(self.state.sampler.starts.tree)


def played(buffer: Buffer, *writes: Any, seed: int = 0) -> Play:
    """A buffer of one lane, or of these, after writes of codes, one string for a row."""
    play = Play(buffer, seed)
    for codes in writes:
        play.write(rows([list(code) for code in codes]))
    return play
