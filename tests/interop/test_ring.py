"""Discontinuities: a trajectory ends where a write did not begin at the cursor. Compared with a model of links."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from tests.interop.slice_model import cut, drawn


class Links:
    """A model: each row knows the item before it. A write continues the item in the row before it, unless another did."""

    def __init__(self, capacity, lanes=1):
        self.capacity, self.lanes, self.count = capacity, lanes, 0
        self.clear()

    def clear(self):
        self.rows = {}  # of each: its item, the item before it, and whether it ends an episode
        self.open = set()  # last items of writes that no other write has continued

    def write(self, start, ends):
        """Write new items to rows from `start` on. Returns the items."""
        before = self.rows.get((start - 1) % self.capacity, (None,))[0]
        before = before if before in self.open else None
        self.open.discard(before)
        for step, end in enumerate(ends):
            self.rows[(start + step) % self.capacity] = self.count, before, end
            before, self.count = self.count, self.count + 1
        self.open.add(before)
        return range(self.count - len(ends), self.count)

    def trajectories(self, cursor):
        """The items of each trajectory."""
        follows = [
            row in self.rows
            and row != cursor
            and self.rows.get((row - 1) % self.capacity, (-1,))[0] == self.rows[row][1]
            for row in range(self.capacity)
        ]
        first = follows.index(False)
        rows = [row for row in np.roll(np.arange(self.capacity), -first).tolist() if row in self.rows]
        last = [
            self.rows[row][2] or not follows[(row + 1) % self.capacity] or (row + 1) % self.capacity not in self.rows
            for row in rows
        ]
        return sorted(cut([self.rows[row][0] for row in rows], last))


def data(items, ends, key):
    """Steps. All ids are equal, so that they mark no ends."""
    steps = TensorDict({"x": torch.tensor(list(items))}, [len(ends)])
    steps["next", "done"] = torch.tensor(list(ends))[:, None]
    if key == "id":
        steps["id"] = torch.zeros(len(ends), dtype=torch.int64)
    return steps


def sampler_of(kind, key, length=64):
    marker = {"traj_key": "id"} if key == "id" else {"end_key": ("next", "done")}
    return kind(slice_len=length, strict_length=False, **marker)


def whole(buffer):
    return sorted(drawn(buffer, 64 * 1000))


def itself(batch):
    return batch


STORAGES = {"memory": LazyTensorStorage, "files": LazyMemmapStorage, "lists": LazyStackStorage}


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
@pytest.mark.parametrize("key", ["id", "done"])
@pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
def test_writes_anywhere_between_draws(make, key, seed):
    random = np.random.default_rng(seed)
    capacity = int(random.choice([7, 12, 20]))
    storage, model = make(capacity), Links(capacity)
    buffer = ReplayBuffer(storage=storage, sampler=sampler_of(SliceSamplerWithoutReplacement, key), collate_fn=itself)
    beside = ReplayBuffer(storage=storage, sampler=sampler_of(SliceSampler, key, 3), collate_fn=itself)
    for _ in range(30):
        for _ in range(int(random.integers(1, 5))):
            filled = len(storage)
            ends = (random.random(int(random.integers(1, 6))) < 0.2) & (key == "done")
            if random.random() < 0.5:  # by the writer
                buffer.extend(data(model.write(buffer.writer.cursor, ends), ends, key))
            elif filled:
                start = int(random.integers(0, min(filled, capacity - 1) + 1))
                ends = ends[: capacity - start]
                stop = start + len(ends)
                rows = data(model.write(start, ends), ends, key)
                where = random.integers(3)
                if len(ends) == 1 and where == 0:
                    storage.set(start, rows[0])
                else:
                    storage.set(slice(start, stop) if where == 1 else torch.arange(start, stop), rows)
        if random.random() < 0.05:
            buffer.empty()
            model.clear()
            continue
        if random.random() < 0.1 and make is not LazyStackStorage:
            buffer, beside = (copy.deepcopy(buffer), None) if seed % 2 else (pickle.loads(pickle.dumps(buffer)), None)
            storage = buffer.storage
        if not len(storage):
            continue
        expected = model.trajectories(buffer.writer.cursor)
        assert whole(buffer) == expected
        if beside is not None:
            allowed = {each[at : at + 3] for each in expected for at in range(max(len(each) - 2, 1))}
            assert set(drawn(beside, 3 * 50)) <= allowed


def test_a_direct_write_is_a_discontinuity_until_it_is_overwritten():
    storage = LazyTensorStorage(20)
    buffer = ReplayBuffer(storage=storage, sampler=sampler_of(SliceSamplerWithoutReplacement, "done"))
    flags = [False] * 20
    buffer.extend(data(range(20), flags, "done"))
    for start in (3, 9, 15):
        storage.set(slice(start, start + 2), data([100 + start, 101 + start], [False] * 2, "done"))
    pieces = [(0, 1, 2), (5, 6, 7, 8), (11, 12, 13, 14), (17, 18, 19), (103, 104), (109, 110), (115, 116)]
    assert whole(buffer) == sorted(pieces)
    buffer.extend(data(range(200, 204), flags[:4], "done"))  # at the cursor
    assert whole(buffer) == sorted([(17, 18, 19, 200, 201, 202, 203), (104,), *pieces[1:3], *pieces[5:]])
    buffer.extend(data(range(204, 220), flags[:16], "done"))
    assert whole(buffer) == [tuple(range(200, 220))]


def test_edits_of_items_are_no_discontinuities():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler_of(SliceSamplerWithoutReplacement, "done"))
    buffer.extend(data(range(8), [False] * 8, "done"))
    buffer[2:4] = data([2, 3], [False] * 2, "done")
    buffer.storage[5] = data([5], [False], "done")[0]
    assert whole(buffer) == [tuple(range(8))]


@pytest.mark.parametrize("lanes", [1, 2])
def test_no_prioritized_slice_crosses_a_discontinuity(lanes):
    storage = LazyTensorStorage(12 * lanes, ndim=1 + (lanes > 1))
    sampler = PrioritizedSliceSampler(12 * lanes, 1.0, 0.0, slice_len=3, end_key=("next", "done"))
    buffer = ReplayBuffer(storage=storage, sampler=sampler, dim_extend=0)

    def rows(first, count):
        steps = data(range(first, first + count), [False] * count, "done")
        return steps if lanes == 1 else steps.unsqueeze(1).expand(count, lanes).clone()

    buffer.extend(rows(0, 12))
    for start in (2, 7):
        storage.set(slice(start, start + 2), rows(100 * start, 2))
    slices = {each for _ in range(20) for each in drawn(buffer, 30)}
    assert slices == {(4, 5, 6), (9, 10, 11)}


def test_a_write_of_more_rows_than_the_ring_leaves_no_discontinuity():
    storage = LazyTensorStorage(8)
    buffer = ReplayBuffer(storage=storage, sampler=sampler_of(SliceSamplerWithoutReplacement, "done"))
    buffer.extend(data(range(5), [False] * 5, "done"))
    storage.set(slice(1, 3), data([101, 102], [False] * 2, "done"))
    storage.set(slice(1, 2), data([103], [False], "done"))
    buffer.extend(data(range(5, 24), [False] * 19, "done"))
    assert whole(buffer) == [tuple(range(16, 24))]


@pytest.mark.parametrize(
    ("place", "count", "left"),
    [
        (slice(0, 0), 3, [(0, 1), (4, 5, 6, 7, 8, 9), (100, 101), (200, 201, 202)]),
        (slice(6, 8), 1, [(0, 1), (4, 5), (8, 9), (100, 101), (200,)]),
        (slice(3, 6), 1, [(0, 1), (6, 7, 8, 9), (100,), (200,)]),
        (slice(2, 4), 0, [(0, 1), (4, 5, 6, 7, 8, 9)]),
        (slice(5, None), 1, [(0, 1), (4,), (100, 101), (200,)]),
        (slice(10, None), 2, [(0, 1), (4, 5, 6, 7, 8, 9, 200, 201), (100, 101)]),
    ],
)
def test_discontinuities_move_with_the_items_of_a_list(place, count, left):
    storage = LazyStackStorage(20)
    buffer = ReplayBuffer(
        storage=storage, sampler=sampler_of(SliceSamplerWithoutReplacement, "done"), collate_fn=itself
    )
    buffer.extend(data(range(10), [False] * 10, "done"))
    storage.set(slice(2, 4), data([100, 101], [False] * 2, "done"))
    items = data(range(200, 200 + count), [False] * count, "done")
    storage.set(place, list(items.unbind(0)))
    assert whole(buffer) == sorted(left)
