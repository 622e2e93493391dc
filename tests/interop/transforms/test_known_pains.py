"""What goes wrong with transforms elsewhere: ends of episodes, returns of n steps, stacks of frames, lost entries."""

import gc
import threading
import weakref

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.transforms import (
    CatFrames,
    Compose,
    ExcludeTransform,
    MultiStepTransform,
    RenameTransform,
    RewardScaling,
    SelectTransform,
    UnsqueezeTransform,
)

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage]
PRIORITIZED = {"alpha": 1.0, "beta": 1.0, "batch_size": 64}  # the same everywhere: one program
each_storage = pytest.mark.parametrize("storage", STORAGES)


def episodes(lengths, rewards=None, truncated=True):
    """One after the other: observation t is followed by t + 1, the one after a reset by 100 more."""
    rows = []
    for place, length in enumerate(lengths):
        now = 100.0 * place + torch.arange(length)
        end = torch.arange(length)[:, None] == length - 1
        flags = {"done": end, "truncated": end & truncated, "terminated": end & (not truncated)}
        reward = torch.full((length, 1), 1.0 if rewards is None else float(rewards[place]))
        following = TensorDict({"obs": now[:, None] + 1, "reward": reward, **flags}, [length])
        rows.append(TensorDict({"obs": now[:, None], "next": following}, [length]))
    return torch.cat(rows)


def stored(rb):
    return torch.stack(list(rb.storage)) if isinstance(rb.storage, ListStorage) else rb.storage[:]


# ---------------------------------------------------------------------- returns of n steps


@each_storage
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_first_write_that_is_too_short_stores_nothing_rather_than_an_empty_row(buffer, storage):
    rb = buffer(storage=storage(10), transform=MultiStepTransform(3, 0.5))
    data = episodes([6])
    for rows, count in ((data[:1], 0), (data[1:3], 0), (data[3:4], 1), (data[4:], 3)):
        index = rb.extend(rows)
        assert len(rb) == count and index.shape[0] == (0 if count == 0 else len(rows))
    assert stored(rb)["obs"].flatten().tolist() == [0, 1, 2]


@each_storage
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_steps_can_be_added_one_at_a_time(buffer, storage):
    """Of a single step the time dim is missing that returns of n steps are taken along."""
    one_by_one, at_once = (buffer(storage=storage(10), transform=MultiStepTransform(3, 0.5)) for _ in range(2))
    data = episodes([4, 4], rewards=[1, 100])
    slots = [one_by_one.add(row) for row in data]
    at_once.extend(data)
    assert list(slots[3:]) == [0, 1, 2, 3, 4] and all(len(slot) == 0 for slot in slots[:3])
    left, right = stored(one_by_one), stored(at_once)
    assert left.batch_size == (5,)
    for key in right.keys(True, True):
        assert torch.equal(left[key], right[key]), key


@pytest.mark.parametrize("splits", [[8], [1] * 8, [3, 5], [2, 3, 3]], ids=repr)
def test_rewards_of_the_next_episode_never_spill_in(splits):
    """Neither where it was cut off, nor depending on how many steps are written at a time."""
    rb = ReplayBuffer(storage=LazyTensorStorage(20), transform=MultiStepTransform(3, 0.5))
    data = episodes([4, 4], rewards=[1, 100])
    for part in data.split(splits):
        rb.extend(part)
    rb.extend(episodes([3]))  # what comes later completes them
    rows = rb[:4]
    assert rows["next", "reward"].flatten().tolist() == [1.75, 1.75, 1.5, 1.0]
    assert rows["steps_to_next_obs"].flatten().tolist() == [3, 3, 2, 1]
    assert rows["gamma"].flatten().tolist() == [0.125, 0.125, 0.25, 0.5]
    assert rows["next", "obs"].flatten().tolist() == [3, 4, 4, 4]  # the last is the final one, not that after the reset


def test_what_is_terminal_can_be_that_where_the_steps_arrive():
    """By default each step keeps its own flags; a value behind a terminal step counts nothing only if flags move along."""
    for truncated, factors in ((False, [0.125, 0, 0, 0]), (True, [0.125, 0.125, 0.25, 0.5])):
        transform = MultiStepTransform(3, 0.5, done_keys=[])
        rb = ReplayBuffer(storage=LazyTensorStorage(20), transform=transform)
        rb.extend(episodes([4, 4], truncated=truncated))
        rows = rb[:4]
        arrived = rows["gamma"].flatten() * (~rows["next", "terminated"]).flatten()
        assert arrived.tolist() == factors


def test_a_ring_that_goes_round_never_mixes_old_and_new_steps():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6), transform=MultiStepTransform(3, 0.5), batch_size=16)
    count = 20
    now = torch.arange(float(count))[:, None]
    never = torch.zeros(count, 1, dtype=torch.bool)
    flags = {"done": never, "terminated": never, "truncated": never}
    data = TensorDict({"obs": now, "next": {"obs": now + 1, "reward": now, **flags}}, [count])
    for row in data:
        rb.add(row)
        if len(rb):
            sample = rb.sample()
            start = sample["obs"]
            assert torch.equal(sample["next", "reward"], start + 0.5 * (start + 1) + 0.25 * (start + 2))
            assert torch.equal(sample["next", "obs"], start + 3)
    assert rb.storage[:]["obs"].flatten().sort().values.tolist() == list(range(11, 17))


def test_observations_before_and_after_may_be_views_of_one_tensor():
    frames = torch.arange(9.0)[:, None]
    data = episodes([8])
    data["obs"], data["next", "obs"] = frames[:-1], frames[1:]
    before = data.clone()
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=MultiStepTransform(3, 0.5))
    for part in data.split(3):
        rb.extend(part)
    assert rb[:]["obs"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert rb[:]["next", "obs"].flatten().tolist() == [3, 4, 5, 6, 7]
    for key in before.keys(True, True):
        assert torch.equal(data[key], before[key])
    frames.fill_(-1)  # those that are kept are not the caller's memory
    rb.extend(episodes([3]))
    assert rb.storage[5]["obs"] == 5 and rb.storage[5]["next", "obs"] == 8


@pytest.mark.parametrize(
    "make",
    [
        ReplayBuffer,
        TensorDictReplayBuffer,
        lambda **given: TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, **given),
        lambda **given: ReplayBuffer(sampler=PrioritizedSampler(10, 1.0, 1.0), **given),
        lambda **given: TensorDictReplayBuffer(sampler=SliceSampler(slice_len=2, end_key=("next", "done")), **given),
    ],
    ids=["plain", "tensordicts", "prioritized tensordicts", "prioritized", "slices"],
)
def test_no_kind_of_buffer_ignores_how_many_steps_there_are_to_be(make):
    rb = make(storage=LazyTensorStorage(10), transform=MultiStepTransform(3, 0.5), batch_size=64)
    rb.extend(episodes([8]))
    assert set(rb.sample()["next", "reward"].flatten().tolist()) == {1.75}
    rb.transform[0].n_steps = 2
    rb.extend(episodes([4]))
    assert 1.5 in rb[:]["next", "reward"].flatten().tolist()


def test_priorities_belong_to_the_steps_that_were_stored():
    rb = TensorDictPrioritizedReplayBuffer(
        storage=LazyTensorStorage(10), transform=MultiStepTransform(3, 0.5), **PRIORITIZED
    )
    index = rb.extend(episodes([8]))
    assert index.tolist() == [0, 1, 2, 3, 4]
    sample = rb.sample()
    sample["td_error"] = torch.where(sample["obs"].flatten() == 1, 5.0, 0.0)
    rb.update_tensordict_priority(sample)
    assert set(rb.sample()["obs"].flatten().tolist()) == {1.0}


def test_steps_that_are_kept_keep_no_graph_alive():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=MultiStepTransform(3, 0.5))
    weight = torch.ones(1, requires_grad=True)
    data = episodes([5])
    data["obs"] = data["obs"] * weight
    rb.extend(data)
    assert not any(each.requires_grad for each in rb.storage[:].values(True, True))
    reference = weakref.ref(weight)
    del weight, data
    gc.collect()
    assert reference() is None


def test_streams_of_several_threads_are_torn_nowhere():
    rb = ReplayBuffer(storage=LazyTensorStorage(400), transform=MultiStepTransform(2, 1.0))

    def write(place):
        for _ in range(10):
            rows = episodes([5])
            rows["obs"] += 1000 * place
            rows["next", "obs"] += 1000 * place
            rb.extend(rows)

    threads = [threading.Thread(target=write, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rb) == 4 * 10 * 5 - 2 and rb.write_count == len(rb)
    rows = rb[:]
    assert torch.equal(rows["next", "obs"], rows["obs"] + rows["steps_to_next_obs"].view(-1, 1))


# ---------------------------------------------------------------------- stacks of frames


def stacks_of(data, n):
    return CatFrames(n, dim=-1, in_keys=["obs", ("next", "obs")])(data)


@pytest.mark.parametrize("truncated", [True, False], ids=["truncated", "terminated"])
def test_a_stack_holds_no_frame_of_another_episode(truncated):
    """However it ended, and also where it was shorter than the stack."""
    data = stacks_of(episodes([2, 1, 5], truncated=truncated), 3)
    assert data["obs"].tolist() == [
        [0, 0, 0],
        [0, 0, 1],
        [100, 100, 100],
        [200, 200, 200],
        [200, 200, 201],
        [200, 201, 202],
        [201, 202, 203],
        [202, 203, 204],
    ]
    assert data["next", "obs"][:4].tolist() == [[0, 0, 1], [0, 1, 2], [100, 100, 101], [200, 200, 201]]


def test_stacks_of_sampled_slices_are_those_of_the_episode():
    lengths = [7, 4, 9, 5]
    whole = stacks_of(episodes(lengths), 2)
    by_frame = dict(zip(whole["obs"][:, -1].tolist(), whole["obs"].tolist(), strict=True))
    rb = ReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=SliceSampler(slice_len=3, end_key=("next", "done")),
        transform=Compose(
            lambda data: data.reshape(-1, 3),
            CatFrames(2, dim=-1, in_keys=["obs", ("next", "obs")]),
        ),
        batch_size=30,
    )
    rb.extend(episodes(lengths))
    for _ in range(5):
        sample = rb.sample()
        assert sample.batch_size == (10, 3)
        for row in sample:
            first, *others = row["obs"].tolist()
            assert first[0] == first[1]  # what came before is not in the sample
            assert others == [by_frame[stack[-1]] for stack in others]
            assert torch.equal(row["next", "obs"][:, 1] - row["next", "obs"][:, 0], torch.ones(3))


@each_storage
def test_stacks_and_returns_of_several_steps_go_together(storage):
    """Stacks are made first, of the frames as they came; what is stored is followed by the stack n steps later."""
    rb = ReplayBuffer(
        storage=storage(20),
        transform=Compose(
            MultiStepTransform(2, 0.5), CatFrames(3, dim=-1, in_keys=["obs", ("next", "obs")], as_inverse=True)
        ),
    )
    rb.extend(episodes([2, 5, 3]))
    rows = stored(rb)
    assert rows["obs"][:4].tolist() == [[0, 0, 0], [0, 0, 1], [100, 100, 100], [100, 100, 101]]
    assert rows["next", "obs"][:4].tolist() == [[0, 1, 2], [0, 1, 2], [100, 101, 102], [101, 102, 103]]
    assert rows["next", "reward"][:4].flatten().tolist() == [1.5, 1, 1.5, 1.5]


# ---------------------------------------------------------------------- entries and indices


def test_transforms_lose_neither_nested_entries_nor_the_way_back_to_priorities():
    nested = ("agent", "td_error")
    rb = TensorDictPrioritizedReplayBuffer(
        storage=LazyTensorStorage(10),
        priority_key=nested,
        **PRIORITIZED,
        transform=Compose(
            UnsqueezeTransform(-1, in_keys=[("agent", "obs")]),
            RenameTransform([("agent", "obs")], [("agent", "seen")]),
            SelectTransform(("agent", "seen"), nested),
            ExcludeTransform("nothing of this name"),
        ),
    )
    agent = TensorDict({"obs": torch.arange(5.0)[:, None], "td_error": torch.ones(5)}, [5])
    rb.extend(TensorDict({"agent": agent, "rest": torch.zeros(5)}, [5]))
    sample = rb.sample()
    assert sample["agent", "seen"].shape == (64, 1, 1) and "rest" not in set(sample.keys())
    sample[nested] = torch.where(sample["agent", "seen"].flatten() == 3, 1.0, 0.0)
    rb.update_tensordict_priority(sample)
    assert set(rb.sample()["agent", "seen"].flatten().tolist()) == {3.0}
    assert set(rb.storage[:]["agent"].keys()) == {"obs", "td_error"}


@each_storage
def test_reading_changes_neither_what_is_stored_nor_the_index_that_was_given(storage):
    rb = ReplayBuffer(
        storage=storage(10),
        transform=Compose(
            RewardScaling(0.0, 10.0, in_keys=[("next", "reward")]),
            CatFrames(2, dim=-1, in_keys=["obs"]),
            RenameTransform(["obs"], ["stack"]),
        ),
    )
    data = episodes([5, 5])
    rb.extend(data)
    index = torch.tensor([3, 4, 5])
    for _ in range(2):
        found = rb[index]
        assert found["stack"].tolist() == [[3, 3], [3, 4], [100, 100]]
        assert found["next", "reward"].flatten().tolist() == [10.0] * 3
    assert index.tolist() == [3, 4, 5]
    for key in data.keys(True, True):
        assert torch.equal(stored(rb)[key], data[key])
