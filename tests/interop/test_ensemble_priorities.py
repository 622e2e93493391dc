"""Priorities of an ensemble's samples reach the members that have them, and only these."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import check_same, flat_td, state_of, trajectories


def uniform(count=6, storage=LazyTensorStorage, **kwargs):
    buffer = TensorDictReplayBuffer(storage=storage(8), **kwargs)
    buffer.extend(flat_td(range(count)))
    return buffer


def prioritized(count=6, storage=LazyTensorStorage, rows=flat_td, **kwargs):
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=storage(8), **kwargs)
    buffer.extend(rows(range(count)))
    return buffer


def plain(count=6):
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(8))
    buffer.extend(flat_td(range(count)))
    return buffer


def priorities(buffer):
    return buffer.sampler.priorities


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_samples_carry_the_weights_of_their_members(storage):
    ensemble = ReplayBufferEnsemble(*(prioritized(storage=storage) for _ in range(2)), sample_from_all=True)
    ensemble[0].update_priority(torch.arange(6), torch.arange(1.0, 7.0))
    sample, info = ensemble.sample(40, return_info=True)
    assert torch.allclose(sample["priority_weight"][0], 1 / (sample["index", "index"][0] + 1))
    assert (sample["priority_weight"][1] == 1).all()
    check_same(info["priority_weight"], sample["priority_weight"])


def test_items_of_members_without_priorities_weigh_one_in_every_batch():
    ensemble = ReplayBufferEnsemble(uniform(), prioritized(), num_buffer_sampled=1)
    ensemble[1].update_priority(0, 0.5)
    batches = [ensemble.sample(64) for _ in range(20)]
    weights = {int(batch["index", "buffer_ids"][0, 0]): batch["priority_weight"] for batch in batches}
    assert set(weights) == {0, 1} and (weights[0] == 1).all() and set(weights[1].unique().tolist()) == {0.5, 1.0}
    assert "priority_weight" not in ReplayBufferEnsemble(uniform(), uniform()).sample(4)


@given(data=st.data())
def test_priorities_follow_the_sample(data):
    """Against one priority at a time, given to the member of each item; of equal items the last counts."""
    makers = data.draw(st.lists(st.sampled_from([uniform, prioritized, plain]), min_size=1, max_size=4))
    members = [make(data.draw(st.sampled_from([1, 4]))) for make in makers]
    ensemble = ReplayBufferEnsemble(*members, num_buffer_sampled=data.draw(st.integers(1, 4)))
    parts, each = ensemble.sampler.num_buffer_sampled, 3  # each other number would be compiled anew
    sample, info = ensemble.sample(parts * each, return_info=True)
    new = torch.rand(parts, each) + 0.1
    wanted = [priorities(buffer).clone() if buffer.sampler.hooks.takes_priorities else None for buffer in members]
    for part in range(parts):
        for item in range(each):
            held = wanted[int(sample["index", "buffer_ids"][part, item])]
            if held is not None:
                held[int(sample["index", "index"][part, item])] = new[part, item]
    if all(held is None for held in wanted) or data.draw(st.booleans()):
        sample["td_error"] = new[..., None] if data.draw(st.booleans()) else new
        ensemble.update_tensordict_priority(sample.reshape(-1) if data.draw(st.booleans()) else sample)
    else:
        ensemble.update_priority(info["index"], new.reshape(-1) if data.draw(st.booleans()) else new)
    for buffer, held in zip(members, wanted, strict=True):
        if held is not None:
            assert torch.equal(priorities(buffer), held)


def test_several_values_an_item_are_reduced_by_the_member():
    members = [prioritized(rows=trajectories, reduction=how) for how in ("max", "mean")]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True)
    sample = ensemble.sample(6)
    assert sample.batch_size == (2, 3, 4)
    sample["td_error"] = torch.arange(4.0).expand(2, 3, 4)
    ensemble.update_tensordict_priority(sample)
    for part, wanted in ((0, 3.0), (1, 1.5)):
        assert (priorities(members[part])[sample["index", "index"][part, :, 0]] == wanted).all()


def test_coordinates_name_items():
    def lanes():
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(12, ndim=2), sampler=PrioritizedSampler(12, 1.0, 1.0), priority_key="td_error"
        )
        buffer.extend(TensorDict({"a": torch.arange(12).reshape(3, 4)}, [3, 4]))
        return buffer

    ensemble = ReplayBufferEnsemble(lanes(), lanes(), sample_from_all=True)
    for route in ("sample", "index"):
        sample, info = ensemble.sample(10, return_info=True)
        new = torch.rand(2, 5) + 2
        if route == "sample":
            ensemble.update_tensordict_priority(sample.set("td_error", new))
        else:
            ensemble.update_priority(info["index"], new)
        for part in range(2):
            wanted = priorities(ensemble[part]).clone()
            rows, columns = sample["index", "index"][part].unbind(-1)
            for slot, value in zip(rows * 3 + columns, new[part], strict=True):
                wanted[slot] = value
            assert torch.equal(priorities(ensemble[part]), wanted)


def test_parts_of_unlike_length():
    members = [uniform(5, sampler=SamplerWithoutReplacement()), prioritized()]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True)
    ensemble.sample(8)
    sample, info = ensemble.sample(8, return_info=True)
    assert sample.batch_size == (2, -1)
    slots = sample[1]["index", "index"]
    sample[1]["td_error"] = slots + 5.0
    ensemble.update_tensordict_priority(sample)
    assert torch.equal(priorities(members[1])[slots], slots + 5.0)
    ensemble.update_priority(info["index"], torch.tensor([9.0, *(slots + 7.0).tolist()]))
    assert torch.equal(priorities(members[1])[slots], slots + 7.0)


def test_marked_rows_get_the_default_priority():
    ensemble = ReplayBufferEnsemble(prioritized(), uniform(), sample_from_all=True)
    ensemble[0].update_priority(torch.arange(6), 5.0)
    _, info = ensemble.sample(8, return_info=True)
    slots = info["index", "index"][0].unique()
    ensemble[0].update_priority(torch.arange(6), 0.5)
    ensemble.mark_update(info["index"])
    assert (priorities(ensemble[0])[slots] == 5).all() and (priorities(ensemble[0]) == 5).sum() == slots.numel()


def test_no_member_has_priorities():
    ensemble = ReplayBufferEnsemble(uniform(), uniform())
    sample, info = ensemble.sample(4, return_info=True)
    ensemble.update_tensordict_priority(sample.set("td_error", torch.ones(2, 2)))
    with pytest.warns(UserWarning, match="not a prioritized sampler"):
        ensemble.update_priority(info["index"], 1.0)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (torch.tensor([[2.0, 2], [2, -1]]), ValueError),
        (torch.tensor([[2.0, 2], [2, float("nan")]]), ValueError),
        (torch.ones(2, 2, dtype=torch.bool), TypeError),
    ],
)
def test_priorities_that_one_member_would_refuse_change_none(bad, error):
    ensemble = ReplayBufferEnsemble(prioritized(), prioritized(), sample_from_all=True)
    sample, info = ensemble.sample(4, return_info=True)
    before = [state_of(ensemble[i]) for i in range(2)]
    with pytest.raises(error):
        ensemble.update_priority(info["index"], bad)
    with pytest.raises(error):
        ensemble.update_tensordict_priority(sample.set("td_error", bad))
    check_same([state_of(ensemble[i]) for i in range(2)], before)


def test_calls_that_name_nothing_of_the_ensemble():
    ensemble = ReplayBufferEnsemble(prioritized(), prioritized(reduction="other"), sample_from_all=True)
    sample, info = ensemble.sample(4, return_info=True)
    of_a_member = ensemble[0].sample(4)
    before = [state_of(ensemble[i]) for i in range(2)]
    index = info["index"]
    for wrong in (torch.tensor([0, 1]), 0, sample["obs"], index.exclude("buffer_ids")):
        with pytest.raises(TypeError, match='needs the "index" that came with a sample'):
            ensemble.update_priority(wrong, 1.0)
    with pytest.raises(RuntimeError, match="3 priorities for 4 indices"):
        ensemble.update_priority(index, torch.ones(3))
    for key, value in (("buffer_ids", 2), ("buffer_ids", -1), ("index", 6)):
        other = index.clone()
        other[key][1] = value
        with pytest.raises(IndexError):
            ensemble.update_priority(other, 2.0)
        with pytest.raises(IndexError):
            ensemble.update_tensordict_priority(sample.clone().set("index", other))
    with pytest.raises(KeyError, match='no "index" of an ensemble'):
        ensemble.update_tensordict_priority(sample.exclude("index"))
    with pytest.raises(KeyError, match='no "index" of an ensemble'):
        ensemble.update_tensordict_priority(of_a_member)
    with pytest.raises(NotImplementedError, match="reduction"):
        ensemble.update_tensordict_priority(sample.clone().set("td_error", torch.ones(2, 2, 3)))
    check_same([state_of(ensemble[i]) for i in range(2)], before)


def test_members_that_are_no_tensordict_buffers_take_one_value_an_item():
    ensemble = ReplayBufferEnsemble(prioritized(), plain(), sample_from_all=True)
    sample = ensemble.sample(4).set("td_error", torch.full((2, 2, 3), 9.0))
    with pytest.raises(RuntimeError, match="6 priorities for 2 items"):
        ensemble.update_tensordict_priority(sample)
    assert (priorities(ensemble[0]) == 1).all() and (priorities(ensemble[1]) == 1).all()
