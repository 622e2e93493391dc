"""Sample units: windows around drawn items, against a walk over what was written."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from interop import (
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SampleUnit,
    Sequence,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import check_same, refused


def episodes(times, ends, lanes=None):
    """Rows with their time as "obs"; ends are the times at which episodes end."""
    times = torch.as_tensor(times)
    if lanes is not None:
        times = times[None].expand(lanes, -1) + 1000 * torch.arange(lanes)[:, None]
    done = torch.isin(times % 1000, torch.as_tensor(sorted(ends), dtype=torch.int64))[..., None]
    return TensorDict({"obs": times.clone(), "next": TensorDict({"done": done}, times.shape)}, times.shape)


def buffer_of(count, ends, unit, capacity=10, kind=ReplayBuffer, storage=LazyTensorStorage, **choices):
    buffer = kind(storage=storage(capacity), sample_unit=unit, **choices)
    buffer.extend(episodes(range(count), ends))
    return buffer


def window(unit, time, oldest, newest, ends):
    """The times of a window, and which of them are valid."""
    first, last = time, time
    while first > oldest and (unit.episode_boundary == "include_reset" or first - 1 not in ends):
        first -= 1
    while last < newest and (unit.episode_boundary == "include_reset" or last not in ends):
        last += 1
    offsets = np.arange(-unit.burn_in, unit.length + unit.bootstrap) * unit.dilation
    if unit.episode_boundary == "stop":
        offsets = offsets - min(max(time + offsets[-1] - last, 0), time - first)
    wanted = time + offsets
    return np.clip(wanted, first, last), (wanted >= first) & (wanted <= last)


UNITS = st.builds(
    Sequence,
    length=st.integers(1, 5),
    episode_boundary=st.sampled_from(["pad", "stop", "include_reset"]),
    burn_in=st.integers(0, 3),
    bootstrap=st.integers(0, 2),
    dilation=st.integers(1, 3),
)


@given(
    unit=UNITS,
    capacity=st.integers(1, 12),
    counts=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    ends=st.sets(st.integers(0, 60), max_size=20),
    lanes=st.sampled_from([None, 1, 3]),
    done_key=st.booleans(),
)
@settings(max_examples=80)
def test_windows_are_those_of_a_walk(unit, capacity, counts, ends, lanes, done_key):
    if not done_key:
        unit.done_key, ends_that_count = None, set()
    else:
        ends_that_count = ends
    storage = LazyTensorStorage(capacity * (lanes or 1), ndim=1 if lanes is None else 2)
    buffer = ReplayBuffer(storage=storage)
    for place in range(len(counts)):
        buffer.extend(episodes(range(sum(counts[:place]), sum(counts[: place + 1])), ends, lanes))
    newest = sum(counts) - 1
    oldest = max(newest - capacity + 1, 0)
    times = np.arange(oldest, newest + 1).repeat(lanes or 1)
    lane = np.tile(np.arange(lanes or 1), newest - oldest + 1)
    rows = torch.from_numpy(times % capacity)
    anchors = rows if lanes is None else (rows, torch.from_numpy(lane))
    weight = torch.arange(len(times)).double()
    index, info = unit.expand(anchors, {"weight": weight, "note": "kept"}, storage)
    each = unit.burn_in + unit.length + unit.bootstrap
    found, valid = zip(*(window(unit, time, oldest, newest, ends_that_count) for time in times), strict=True)
    wanted = torch.from_numpy(np.concatenate(found) + 1000 * lane.repeat(each))
    check_same(storage.get(index)["obs"], wanted)
    assert info["index"] is index and info["note"] == "kept"
    check_same(info["weight"], weight.repeat_interleave(each))
    check_same(info["validity_mask"], torch.from_numpy(np.concatenate(valid)))
    check_same(info["sequence_id"], torch.arange(len(times)).repeat_interleave(each))
    check_same(info["step_in_sequence"], torch.arange(each).repeat(len(times)))
    learning = torch.zeros(each, dtype=torch.bool)
    learning[unit.burn_in : unit.burn_in + unit.length] = True
    check_same(info["learning_mask"], learning.repeat(len(times)))
    drawn = rows if lanes is None else torch.stack(anchors, -1)
    check_same(info["anchor_index"], drawn.repeat_interleave(each, 0))


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_batch_is_windows_one_after_the_other(kind, storage):
    unit = Sequence(3, burn_in=1)
    buffer = buffer_of(13, [4, 9], unit, kind=kind, storage=storage)
    batch, info = buffer.sample(4, return_info=True)
    assert batch.shape == (16,)
    keys = {"sequence_id", "step_in_sequence", "learning_mask", "validity_mask", "anchor_index", "index"}
    assert set(info) == keys
    check_same(batch["obs"], buffer[:]["obs"][info["index"]])
    index, _ = unit.expand(info["anchor_index"].reshape(4, 4)[:, 0], {}, buffer.storage)
    check_same(index, info["index"])
    if kind is TensorDictReplayBuffer:
        for key in keys:
            check_same(batch[key], info[key])
    else:
        assert keys.isdisjoint(batch.keys())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_ends_have_one_value_an_item(shape, dtype):
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sample_unit=Sequence(2, done_key="end"))
    end = torch.tensor([0, 1, 0]).to(dtype).reshape(3, *shape)
    buffer.extend(TensorDict({"obs": torch.arange(3), "end": end}, [3]))
    batch, info = buffer.sample(20, return_info=True)
    check_same(batch["obs"].reshape(20, 2)[:, 1], torch.tensor([1, 1, 2])[info["anchor_index"][::2]])


def test_items_without_such_ends_are_refused():
    for data, error in (
        ({"obs": torch.zeros(3)}, KeyError),
        ({"obs": torch.zeros(3), "next": {"done": torch.zeros(3, 2, dtype=torch.bool)}}, KeyError),
        (torch.zeros(3), KeyError),
    ):
        buffer = ReplayBuffer(storage=LazyTensorStorage(4), sample_unit=Sequence(2), batch_size=2)
        buffer.extend(data)
        with refused(buffer, error, "done"):
            buffer.sample()
    listed = ReplayBuffer(storage=ListStorage(4), sample_unit=Sequence(2), batch_size=2)
    listed.extend([1, 2, 3])
    with refused(listed, KeyError, "done"):
        listed.sample()


# ------------------------------------------------------------------ priorities


@pytest.mark.parametrize("reshaped", [False, True])
def test_priorities_of_a_window_go_to_its_anchor(reshaped):
    buffer = buffer_of(
        10, [4, 9], Sequence(2, burn_in=1), kind=TensorDictPrioritizedReplayBuffer, alpha=1.0, beta=1.0, eps=0.0
    )
    buffer.update_priority(torch.arange(10), torch.tensor([0, 0, 0, 1.0, 0, 0, 0, 0, 0, 0.5]))
    batch = buffer.sample(64)
    weights = batch["priority_weight"].reshape(64, 3)
    at_three = batch["anchor_index"].reshape(64, 3)[:, 0] == 3
    check_same(weights, torch.where(at_three, weights[at_three][0, 0], weights[~at_three][0, 0])[:, None].expand(64, 3))
    # Window of 3: rows 2 3 4, all valid. Window of 9: rows 8 9 9, of which the last repeats.
    step, anchor = batch["step_in_sequence"], batch["anchor_index"]
    errors = torch.where(anchor == 3, 70.0 - step, 10.0 + 10 * step)
    batch["td_error"] = torch.where(batch["validity_mask"], errors, 1e6)[:, None]
    buffer.update_tensordict_priority(batch.reshape(64, 3) if reshaped else batch)
    check_same(buffer.sampler.priorities, torch.tensor([0, 0, 0, 70.0, 0, 0, 0, 0, 0, 20.0]))


# ------------------------------------------------------------------ in buffers


class Twice(SampleUnit):
    def expand(self, index, info, storage):
        return torch.cat((index, index)), {**info, "half": torch.arange(2 * len(index)) // len(index)}


def test_units_of_ones_own_expand():
    for sampler in (RandomSampler(), PrioritizedSampler(10, 1.0, 1.0)):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, sample_unit=Twice())
        buffer.extend(episodes(range(5), []))
        batch = buffer.sample(3).exclude("priority_weight") if type(sampler) is RandomSampler else None
        if batch is not None:
            check_same(batch["obs"][:3], batch["obs"][3:])
            check_same(batch["half"], torch.tensor([0, 0, 0, 1, 1, 1]))
        else:
            with pytest.raises(RuntimeError, match="priority_weight"):  # three weights, six rows
                buffer.sample(3)


# ------------------------------------------------------------------ one unit, several buffers


def interleaved(count, lanes, first=0):
    """Rows of environments in turn, each with its number as id; "obs" is 1000 * environment + time."""
    times = torch.arange(first, first + count).repeat_interleave(lanes)
    env = torch.arange(lanes).repeat(count)
    return TensorDict({"obs": 1000 * env + times, "episode": env}, [count * lanes])


def test_one_unit_serves_buffers_in_several_threads():
    unit, wrong = Sequence(4), []
    interval = sys.getswitchinterval()

    def work(lanes):
        buffer = ReplayBuffer(storage=LazyTensorStorage(30 * lanes), sample_unit=unit, batch_size=20)
        for step in range(60):
            buffer.extend(interleaved(3, lanes, 3 * step))
            obs = buffer.sample()["obs"].reshape(20, 4)
            wrong.extend(obs[(obs // 1000 != obs[:, :1] // 1000).any(1)].tolist())

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, (2, 5)))
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_windows_depend_on_the_rows_alone():
    """Not on trajectories that were interleaved before they were overwritten."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), sample_unit=Sequence(3, "include_reset"), batch_size=200)
    time = 0
    for ids in ([0, 1, 0, 1], [2, 2, 2], [3, 3, 3]):
        rows = torch.arange(time, time + len(ids))
        buffer.extend(TensorDict({"obs": rows, "episode": torch.tensor(ids)}, [len(ids)]))
        time += len(ids)
        found = {tuple(window) for window in buffer.sample()["obs"].reshape(-1, 3).tolist()}
    fresh = copy.deepcopy(buffer)
    assert {tuple(window) for window in fresh.sample()["obs"].reshape(-1, 3).tolist()} == found


def test_a_writer_without_order_is_refused():
    for kind, choices in (
        (TensorDictReplayBuffer, {"sample_unit": Sequence(2)}),
        (HERReplayBuffer, {"reward_fn": abs}),
    ):
        with pytest.raises(
            TypeError, match="follow the order of writing, which a TensorDictMaxValueWriter does not keep"
        ):
            kind(storage=LazyTensorStorage(6), writer=TensorDictMaxValueWriter(rank_key="obs"), **choices)
