"""Sample units: windows around drawn items, against a walk over what was written."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SampleUnit,
    Sequence,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    Transition,
)
from tests.interop.rows import check_same, refused, steps


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


def expand(unit, anchors, ends=(4, 9), count=10):
    buffer = buffer_of(count, ends, unit)
    index, info = unit.expand(torch.tensor(anchors), {}, buffer.storage)
    return index.reshape(len(anchors), -1).tolist(), info["validity_mask"].reshape(len(anchors), -1).int().tolist()


def test_windows_written_out():
    assert expand(Sequence(3), [3, 9, 0]) == ([[3, 4, 4], [9, 9, 9], [0, 1, 2]], [[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    assert expand(Sequence(2, burn_in=2, bootstrap=1), [6, 9]) == (
        [[5, 5, 6, 7, 8], [7, 8, 9, 9, 9]],
        [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
    )
    assert expand(Sequence(7, "stop"), [3, 9]) == (
        [[0, 1, 2, 3, 4, 4, 4], [5, 6, 7, 8, 9, 9, 9]],
        [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0]],
    )
    assert expand(Sequence(2, "stop", dilation=2), [3, 5])[0] == [[2, 4], [5, 7]]
    assert expand(Sequence(3, "include_reset", burn_in=2), [5, 9]) == (
        [[3, 4, 5, 6, 7], [7, 8, 9, 9, 9]],
        [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
    )
    # The ring has come around: rows 0, 1 and 2 are the newest, row 3 is the oldest.
    assert expand(Sequence(3, burn_in=1), [9, 2, 3], ends=(4, 9), count=13) == (
        [[8, 9, 9, 9], [1, 2, 2, 2], [3, 3, 4, 4]],
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]],
    )
    assert expand(Sequence(3, done_key=None), [9, 2], count=13)[0] == [[9, 0, 1], [2, 2, 2]]


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


def test_dicts_and_tensorclasses_have_ends_too():
    for data in (
        {"obs": torch.arange(4), "next": {"done": torch.tensor([0, 1, 0, 1])}},
        TensorDict({"obs": torch.arange(4), "next": {"done": torch.tensor([0, 1, 0, 1])}}, [4]),
    ):
        buffer = ReplayBuffer(storage=LazyTensorStorage(8), sample_unit=Sequence(2))
        buffer.extend(data)
        batch, info = buffer.sample(9, return_info=True)
        check_same(batch["obs"].reshape(9, 2)[:, 1], torch.tensor([1, 1, 3, 3])[info["anchor_index"][::2]])
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sample_unit=Sequence(2, done_key="reward"))
    buffer.extend(steps(range(3)))  # its "reward" is 0, 1, 2
    assert buffer.sample(3).batch_size == (6,)


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
        ({"obs": torch.zeros(3), "next": {"done": torch.zeros(3, 2, dtype=torch.bool)}}, ValueError),
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


def test_several_values_a_row_are_reduced_first():
    buffer = buffer_of(
        10, [], Sequence(2), kind=TensorDictPrioritizedReplayBuffer, alpha=1.0, beta=1.0, reduction="sum"
    )
    batch = buffer.sample(32)
    batch["td_error"] = batch["index"].float()[:, None] + torch.zeros(64, 3)
    buffer.update_tensordict_priority(batch)
    wanted = torch.ones(10)
    for anchor in batch["anchor_index"].unique():
        wanted[anchor] = 3.0 * min(anchor + 1, 9)
    check_same(buffer.sampler.priorities, wanted)


def test_parts_of_a_batch_and_batches_without_priorities():
    buffer = buffer_of(10, [], Sequence(2), kind=TensorDictPrioritizedReplayBuffer, alpha=1.0, beta=1.0)
    buffer.update_priority(torch.arange(10), 0.5)
    batch = buffer.sample(64)
    assert set(batch["anchor_index"].tolist()) == set(range(10))
    part = batch[batch["anchor_index"] < 3]
    buffer.update_tensordict_priority(part)
    check_same(buffer.sampler.priorities, torch.tensor([1.0] * 3 + [0.5] * 7))
    part["td_error"] = torch.full((len(part),), 4.0)
    buffer.update_tensordict_priority(part[part["step_in_sequence"] == 1])
    check_same(buffer.sampler.priorities, torch.tensor([4.0] * 3 + [0.5] * 7))
    buffer.update_tensordict_priority(part[:0])
    with refused(buffer, TypeError):
        buffer.update_tensordict_priority(part.set("td_error", part["td_error"] > 0))
    check_same(buffer.sampler.priorities, torch.tensor([4.0] * 3 + [0.5] * 7))


def test_priorities_in_lanes():
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(12, ndim=2), sample_unit=Sequence(2)
    )
    buffer.extend(episodes(range(6), [], lanes=2))
    batch = buffer.sample(100)
    assert batch["index"].shape == batch["anchor_index"].shape == (200, 2)
    batch["td_error"] = batch["obs"].float()
    buffer.update_tensordict_priority(batch)
    time = torch.tensor([1, 2, 3, 4, 5, 5])
    check_same(buffer.sampler.priorities, torch.stack((time, time + 1000), -1).reshape(-1).float())


def test_a_plain_prioritized_buffer_names_its_anchors():
    buffer = buffer_of(10, [], Sequence(2), kind=PrioritizedReplayBuffer, alpha=1.0, beta=1.0)
    _, info = buffer.sample(3, return_info=True)
    assert info["priority_weight"].shape == (6,)
    buffer.update_priority(info["anchor_index"], 5.0)
    assert set((buffer.sampler.priorities == 5).nonzero().flatten().tolist()) == set(info["anchor_index"].tolist())


def test_samples_without_windows_are_updated_by_index():
    buffer = buffer_of(10, [], None, kind=TensorDictPrioritizedReplayBuffer, alpha=1.0, beta=1.0)
    batch = (
        buffer.sample(4).set("td_error", torch.full((4,), 3.0)).set("anchor_index", torch.zeros(4, dtype=torch.int64))
    )
    buffer.update_tensordict_priority(batch)
    assert set((buffer.sampler.priorities == 3).nonzero().flatten().tolist()) == set(batch["index"].tolist())


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


def test_the_identity_unit_changes_nothing():
    one, other = (
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(10), sample_unit=unit, generator=torch.Generator().manual_seed(1)
        )
        for unit in (None, Transition())
    )
    for buffer in (one, other):
        buffer.extend(episodes(range(10), []))
    check_same(one.sample(5), other.sample(5))
    assert other._reads_slots and other._unit is None
    assert Transition().expand(3, {}, None) == (3, {})


def test_samplers_that_name_tuples_are_expanded():
    class Both(Sampler):
        def sample(self, storage, batch_size):
            return (torch.tensor([0, 1]),), {}

    buffer = buffer_of(10, [], Sequence(2), sampler=Both())
    check_same(buffer.sample(1)["obs"], torch.tensor([0, 1, 1, 2]))
    with pytest.raises(ValueError, match="dims"):
        Sequence(2).expand((torch.zeros(1), torch.zeros(1)), {}, buffer.storage)


def test_batches_ahead_are_windows_too():
    buffers = [
        buffer_of(
            10, [4], Sequence(3), kind=TensorDictReplayBuffer, prefetch=2, batch_size=4,
            generator=torch.Generator().manual_seed(2),
        )
        for _ in range(2)
    ]  # fmt: skip
    for _ in range(5):
        check_same(buffers[0].sample(), buffers[1].sample())


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_copies_expand_alike(twin_of):
    buffer = buffer_of(13, [4, 9], Sequence(3), kind=TensorDictReplayBuffer, generator=torch.Generator().manual_seed(2))
    twin = twin_of(buffer)
    for _ in range(3):
        check_same(buffer.sample(5), twin.sample(5))


def test_transforms_and_collate_see_windows():
    seen = []
    buffer = buffer_of(
        10, [], Sequence(2), collate_fn=lambda data: seen.append(len(data)) or data,
        transform=lambda data: data.set("twice", data["obs"] * 2),
    )  # fmt: skip
    batch = buffer.sample(3)
    assert seen == [6]
    check_same(batch["twice"], batch["obs"] * 2)


@pytest.mark.parametrize(
    ("choices", "error"),
    [
        ({"length": 0}, ValueError),
        ({"length": 2.5}, TypeError),
        ({"length": 2, "episode_boundary": "wrap"}, ValueError),
        ({"length": 2, "burn_in": -1}, ValueError),
        ({"length": 2, "bootstrap": -1}, ValueError),
        ({"length": 2, "dilation": 0}, ValueError),
        ({"length": 2, "done_key": 3}, TypeError),
        ({"length": 2, "done_key": ()}, TypeError),
    ],
)
def test_windows_that_cannot_be_are_refused(choices, error):
    with pytest.raises(error):
        Sequence(**choices)


def test_other_things_than_units_are_refused():
    for kind, choices in (
        (ReplayBuffer, {}),
        (PrioritizedReplayBuffer, {"alpha": 1.0, "beta": 1.0}),
        (TensorDictPrioritizedReplayBuffer, {"alpha": 1.0, "beta": 1.0}),
    ):
        for wrong in (3, Sequence):
            with pytest.raises(TypeError, match="sample_unit"):
                kind(storage=LazyTensorStorage(4), sample_unit=wrong, **choices)
    with pytest.raises(TypeError):
        SampleUnit()
    assert repr(Sequence(3)).startswith("Sequence(length=3") and repr(Transition()) == "Transition()"


def test_another_default_device_makes_no_difference():
    data = episodes(range(10), [4])
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(10), sample_unit=Sequence(2, burn_in=1)
    )
    torch.set_default_device("meta")
    try:
        buffer.extend(data)
        batch = buffer.sample(4)
        buffer.update_tensordict_priority(batch)
        buffer.update_tensordict_priority(batch.set("td_error", batch["obs"].float()))
    finally:
        torch.set_default_device(None)
    check_same(batch["obs"], data["obs"][batch["index"]])
