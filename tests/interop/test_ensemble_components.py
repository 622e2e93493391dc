"""StorageEnsemble, SamplerEnsemble and WriterEnsemble by themselves."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    StorageEnsemble,
    WriterEnsemble,
)
from tests.interop.rows import flat_td


def storage_of(first=0, count=6, kind=LazyTensorStorage):
    storage = kind(8)
    storage.set(range(count), flat_td(range(first, first + count)))
    return storage


def storages(count=3, **options):
    return StorageEnsemble(*(storage_of(100 * place) for place in range(count)), **options)


def samplers(count=3, **options):
    return SamplerEnsemble(*(RandomSampler() for _ in range(count)), **options)


def writers(count=3):
    return WriterEnsemble(*(RoundRobinWriter() for _ in range(count)))


KINDS = {"storage": storages, "sampler": samplers, "writer": writers}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_an_index_names_a_member_or_an_ensemble_of_some(make):
    ensemble = make()
    members = list(ensemble.members)
    assert len(ensemble) == 3 and ensemble[:] is ensemble[...] is ensemble and ensemble[-1] is members[2]
    for index in (slice(1, None), [1, 2], torch.tensor([1, 2]), np.array([1, 2]), range(1, 3)):
        part = ensemble[index]
        assert type(part) is type(ensemble) and list(part.members) == members[1:]
    bad = [(3, IndexError), ([-4], IndexError), ((), IndexError), (torch.tensor([0.5]), TypeError), ("a", TypeError)]
    for index, error in [*bad, (torch.zeros(1, 1, dtype=torch.int64), RuntimeError)]:
        with pytest.raises(error):
            ensemble[index]


@pytest.mark.parametrize(("name", "make"), KINDS.items(), ids=KINDS)
def test_members_of_another_kind_or_number_are_refused(name, make):
    kind = type(make())
    with pytest.raises(ValueError, match=f"at least one {name}"):
        kind()
    with pytest.raises(TypeError, match=f"{name} 1 must be a .*, got int"):
        kind(make()[0], 3)
    with pytest.raises(TypeError, match=f"{name} 0 is an ensemble itself"):
        kind(make())


# ---------------------------------------------------------------------- storages


def test_the_transforms_of_members_go_along():
    ensemble = storages(transforms=[None, lambda data: data.set("a", data["obs"]), None])
    assert ensemble.transforms[0] is None and ensemble[1:].transforms[0] is ensemble.transforms[1]
    drawn = TensorDict({"buffer_ids": torch.tensor([1, 0, 1]), "index": torch.tensor([[0, 1], [2, 3], [4, 5]])}, [3])
    found = ensemble.get(drawn)
    assert [place for place, _ in found] == [1, 0, 1]
    assert [rows["obs"][:, 0].tolist() for _, rows in found] == [[100, 101], [2, 3], [104, 105]]
    assert ["a" in rows for _, rows in found] == [True, False, True]
    with pytest.raises(TypeError, match="transforms must be as many as storages: got 1 for 3"):
        storages(transforms=[None])


# ---------------------------------------------------------------------- samplers


def test_a_draw_is_of_members_and_slots():
    index, info = samplers(num_buffer_sampled=4).sample(storages(), 8)
    assert index.batch_size == info.batch_size == (4,) and set(index.keys()) == {"index", "buffer_ids"}
    assert index["index"].shape == (4, 2) and index["buffer_ids"].shape == (4,) and set(info.keys()) == set()
    found = storages().get(index)
    assert [place for place, _ in found] == index["buffer_ids"].tolist()
    wanted = 100 * index["buffer_ids"][:, None] + index["index"]
    assert torch.equal(torch.stack([rows["obs"][:, 0] for _, rows in found]), wanted.float())


@pytest.mark.parametrize("given", [[1, 3], torch.tensor([1, 3]), torch.tensor([0.5, 1.5]), np.array([2, 6])])
def test_p_is_of_sum_one(given):
    ensemble = samplers(2, p=given)
    assert ensemble.p.dtype == torch.float32 and ensemble.p.tolist() == [0.25, 0.75]
    for wrong in ([1, -1], [1], [0, 0], [float("nan"), 1]):
        with pytest.raises(ValueError, match="p must"):
            ensemble.p = wrong
    assert ensemble.p.tolist() == [0.25, 0.75] and ensemble[1:].p.tolist() == [1]
    ensemble.p = shares = np.random.default_rng(0).random(2)
    saved = ensemble.choice.state()["p"]
    ensemble.p = saved  # not divided once more
    assert ensemble.choice.state()["p"] == saved and not np.array_equal(saved, shares)
    ensemble.p = None
    assert ensemble.p is None and ensemble[:1].p is None
    with pytest.raises(RuntimeError, match="exclude"):
        samplers(2, sample_from_all=True).p = [1, 1]


def test_slots_of_unlike_length_are_nested():
    ensemble = SamplerEnsemble(SamplerWithoutReplacement(), SamplerWithoutReplacement(), sample_from_all=True)
    held = StorageEnsemble(storage_of(count=6), storage_of(100, count=5, kind=ListStorage))
    ensemble.sample(held, 8)
    index, info = ensemble.sample(held, 8)
    assert index["index"].is_nested and [each.shape[0] for each in index["index"].unbind(0)] == [2, 1]
    assert [len(rows) for _, rows in held.get(index)] == [2, 1] and info.batch_size == (2,)


def test_slots_that_are_coordinates():
    lanes = LazyTensorStorage(12, ndim=2)
    lanes.set(slice(0, 4), TensorDict({"obs": torch.arange(12.0).reshape(4, 3)}, [4, 3]))
    held = StorageEnsemble(lanes, lanes)
    index, _ = samplers(2).sample(held, 10)
    assert index["index"].shape == (2, 5, 2)
    for part, (_, rows) in zip(index["index"], held.get(index), strict=True):
        assert torch.equal(rows["obs"], (part[:, 0] * 3 + part[:, 1]).float())


def test_draws_that_are_refused():
    with pytest.raises(TypeError, match="StorageEnsemble"):
        samplers().sample(storage_of(), 6)
    with pytest.raises(ValueError, match="3 samplers for 2 storages"):
        samplers().sample(storages(2), 6)
    with pytest.raises(ValueError, match="divisible"):
        samplers().sample(storages(), 7)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage: member 1"):
        samplers(2).sample(StorageEnsemble(storage_of(), LazyTensorStorage(4)), 6)
    assert torch.equal(torch.get_rng_state(), state)
