"""A sample without the entry that should hold its priorities is refused, and names the entries that are there."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RemoteTensorDictReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import check_same, flat_td, state_of

STORAGES = [ListStorage, LazyStackStorage, CompressedListStorage, LazyTensorStorage, LazyMemmapStorage]


def prioritized(storage=LazyTensorStorage, kind=TensorDictPrioritizedReplayBuffer, **kwargs):
    buffer = kind(storage=storage(8), **kwargs)
    buffer.extend(flat_td(range(6)))
    buffer.update_priority(torch.arange(6), torch.arange(6) + 1.0)
    return buffer


def of_td(storage=LazyTensorStorage, **kwargs):
    return prioritized(storage, alpha=1.0, beta=1.0, **kwargs)


def of_rpc(storage=LazyTensorStorage, **kwargs):
    return prioritized(storage, RemoteTensorDictReplayBuffer, sampler=PrioritizedSampler(8, 1.0, 1.0), **kwargs)


def in_an_ensemble(storage=LazyTensorStorage, **kwargs):
    return ReplayBufferEnsemble(of_td(storage, **kwargs), of_td(storage, **kwargs), sample_from_all=True)


def plain_in_an_ensemble(storage=LazyTensorStorage):
    members = [prioritized(storage, PrioritizedReplayBuffer, alpha=1.0, beta=1.0) for _ in range(2)]
    return ReplayBufferEnsemble(*members, sample_from_all=True)


def of(buffer):
    return [state_of(member) for member in getattr(buffer, "members", [buffer])]


@pytest.mark.parametrize("storage", STORAGES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("make", [of_td, of_rpc, in_an_ensemble, plain_in_an_ensemble], ids=lambda make: make.__name__)
def test_a_mistyped_key_changes_nothing(make, storage):
    buffer = make(storage)
    for wrong, shown in (("td_eror", "'td_eror'"), (("loss", "td_error"), r"\('loss', 'td_error'\)")):
        sample = buffer.sample(4)
        sample[wrong] = torch.ones(sample.batch_size)
        before = of(buffer)
        with pytest.raises(KeyError, match=rf"no entry 'td_error'; its entries are .*{shown}.*did you mean {shown}\?"):
            buffer.update_tensordict_priority(sample)
        check_same(of(buffer), before)
    sample["td_error"] = torch.full(sample.batch_size, 9.0)
    buffer.update_tensordict_priority(sample)
    assert all((member.sampler.priorities == 9).any() for member in getattr(buffer, "members", [buffer]))


@pytest.mark.parametrize("key", ["td", ("loss", "td"), ("a", "b", "td")], ids=str)
def test_the_key_can_be_nested_and_set(key):
    buffer = of_td(priority_key="other")
    buffer.priority_key = key
    sample = buffer.sample(4)
    with pytest.raises(KeyError, match="td"):
        buffer.update_tensordict_priority(sample)
    with pytest.raises(KeyError, match="td"):  # the parent is no tensordict
        buffer.update_tensordict_priority(sample.copy().set("loss", torch.ones(4)).set("a", torch.ones(4)))
    buffer.update_tensordict_priority(sample.set(key, torch.full((4,), 9.0)))
    assert (buffer.sampler.priorities[sample["index"]] == 9).all()
    for wrong in (None, 3, ("loss", 3), ()):
        with pytest.raises(TypeError, match=r"priority_key must be a name.* tuple of names"):
            buffer.priority_key = wrong
        with pytest.raises(TypeError, match=r"priority_key must be a name.* tuple of names"):
            TensorDictReplayBuffer(priority_key=wrong)
    assert buffer.priority_key == key


def test_new_rows_without_priorities_get_the_default_one():
    """Data need not have priorities. In a list, also after data that had them."""
    for update_priority in (None, True):
        buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=ListStorage(8))
        buffer.extend(flat_td([0, 1]).set("td_error", torch.tensor([2.0, 5.0])))
        buffer.extend(flat_td([2, 3]), update_priority=update_priority)
        buffer.add(flat_td([4])[0])
        check_same(buffer.sampler.priorities, torch.tensor([2.0, 5.0, 5.0, 5.0, 5.0]))


def test_without_a_prioritized_sampler_there_is_no_effect():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(flat_td(range(6)))
    buffer.update_tensordict_priority(buffer.sample(4))
    ensemble = ReplayBufferEnsemble(buffer, of_td(), sample_from_all=True)
    sample = ensemble.sample(8)
    with pytest.raises(KeyError, match="td_error"):  # one member has priorities
        ensemble.update_tensordict_priority(sample)


def test_items_of_one_dim_and_no_items():
    buffer = of_td()
    with pytest.raises(KeyError, match="td_error"):
        buffer.update_tensordict_priority(buffer.sample(4)[0])
    before = state_of(buffer)
    buffer.update_tensordict_priority(TensorDict({"index": torch.zeros(0, dtype=torch.int64)}, [0]))
    check_same(state_of(buffer), before)
