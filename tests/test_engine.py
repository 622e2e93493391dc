"""One oracle for both engines: the functions of `fbuf` and the host engine of `interop` keep the same laws.

Each part of the host engine has a twin in `fbuf` (docs/know/engine.md). A pair of adapters gives both the same interface;
the oracles are plain Python.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import trajectories
from interop.host.epochs import Epoch
from interop.host.priorities import HostPriorities
from interop.host.ring import Ring
from interop.host.trajectories import Trajectories
from tests.fbuf.model import PrioritiesModel, RingModel
from tests.fbuf.trajectory_model import TrajectoriesModel

SEEDS = pytest.mark.parametrize("seed", range(3))
jit = functools.partial(jax.jit, static_argnums=0)


def raw_key(number: int) -> np.ndarray:
    return np.array([7, number], np.uint32)


# ---------------------------------------------------------------------- ring


class FunctionalRing:
    def __init__(self, capacity: int) -> None:
        self.writer, self.capacity = fbuf.RoundRobin(), capacity
        self.state = self.writer.init(capacity, None)

    def write(self, count: int) -> tuple[int, int, int]:
        self.state = self.writer.claim(self.state, None, count, self.capacity)[0]
        return int(self.state.cursor), int(self.state.size), int(self.state.written[0])


class HostRing:
    def __init__(self, capacity: int) -> None:
        self.ring, self.capacity = Ring(), capacity

    def write(self, count: int) -> tuple[int, int, int]:
        start = self.ring.cursor
        self.ring.wrote_run(start, count, self.capacity)
        self.ring.size = max(self.ring.size, min(start + count, self.capacity))
        return self.ring.cursor, self.ring.size, self.ring.written


@pytest.mark.parametrize("kind", [FunctionalRing, HostRing])
@pytest.mark.parametrize("capacity", [1, 7])
def test_cursor_size_and_count_are_those_of_rows_taken_one_by_one(kind: Any, capacity: int) -> None:
    ring, model = kind(capacity), RingModel(capacity)
    for count in [1, 3, 7, 8, 2, 20, 1]:
        for _ in range(count):
            model.claim()
        assert ring.write(count) == (model.cursor, model.size, model.written)


# ---------------------------------------------------------------------- priorities


class FunctionalPriorities:  # on the CPU: a GPU rounds powers otherwise
    def __init__(self, rule: fbuf.Prioritized, capacity: int) -> None:
        self.rule, self.size, self.state = rule, 0, jax.device_put(rule.init(capacity), jax.devices("cpu")[0])

    def written(self, slots: np.ndarray) -> None:
        self.state = jit(fbuf.Prioritized.written)(self.rule, self.state, slots)
        self.size = max(self.size, int(slots.max()) + 1)

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self.state = jit(fbuf.Prioritized.update)(self.rule, self.state, slots, priorities)

    def values(self) -> np.ndarray:
        return np.asarray(self.state.priorities)[: self.size]

    def sample(self, key: np.ndarray, count: int, beta: float) -> tuple[np.ndarray, np.ndarray]:
        sample = jax.jit(fbuf.Prioritized.sample, static_argnums=(0, 3))
        draw = sample(self.rule, self.state, key, count, np.int32(self.size))[1]
        return np.asarray(draw.slots), np.asarray(fbuf.importance_weights(draw, beta))


class EnginePriorities:
    def __init__(self, rule: fbuf.Prioritized, capacity: int) -> None:
        self.held = HostPriorities(rule, capacity, rule.alpha)

    def written(self, slots: np.ndarray) -> None:
        self.held.written(slots)

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self.held.update(slots, priorities, priorities.max())

    def values(self) -> np.ndarray:
        return self.held.values.given

    def sample(self, key: np.ndarray, count: int, beta: float) -> tuple[np.ndarray, np.ndarray]:
        slots, weights, _ = self.held.sample(key, count, self.held.size, beta)
        return slots.numpy(), weights.numpy()


@pytest.mark.parametrize("new_items", ["highest_ever", "highest_stored"])
@SEEDS
def test_priorities_follow_the_model_and_draws_agree_to_the_bit(seed: int, new_items: Any) -> None:
    random, capacity = np.random.default_rng(seed), 40
    rule = fbuf.Prioritized(alpha=0.7, eps=0.0, new_items=new_items)
    both = FunctionalPriorities(rule, capacity), EnginePriorities(rule, capacity)
    model, cursor = PrioritiesModel(capacity, 0.7, 0.0, new_items), 0
    for step in range(12):
        slots = np.arange(cursor, cursor + 8, dtype=np.int32) % capacity
        cursor += 8
        changed = random.choice(min(cursor, capacity), 8, replace=False).astype(np.int32)
        priorities = random.choice([0.0, 0.5, 3.0, 7.5], 8).astype(np.float32)
        for each in (*both, model):
            each.written(slots)
            each.update(changed, priorities)
        for each in both:
            np.testing.assert_array_equal(each.values(), model.given[: min(cursor, capacity)])
        found, wanted = (each.sample(raw_key(step), 64, 0.4) for each in both)
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_array_equal(found[1], wanted[1])
        chances = model.values()[found[0]]
        assert (chances > 0).all()
        np.testing.assert_allclose(found[1], (chances / model.values()[model.values() > 0].min()) ** -0.4, rtol=1e-5)


# ---------------------------------------------------------------------- epochs


class FunctionalEpoch:
    def __init__(self, drop_last: bool) -> None:
        self.rule = fbuf.Shuffled(drop_last=drop_last)
        self.state = self.rule.init(64)

    def take(self, count: int, length: int, key: np.ndarray) -> list[int]:
        sample = jax.jit(fbuf.Shuffled.sample, static_argnums=(0, 3))
        self.state, draw = sample(self.rule, self.state, key, count, np.int32(length))
        found: list[int] = np.asarray(draw.slots)[np.asarray(draw.valid)].tolist()
        return found


class HostEpoch:
    def __init__(self, drop_last: bool) -> None:
        self.epoch = Epoch(drop_last=drop_last)

    def take(self, count: int, length: int, key: np.ndarray) -> list[int]:
        found: list[int] = self.epoch.take(count, length, key).tolist()
        return found


@pytest.mark.parametrize("kind", [FunctionalEpoch, HostEpoch])
@pytest.mark.parametrize("drop_last", [False, True])
@SEEDS
def test_an_epoch_returns_each_position_once(kind: Any, drop_last: bool, seed: int) -> None:
    random, epoch = np.random.default_rng(seed), kind(drop_last)
    left, length = set[int](), 0
    for number in range(40):
        if number % 13 == 0:  # another length begins an epoch
            length = int(random.integers(12, 50))
            left = set(range(length))
        count = 5 if drop_last else int(random.choice([1, 5, 12]))  # buffers with drop_last have one batch size
        if len(left) < (count if drop_last else 1):
            left = set(range(length))
        found = epoch.take(count, length, raw_key(number))
        assert len(set(found)) == len(found) == min(count, len(left))
        assert left.issuperset(found)
        left.difference_update(found)


@pytest.mark.parametrize("kind", [FunctionalEpoch, HostEpoch])
def test_every_order_of_an_epoch_is_as_likely_as_any_other(kind: Any) -> None:
    epoch, counts = kind(drop_last=False), dict[tuple[int, ...], int]()
    for number in range(600):
        order = (*epoch.take(2, 3, raw_key(2 * number)), *epoch.take(2, 3, raw_key(2 * number + 1)))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6 and max(abs(count - 100) for count in counts.values()) < 50  # 5 standard deviations


# ---------------------------------------------------------------------- trajectories


class FunctionalTrajectories:
    def __init__(self, capacity: int, lanes: int) -> None:
        self.rule, self.writer, self.capacity, self.lanes = fbuf.Trajectories("end"), fbuf.RoundRobin(), capacity, lanes
        self.ring = self.writer.init(capacity, None)
        self.state = self.rule.init(capacity, lanes, {"end": jax.ShapeDtypeStruct((), np.bool_)})

    def write(self, ended: np.ndarray) -> None:
        kinds, ids = self.rule.marks({"end": jnp.asarray(ended)}, (self.lanes,))
        before = self.ring
        self.ring = self.writer.claim(before, None, len(ended), self.capacity)[0]
        self.state = jax.jit(trajectories.written)(self.state, before, kinds, ids)

    def around(self, slots: np.ndarray) -> list[tuple[int, int]]:
        place = trajectories.place(self.state, self.ring, jnp.asarray(slots, jnp.int32))
        return list(zip(place.before.tolist(), place.after.tolist(), strict=True))


class HostTrajectories:
    def __init__(self, capacity: int, lanes: int) -> None:
        self.index, self.begins = Trajectories(capacity, lanes), np.ones((1, lanes), bool)

    def write(self, ended: np.ndarray) -> None:
        starts = np.concatenate((self.begins, ended))
        self.begins = starts[-1:]
        self.index.written(starts[:-1] & (np.arange(len(ended)) + self.index.now > 0)[:, None])

    def around(self, slots: np.ndarray) -> list[tuple[int, int]]:
        found = {}
        for lane, begin, last in self.index.stored().tolist():
            times = np.arange(max(begin, self.index.oldest), last + 1)
            for place, slot in enumerate(self.index.slots_at(times, np.int64(lane)).tolist()):
                found[slot] = place, len(times) - 1 - place
        return [found[slot] for slot in slots.tolist()]


@pytest.mark.parametrize("kind", [FunctionalTrajectories, HostTrajectories])
@pytest.mark.parametrize("lanes", [1, 3])
@SEEDS
def test_items_know_how_many_of_their_trajectory_are_stored_around_them(kind: Any, lanes: int, seed: int) -> None:
    random, capacity = np.random.default_rng(seed), 11
    index, model = kind(capacity, lanes), TrajectoriesModel(capacity, lanes)
    for count in random.choice([1, 4, 9], 10).tolist():
        ended = random.random((count, lanes)) < 0.3
        index.write(ended)
        model.write(ended.astype(int))
        wanted = {
            slot: (place, len(each.slots) - 1 - place)
            for each in model.stored()
            for place, slot in enumerate(each.slots)
        }
        assert index.around(np.array(list(wanted))) == list(wanted.values())
