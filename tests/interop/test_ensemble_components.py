"""StorageEnsemble, SamplerEnsemble and WriterEnsemble by themselves."""

import copy
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from tensordict import LazyStackedTensorDict, TensorDict

from interop import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    RoundRobinWriter,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    StorageEnsemble,
    TensorDictRoundRobinWriter,
    WriterEnsemble,
)
from interop.data import randomness
from tests.interop.rows import check_same, flat_td


def storage_of(first=0, count=6, kind=LazyTensorStorage):
    storage = kind(8)
    storage.set(range(count), flat_td(range(first, first + count)))
    return storage


def storages(count=3, **options):
    return StorageEnsemble(*(storage_of(100 * place) for place in range(count)), **options)


# ---------------------------------------------------------------------- storages


def test_the_members_of_a_storage_ensemble():
    ensemble = storages()
    assert len(ensemble) == 3 and ensemble.max_size == 24 and ensemble.transforms is None and ensemble[:] is ensemble
    assert ensemble[...] is ensemble and list(ensemble) == [ensemble[0], ensemble[1], ensemble[2]]
    assert ensemble[-1] is ensemble[2] and 2 in ensemble and 3 not in ensemble
    for index in (slice(1, None), [1, 2], torch.tensor([1, 2]), np.array([1, 2]), range(1, 3)):
        part = ensemble[index]
        assert type(part) is StorageEnsemble and list(part) == [ensemble[1], ensemble[2]]
    check_same(ensemble[1, 2], ensemble[1][2])
    assert [row["obs"][0].item() for row in ensemble[:, 4]] == [4, 104, 204]
    assert [rows["obs"][:, 0].tolist() for rows in ensemble[1:, [0, 1]]] == [[100, 101], [200, 201]]


def test_the_transforms_of_members_go_along():
    ensemble = storages(transforms=[None, lambda data: data.set("a", data["obs"]), None])
    assert ensemble.transforms[0] is None and len(ensemble.transforms[1]) == 1
    assert ensemble[1:].transforms[0] is ensemble.transforms[1]
    drawn = TensorDict({"buffer_ids": torch.tensor([1, 0, 1]), "index": torch.tensor([[0, 1], [2, 3], [4, 5]])}, [3])
    found = ensemble.get(drawn)
    assert [place for place, _ in found] == [1, 0, 1]
    assert [rows["obs"][:, 0].tolist() for _, rows in found] == [[100, 101], [2, 3], [104, 105]]
    assert ["a" in rows for _, rows in found] == [True, False, True]


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (3, IndexError),
        ([-4], IndexError),
        ((3, 0), IndexError),
        ((), IndexError),
        (torch.tensor([0.5]), TypeError),
        ("a", TypeError),
        (torch.zeros(1, 1, dtype=torch.int64), RuntimeError),
        (TensorDict({"buffer_ids": torch.tensor([3]), "index": torch.zeros(1, 2, dtype=torch.int64)}, [1]), IndexError),
        (TensorDict({"buffer_ids": torch.tensor([0]), "index": torch.full((1, 2), 6)}, [1]), IndexError),
        (TensorDict({"buffer_ids": torch.tensor([0])}, [1]), KeyError),
    ],
)
def test_bad_indices_of_storages(index, error):
    with pytest.raises(error):
        storages()[index]


def test_storages_of_another_kind_or_number():
    with pytest.raises(ValueError, match="at least one storage"):
        StorageEnsemble()
    with pytest.raises(TypeError, match="storage 1 must be a Storage, got int"):
        StorageEnsemble(storage_of(), 3)
    with pytest.raises(TypeError, match="storage 0 is an ensemble itself"):
        StorageEnsemble(storages())
    with pytest.raises(TypeError, match="transforms must be as many as storages: got 1 for 3"):
        storages(transforms=[None])
    with pytest.raises(RuntimeError, match="callable"):
        storages(transforms=[None, 3, None])


def test_storage_ensembles_are_copied_with_their_members():
    ensemble = storages(transforms=[None, torch.nn.Identity(), None])
    for twin in (copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble))):
        check_same(twin[1][:], ensemble[1][:])
        twin[1][0] = flat_td([7])[0]
        assert ensemble[1][0]["obs"][0] == 100 and len(twin.transforms[1]) == 1


# ---------------------------------------------------------------------- samplers


def samplers(count=3, **options):
    return SamplerEnsemble(*(RandomSampler() for _ in range(count)), **options)


def test_a_draw_is_of_members_and_slots():
    index, info = samplers(num_buffer_sampled=4).sample(storages(), 8)
    assert index.batch_size == info.batch_size == (4,) and set(index.keys()) == {"index", "buffer_ids"}
    assert index["index"].shape == (4, 2) and index["buffer_ids"].shape == (4,) and set(info.keys()) == set()
    found = storages().get(index)
    assert [place for place, _ in found] == index["buffer_ids"].tolist()
    wanted = 100 * index["buffer_ids"][:, None] + index["index"]
    assert torch.equal(torch.stack([rows["obs"][:, 0] for _, rows in found]), wanted.float())


def test_members_follow_p_and_the_generator():
    ensemble = samplers(p=[1, 0, 3])
    ensemble._rng = torch.Generator().manual_seed(0)
    first = [ensemble.choose(randomness.key(ensemble._rng)) for _ in range(2_000)]
    counts = np.bincount(np.ravel(first), minlength=3)
    assert counts[1] == 0 and stats.chisquare(counts[[0, 2]], counts.sum() * np.array([0.25, 0.75])).pvalue > 1e-4
    ensemble._rng = torch.Generator().manual_seed(0)
    state = torch.get_rng_state()
    assert [ensemble.choose(randomness.key(ensemble._rng)) for _ in range(2_000)] == first and torch.equal(
        torch.get_rng_state(), state
    )


@pytest.mark.parametrize("given", [[1, 3], (1, 3), torch.tensor([1, 3]), torch.tensor([0.5, 1.5]), np.array([2, 6])])
def test_p_is_of_sum_one(given):
    ensemble = samplers(2, p=given)
    assert ensemble.p.dtype == torch.float32 and ensemble.p.tolist() == [0.25, 0.75]
    ensemble.p = None
    assert ensemble.p is None and ensemble[:1].p is None
    ensemble.p = torch.tensor([1.0, 0], dtype=torch.float64)
    assert ensemble.p.dtype == torch.float64 and set(ensemble.choose(randomness.key(ensemble._rng))) == {0}


def test_a_p_that_is_refused_changes_nothing():
    ensemble = samplers(2, p=[1, 3])
    for wrong in ([1, -1], [1], [0, 0], [float("nan"), 1]):
        with pytest.raises(ValueError, match="p must"):
            ensemble.p = wrong
    assert ensemble.p.tolist() == [0.25, 0.75]
    with pytest.raises(RuntimeError, match="exclude"):
        samplers(2, sample_from_all=True).p = [1, 1]


def test_tiny_and_huge_p():
    assert set(samplers(2, p=[5e-324, 0], num_buffer_sampled=50).choose(np.array([1, 2], np.uint32))) == {0}
    assert set(samplers(3, p=[1e308, 1e308, 0], num_buffer_sampled=50).choose(np.array([1, 2], np.uint32))) == {0, 1}


def test_slots_of_unlike_length_are_nested():
    ensemble = SamplerEnsemble(SamplerWithoutReplacement(), SamplerWithoutReplacement(), sample_from_all=True)
    held = StorageEnsemble(storage_of(count=6), storage_of(100, count=5))
    ensemble.sample(held, 8)
    index, info = ensemble.sample(held, 8)
    assert index["index"].is_nested and [each.shape[0] for each in index["index"].unbind(0)] == [2, 1]
    assert [rows["obs"].shape[0] for _, rows in held.get(index)] == [2, 1] and info.batch_size == (2,)


def test_slots_that_are_coordinates():
    lanes = LazyTensorStorage(12, ndim=2)
    lanes.set(slice(0, 4), TensorDict({"obs": torch.arange(12.0).reshape(4, 3)}, [4, 3]))
    held = StorageEnsemble(lanes, lanes)
    index, _ = SamplerEnsemble(RandomSampler(), RandomSampler()).sample(held, 10)
    assert index["index"].shape == (2, 5, 2)
    for part, (_, rows) in zip(index["index"], held.get(index), strict=True):
        assert torch.equal(rows["obs"], (part[:, 0] * 3 + part[:, 1]).float())
    mixed = StorageEnsemble(lanes, storage_of())
    index, _ = SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True).sample(mixed, 10)
    assert isinstance(index, LazyStackedTensorDict)
    assert [rows["obs"].shape[0] for _, rows in mixed.get(index)] == [5, 5]


def test_what_samplers_say_is_stacked():
    class Says(RandomSampler):
        def sample(self, storage, batch_size):
            return super().sample(storage, batch_size)[0], {"note": torch.arange(batch_size)}

    _, info = SamplerEnsemble(Says(), Says()).sample(storages(2), 6)
    assert info["note"].tolist() == [[0, 1, 2]] * 2
    _, info = SamplerEnsemble(Says(), RandomSampler(), sample_from_all=True).sample(storages(2), 6)
    assert isinstance(info, LazyStackedTensorDict) and "note" in info[0] and "note" not in info[1]


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


def test_the_members_of_a_sampler_ensemble():
    members = [RandomSampler(), PrioritizedSampler(8, 1, 1), RandomSampler()]
    ensemble = SamplerEnsemble(*members, p=[1, 1, 2])
    assert len(ensemble) == 3 and ensemble[:] is ensemble and ensemble[1] is members[1] and ensemble[-1] is members[2]
    part = ensemble[torch.tensor([0, 2])]
    assert [part[0], part[1]] == [members[0], members[2]] and torch.allclose(part.p, torch.tensor([1 / 3, 2 / 3]))
    assert (
        part.num_buffer_sampled == 2 and ensemble.num_buffer_sampled == 3 and ensemble.p.tolist() == [0.25, 0.25, 0.5]
    )
    assert len(samplers()[1:]) == 2  # without p too
    assert not ensemble.ran_out and ensemble.takes_priorities and not samplers().takes_priorities
    for index in ((0, 1), (), 3, [3]):
        with pytest.raises(IndexError):
            ensemble[index]
    with pytest.raises(TypeError, match="float"):
        ensemble[torch.tensor([0.5])]
    with pytest.raises(TypeError, match="sampler 0 must be a Sampler"):
        SamplerEnsemble(RandomSampler)
    with pytest.raises(TypeError, match="an ensemble itself"):
        SamplerEnsemble(ensemble)
    with pytest.raises(ValueError, match="at least one sampler"):
        SamplerEnsemble()


def test_priorities_go_to_the_sampler_that_has_them():
    held = storages(2)
    ensemble = SamplerEnsemble(PrioritizedSampler(8, 1, 1), RandomSampler(), sample_from_all=True)
    index, _ = ensemble.sample(held, 6)
    ensemble.update_priority(index, torch.arange(1.0, 7.0).reshape(2, 3), storage=held)
    wanted = torch.ones(6)
    for slot, value in zip(index["index"][0], (1.0, 2.0, 3.0), strict=True):
        wanted[slot] = value
    assert torch.equal(ensemble[0].priorities, wanted)
    with pytest.raises(TypeError, match="storage="):
        ensemble.update_priority(index, 1.0)
    with pytest.warns(UserWarning, match="SamplerEnsemble is not a prioritized sampler"):
        samplers(2).update_priority(index, 1.0, storage=held)


def test_sampler_ensembles_are_copied_with_their_members():
    ensemble = SamplerEnsemble(RandomSampler(), PrioritizedSampler(8, 1, 1), p=[1, 3])
    ensemble._rng = torch.Generator()
    for twin in (copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble))):
        assert len(twin) == 2 and twin[1] is not ensemble[1] and twin.p.tolist() == [0.25, 0.75] and twin._rng is None


# ---------------------------------------------------------------------- writers


def test_the_members_of_a_writer_ensemble():
    members = [RoundRobinWriter(), TensorDictRoundRobinWriter()]
    ensemble = WriterEnsemble(*members)
    assert len(ensemble) == 2 and ensemble[:] is ensemble and ensemble[1] is members[1]
    assert ensemble[[1]][0] is members[1] and len(ensemble[0:1]) == 1
    assert repr(ensemble) == f"WriterEnsemble(\n    writers=({members[0]}, {members[1]}))"
    for index in ((0, 1), 2, [2]):
        with pytest.raises(IndexError):
            ensemble[index]
    with pytest.raises(TypeError, match="writer 0 must be a Writer"):
        WriterEnsemble(3)
    with pytest.raises(ValueError, match="at least one writer"):
        WriterEnsemble()
    assert len(pickle.loads(pickle.dumps(ensemble))) == 2


def test_lists_are_members_too():
    held = StorageEnsemble(storage_of(kind=ListStorage), storage_of(100))
    index, _ = samplers(2, sample_from_all=True).sample(held, 4)
    rows = held.get(index)
    assert type(rows[0][1]) is list and rows[1][1].batch_size == (2,)
    assert isinstance(samplers(1), Sampler)
