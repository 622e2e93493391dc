"""Where trajectories start and stop in a storage, for all kinds of storages, writes and markers: against lists of items."""

import contextlib
import itertools
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
    Storage,
    TensorDictReplayBuffer,
)
from interop.samplers.boundary_keys import BoundaryKeys
from tests.interop.slice_model import SliceModel, check_law, cut, drawn, shares, starts


class Noting(LazyTensorStorage):
    """A storage of a user who looks at what is written."""

    def set(self, cursor, data, *, set_cursor=True):
        super().set(cursor, data, set_cursor=set_cursor)


class Reading(LazyTensorStorage):
    """A storage of a user who looks at what is read."""

    def get(self, index):
        return super().get(index)


class Plain(Storage):
    """A storage of a user that shares nothing with ours."""

    def __init__(self, max_size):
        super().__init__(max_size)
        self.items = []

    def set(self, cursor, data, *, set_cursor=True):
        for place, item in zip(cursor, data, strict=True) if isinstance(data, list) else [(cursor, data)]:
            self.items[int(place) : int(place) + 1] = [item]

    def get(self, index):
        index = index[0] if isinstance(index, tuple) else index
        found = self.items[index] if isinstance(index, int | slice) else [self.items[int(place)] for place in index]
        return torch.stack(found) if isinstance(found, list) else found

    def __len__(self):
        return len(self.items)

    def _empty(self):
        self.items = []


KINDS = {
    "memory": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
    "lists": LazyStackStorage,
    "set replaced": Noting,
    "get replaced": Reading,
    "another": Plain,
}


def reader(storage, **keys):
    """A buffer that draws every trajectory whole, once."""
    sampler = SliceSamplerWithoutReplacement(slice_len=64, strict_length=False, **keys)
    return ReplayBuffer(storage=storage, sampler=sampler, collate_fn=_itself)


def _itself(data):
    return data


def whole(buffer):
    """All trajectories that it knows of."""
    return sorted(drawn(buffer, 64 * 1000))


def made(make, model):
    """A storage for the rows of a model."""
    items = model.capacity * model.lanes
    return make(items, ndim=1 + len(model.shape)) if model.shape else make(items)


CASES = [
    (name, lanes) for name in KINDS for lanes in [(), (2,), (3, 2)] if not lanes or name not in ("lists", "another")
]


@pytest.mark.parametrize(("name", "lanes"), CASES, ids=[f"{name} {list(lanes)}" for name, lanes in CASES])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_histories(name, lanes, seed):
    random = np.random.default_rng(seed)
    model = SliceModel(int(random.choice([8, 11, 20])), lanes)
    model.random = random
    storage = made(KINDS[name], model)
    keys = {"traj_key": "id"} if random.random() < 0.5 else {"end_key": ("next", "done")}
    strict, length = bool(random.random() < 0.5), int(random.integers(1, 5))
    writing = ReplayBuffer(storage=storage, collate_fn=_itself)
    whole_ones = reader(storage, **keys)
    slicing = ReplayBuffer(
        storage=storage, sampler=SliceSampler(slice_len=length, strict_length=strict, **keys), collate_fn=_itself
    )
    chance, most = random.choice([0.05, 0.3, 0.9]), int(random.choice([1, 4, model.capacity, 3 * model.capacity]))
    for _ in range(25):
        data = model.write_some(int(random.integers(1, most + 1)), chance)
        writer = writing if random.random() < 0.7 else whole_ones
        if data.shape[-1] == 1 and random.random() < 0.5:
            writing.add(data.transpose(0, -1)[0])
            whole_ones.writer.cursor = slicing.writer.cursor = writing.writer.cursor
        else:
            writer.extend(data)
            writing.writer.cursor = whole_ones.writer.cursor = writer.writer.cursor
        if random.random() < 0.1:
            for each in (writing, whole_ones):
                each.empty()
            model.clear()
            continue
        if random.random() < 0.3:
            continue
        if random.random() < 0.2:
            whole_ones.set_sampler(pickle.loads(pickle.dumps(whole_ones.sampler)))
        assert whole(whole_ones) == model.trajectories()
        legal = shares(model.trajectories(), length, strict)
        if legal:
            assert set(drawn(slicing, 20 * length)) <= set(legal)
        else:
            with pytest.raises(RuntimeError, match="no stored trajectory is long enough"):
                slicing.sample(20 * length)


@pytest.mark.parametrize("seed", range(6))
def test_starts_that_may_be_drawn_by_priority(seed):
    random = np.random.default_rng(seed)
    model = SliceModel(16 if seed % 2 else 8, () if seed % 2 else (2,), by_turns=seed == 5)
    model.random = random
    length, strict = int(random.integers(1, 5)), seed % 3 > 0
    right = [False, True, length - 1][seed % 3]
    need = length if right is False else min(2, length) if right is True else 1
    key = {"traj_key": "id"} if random.random() < 0.5 or model.by_turns else {"end_key": ("next", "done")}
    sampler = PrioritizedSliceSampler(16, 1.0, 1.0, slice_len=length, strict_length=strict, span=(False, right), **key)
    buffer = TensorDictReplayBuffer(storage=made(LazyTensorStorage, model), sampler=sampler, batch_size=8 * length)
    chance, most = random.choice([0.05, 0.3, 0.9]), int(random.choice([1, 4, 40]))
    for _ in range(25):
        buffer.extend(model.write_some(int(random.integers(1, most + 1)), chance))
        if random.random() < 0.4:
            continue
        legal = starts(model.trajectories(), length, strict, need)
        if not legal:
            with pytest.raises(RuntimeError, match="no stored trajectory is long enough"):
                buffer.sample()
            continue
        assert set(drawn(buffer)) <= set(legal.values())
        allowed = np.asarray(sampler.functional_state.tree.leaves)[: len(buffer)] > 0
        numbers = np.array(model.numbers())
        assert sorted(numbers[allowed].tolist()) == sorted(legal)


# ------------------------------------------------------------------ who writes


def test_what_is_new_is_read_and_nothing_else(monkeypatch):
    read = []
    reading = BoundaryKeys.read

    def counted(self, storage, rows, lanes):
        found = reading(self, storage, rows, lanes)
        read.append(len(found.flags))
        return found

    monkeypatch.setattr(BoundaryKeys, "read", counted)
    model = SliceModel(1000)
    buffer = reader(LazyTensorStorage(1000))
    for _ in range(300):
        buffer.extend(model.write_some(7, 0.2))
        whole(buffer)
        whole(buffer)
    assert sum(read) == 2100


# ------------------------------------------------------------------ edits in place


def _through_an_index(buffer, key, value):
    rows = buffer[:].clone()
    rows[key] = value
    buffer[2:6] = rows[2:6]


def _through_rows(buffer, key, value):
    rows = buffer[:].clone()
    rows[key] = value
    buffer[torch.tensor([5, 3])] = rows[torch.tensor([5, 3])]
    buffer[-4] = rows[-4]


EDITS = {
    "rb[i] = x": _through_an_index,
    "rb[[i]] = x": _through_rows,
    "rb[k] = v": lambda buffer, key, value: buffer.__setitem__(key, value),
    "set_": lambda buffer, key, value: buffer.set_(key, value),
    "set_at_": lambda buffer, key, value: buffer.set_at_(key, value[2:6], slice(2, 6)),
    "update_": lambda buffer, key, value: buffer.update_({key: value}),
    "write_all": lambda buffer, key, value: buffer.write_all(buffer[:].clone().set(key, value)),
}


def runs(buffer, oldest):
    """The items of each run of one id, from the oldest row on."""
    rows = buffer[:]
    items, ids = rows["x"].roll(-oldest).tolist(), rows["id"].roll(-oldest).tolist()
    return cut(items, [one != other for one, other in itertools.pairwise(ids)] + [True])


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("rows", [8, 13])
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_edits_in_place(make, edit, rows):
    storage = make(8)
    buffer = ReplayBuffer(storage=storage, sampler=SliceSamplerWithoutReplacement(slice_len=1, traj_key="id"))
    beside = reader(storage, traj_key="id")
    buffer.extend(SliceModel(8).write(np.zeros((rows, 1), bool), np.arange(rows)[:, None] // 2))
    before = runs(buffer, rows % 8)
    assert whole(beside) == sorted(before)
    taken = drawn(buffer, 1)
    for key in ("id", "x"):
        edit(buffer, key, buffer[:][key].clone())  # it is as before: the epoch goes on
        taken += drawn(buffer, 1)
    taken += drawn(buffer, len(before) - 3)
    assert len(taken) == len({place for place, each in enumerate(before) for (item,) in taken if item in each})
    edit(buffer, "id", torch.where((torch.arange(8) > 2) & (torch.arange(8) < 6), 77, buffer[:]["id"]))
    after = runs(buffer, rows % 8)
    assert after != before
    assert whole(beside) == sorted(after)
    assert len(drawn(buffer, 20)) == len(after)


# ------------------------------------------------------------------ trajectories by turns


def by_turns(ids):
    """Rows with the time as "x"; nothing in them ends."""
    return np.zeros((len(ids), 1), bool), np.array(ids)[:, None]


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_by_turns(seed):
    random = np.random.default_rng(seed)
    envs = int(random.integers(2, 7))
    model = SliceModel(int(random.integers(2 * envs, 60)), by_turns=True)
    length, strict = int(random.integers(1, 5)), bool(random.random() < 0.5)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(model.capacity),
        sampler=SliceSampler(slice_len=length, strict_length=strict, traj_key="id"),
    )
    whole_ones = reader(buffer.storage, traj_key="id")
    chance, steps = random.choice([0, 0.05, 0.3]), int(random.choice([1, 1, 3, 20]))
    ids = list(range(envs))
    for _ in range(40):
        rows = []
        for _ in range(steps):
            for env in range(envs):
                rows.append(ids[env])
                if random.random() < chance:
                    ids[env] = max(ids) + 1
        buffer.extend(model.write(*by_turns(rows)))
        if random.random() < 0.3:
            continue
        assert whole(whole_ones) == model.trajectories()
        legal = shares(model.trajectories(), length, strict)
        if legal:
            assert set(drawn(buffer, 20 * length)) <= set(legal)
        else:
            with pytest.raises(RuntimeError, match="no stored trajectory is long enough"):
                buffer.sample(length)


@pytest.mark.parametrize("prioritized", [False, True])
def test_they_begin_where_others_were_written_in_runs_before(prioritized):
    model = SliceModel(32, by_turns=True)
    choices = {"slice_len": 3, "traj_key": "id"}
    sampler = PrioritizedSliceSampler(32, 1, 1, **choices) if prioritized else SliceSampler(**choices)
    buffer = ReplayBuffer(storage=LazyTensorStorage(32), sampler=sampler)
    for run in range(5):
        buffer.extend(model.write(*by_turns([run] * 8)))
        assert set(drawn(buffer, 150)) <= set(shares(model.trajectories(), 3))
    for _ in range(6):
        buffer.extend(model.write(*by_turns([1000, 1001])))
        legal = set(shares(model.trajectories(), 3))
        if prioritized:
            assert legal == set(starts(model.trajectories(), 3).values())
        assert set(drawn(buffer, 300)) <= legal
    for run in range(20, 23):
        buffer.extend(model.write(*by_turns([run] * 8)))
        assert set(drawn(buffer, 300)) <= set(shares(model.trajectories(), 3))


@pytest.mark.parametrize("strict", [False, True])
def test_the_law_by_turns(strict):
    torch.manual_seed(0)
    model = SliceModel(20, by_turns=True)
    sampler = SliceSampler(slice_len=3, strict_length=strict, traj_key="id")
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler)
    for ids in ([0, 1, 2], [0, 1, 2], [3, 1, 2], [3, 1, 2], [4, 1, 2], [5, 1, 2], [5, 1, 2], [5, 1, 2]):
        buffer.extend(model.write(*by_turns(ids)))
    check_law(drawn(buffer, 3 * 5000), shares(model.trajectories(), 3, strict))


def test_items_by_turns_around_rows_that_were_written_elsewhere():
    def items(ids, first):
        return TensorDict({"x": torch.arange(first, first + len(ids)), "id": torch.tensor(ids)}, [len(ids)])

    buffer = reader(LazyTensorStorage(10), traj_key="id")
    buffer.extend(items([1, 2, 1, 2, 1, 2], 0))
    assert whole(buffer) == [(0, 2, 4), (1, 3, 5)]
    buffer.storage.set(slice(0, 2), items([1, 2], 100))
    assert whole(buffer) == [(2, 4), (3, 5), (100,), (101,)]
    buffer.storage.set(slice(2, 6), items([1, 2, 1, 2], 102))
    assert whole(buffer) == [(100, 102, 104), (101, 103, 105)]


def test_several_dims_are_lanes_and_not_turns():
    buffer = reader(LazyTensorStorage(12, ndim=2), traj_key="id")
    ids = torch.tensor([[0, 1, 0, 1, 0, 1], [2, 2, 2, 2, 2, 2]])
    buffer.extend(TensorDict({"x": torch.arange(12).reshape(2, 6), "id": ids}, [2, 6]))
    assert whole(buffer) == [(0,), (1,), (2,), (3,), (4,), (5,), (6, 7, 8, 9, 10, 11)]


# ------------------------------------------------------------------ the entries that mark trajectories

IDS = torch.tensor([3, 3, 3, 7, 7, 3, 3, 9])
ENDS = torch.tensor([0, 0, 1, 0, 1, 0, 1, 0], dtype=torch.bool)
CUT = [(0, 1, 2), (3, 4), (5, 6), (7,)]


def marked(**entries):
    rows = len(next(iter(entries.values())))
    data = TensorDict({"x": torch.arange(rows)}, [rows])
    for key, value in entries.items():
        if key in ("done", "over", "lost", "truncated", "terminated"):
            data["next", key] = value
        else:
            data[("collector", key) if key in ("traj_ids", "mask") else key] = value
            data["next", key] = torch.zeros(rows)
    return data


MARKS = {
    "ids": ({"traj_key": "id"}, {"id": IDS}),
    "ids of bytes": ({"traj_key": "id"}, {"id": IDS.to(torch.uint8)}),
    "ids of two values": ({"traj_key": "id"}, {"id": torch.tensor([1, 1, 1, 0, 0, 1, 1, 0], dtype=torch.bool)}),
    "ids below zero": ({"traj_key": "id"}, {"id": -IDS}),
    "ends": ({"end_key": ("next", "done")}, {"done": ENDS}),
    "ends of one value": ({"end_key": ("next", "done")}, {"done": ENDS[:, None]}),
    "ends of several dims": ({"end_key": ("next", "done")}, {"done": ENDS[:, None, None]}),
    "ends of integers": ({"end_key": ("next", "done")}, {"done": ENDS.long() * 5}),
    "several ends": (
        {"end_keys": [("next", "over"), ("next", "lost"), "absent"]},
        {"over": ENDS & (torch.arange(8) < 3), "lost": (ENDS & (torch.arange(8) > 2))[:, None]},
    ),
    "ids of floats": ({"traj_key": "id"}, {"id": IDS / 2}),
    "ends of floats": ({"end_key": ("next", "done")}, {"done": ENDS / 2}),
    "ids and ends": (
        {"traj_key": "id", "end_key": ("next", "done")},
        {"id": IDS.clamp(max=7) // 4 + IDS // 9, "done": ENDS},
    ),
    "ids, and ends by default": ({"traj_key": "id"}, {"id": IDS * 0, "done": ENDS | (IDS == 9)}),
    "ends, and ids by default": ({"end_key": ("next", "over")}, {"over": ENDS & (torch.arange(8) < 3), "episode": IDS}),
    "ids alone": ({"traj_key": "id", "only_named_keys": True}, {"id": IDS, "done": ~ENDS}),
    "ends alone": ({"end_key": ("next", "over"), "only_named_keys": True}, {"over": ENDS, "done": ~ENDS}),
    "ends where ids are not stored": ({"traj_key": "absent", "end_key": ("next", "over")}, {"over": ENDS}),
    "done where ids are not stored": ({"traj_key": "absent"}, {"done": ENDS}),
    "found: of a collector": (
        {},
        {"traj_ids": IDS, "episode": torch.zeros(8, dtype=torch.int64), "done": ENDS & False},
    ),
    "found: of episodes": ({}, {"episode": IDS, "done": ENDS & False}),
    "found: of episodes, one value": ({}, {"episode": IDS[:, None]}),
    "found: first items": ({}, {"is_init": (torch.arange(8) % 7 % 5 % 3 == 0)[:, None]}),
    "found: time-outs": ({}, {"truncated": ENDS, "done": ENDS & False}),
    "found: terminal states": ({}, {"terminated": ENDS, "done": ENDS & False}),
    "found: padding": ({}, {"episode": IDS * 0, "mask": torch.tensor([1, 1, 1, 0, 0, 1, 1, 0], dtype=torch.bool)}),
    "found: ids and ends together": ({}, {"traj_ids": torch.tensor([0, 0, 0, 0, 0, 5, 5, 5]), "done": ENDS}),
    "found: agents of one episode": ({}, {"episode": IDS, "done": torch.ones(8, 2, dtype=torch.bool)}),
    "found: done": ({}, {"done": ENDS}),
}


@pytest.mark.parametrize(("keys", "entries"), MARKS.values(), ids=MARKS)
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyStackStorage, Reading])
def test_entries_that_mark_trajectories(make, keys, entries):
    buffer = reader(make(10), **keys)
    buffer.extend(marked(**entries))
    assert whole(buffer) == CUT


@pytest.mark.parametrize(("form", "dtype"), [((), torch.uint8), ((1, 1), torch.bool)])
def test_ends_of_several_lanes(form, dtype):
    model = SliceModel(6, (3,))
    data = model.write_some(9, 0.4)
    data["next", "done"] = data["next", "done"].reshape(3, 9, *form).to(dtype)
    buffer = reader(LazyTensorStorage(18, ndim=2), end_key=("next", "done"))
    buffer.extend(data)
    assert whole(buffer) == model.trajectories()


def test_an_item_of_several_agents_has_one_id():
    data = marked(id=IDS)
    data["next", "done"] = torch.stack([ENDS, ENDS & False], 1)[..., None]
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=SliceSampler(slice_len=2, traj_key="id"))
    buffer.extend(data)
    batch = buffer.sample(64)
    last = torch.arange(64) % 2 == 1
    stored = data["next", "done"][batch["x"]]
    assert torch.equal(batch["next", "done"], stored | last[:, None, None])


# ------------------------------------------------------------------ lists, whose items may differ


def crossing(buffer):
    """How many slices of 3 steps join episodes of 4."""
    obs = buffer.sample(300)["x"].reshape(-1, 3)
    return int((obs[:, 0] // 4 != obs[:, -1] // 4).sum())


def stepped(first, count, episode):
    times = torch.arange(first, first + count)
    data = TensorDict({"x": times, "is_init": times % 12 == 0}, [count])
    return data.set("episode", times // 4) if episode else data


def _by_key(buffer, rows):
    buffer["episode"] = rows["episode"]


def _by_items(buffer, rows):
    for place in range(len(rows)):
        buffer[place] = rows[place]


def _over_all(buffer, rows):
    for start in range(0, 24, 6):
        buffer.extend(stepped(24 + start, 6, True))
        with contextlib.suppress(RuntimeError):  # some items have no episode yet
            buffer.sample()


LATER = {
    "by key": _by_key,
    "all items": lambda buffer, rows: buffer.__setitem__(slice(None), rows),
    "each item": _by_items,
    "all written over": _over_all,
}


OF_LISTS_ONLY = ("each item", "all written over")  # tensors have the keys of the first write


@pytest.mark.parametrize(
    ("make", "later"),
    [(LazyStackStorage, name) for name in LATER] + [(LazyTensorStorage, n) for n in LATER if n not in OF_LISTS_ONLY],
)
def test_markers_that_come_after_the_first_draw(make, later):
    buffer = TensorDictReplayBuffer(storage=make(24), sampler=SliceSampler(slice_len=3), batch_size=300)
    buffer.extend(stepped(0, 24, False))
    assert crossing(buffer) > 0
    LATER[later](buffer, stepped(0, 24, True))
    assert crossing(buffer) == 0


def test_markers_of_some_items_only_are_refused():
    buffer = TensorDictReplayBuffer(storage=LazyStackStorage(24), sampler=SliceSampler(slice_len=3), batch_size=300)
    buffer.extend(stepped(0, 12, False))
    buffer.extend(stepped(12, 12, True))
    with pytest.raises(RuntimeError, match="every item must have one value under each"):
        buffer.sample()
