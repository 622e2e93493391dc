"""Ensembles are built of buffers or of components, indexed into members, and refuse what only members can do."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    Compose,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    Storage,
    StorageEnsemble,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    WriterEnsemble,
)
from tests.interop.rows import check_same, flat_td


def member(first=0, count=6, storage=LazyTensorStorage, kind=TensorDictReplayBuffer, **kwargs):
    buffer = kind(storage=storage(8), **kwargs)
    buffer.extend(flat_td(range(first, first + count)))
    return buffer


def components(count=2, transforms=None, **options):
    """Three ensembles, filled through the buffers that the components came from."""
    buffers = [member(100 * place) for place in range(count)]
    return {
        "storages": StorageEnsemble(*(each.storage for each in buffers), transforms=transforms),
        "samplers": SamplerEnsemble(*(each.sampler for each in buffers), **options),
        "writers": WriterEnsemble(*(each.writer for each in buffers)),
    }


# ---------------------------------------------------------------------- building


def test_buffers_and_components_exclude_each_other():
    for name, ensemble in components().items():
        with pytest.raises(RuntimeError, match="not both"):
            ReplayBufferEnsemble(member(), **{name: ensemble})
    for options in ({"p": [1, 1]}, {"sample_from_all": True}, {"num_buffer_sampled": 2}):
        with pytest.raises(RuntimeError, match="SamplerEnsemble"):
            ReplayBufferEnsemble(**components(), **options)


def test_what_is_missing_or_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="storages must be a StorageEnsemble, got nothing"):
        ReplayBufferEnsemble()
    for name, ensemble in components().items():
        with pytest.raises(TypeError, match=f"{name} must be a .*Ensemble, got nothing"):
            ReplayBufferEnsemble(**{**components(), name: None})
        with pytest.raises(TypeError, match=name):
            ReplayBufferEnsemble(**{**components(), name: ensemble[0]})
        with pytest.raises(ValueError, match="there are"):
            ReplayBufferEnsemble(**{**components(3), name: ensemble})
    with pytest.raises(TypeError, match="buffer 1 must be a ReplayBuffer, got int"):
        ReplayBufferEnsemble(member(), 3)
    with pytest.raises(TypeError, match="buffer 0 is an ensemble itself"):
        ReplayBufferEnsemble(ReplayBufferEnsemble(member()), member())
    with pytest.raises(TypeError, match="surprise"):
        ReplayBufferEnsemble(member(), surprise=1)


def test_sharing_members_that_draw_ahead_is_refused():
    buffers = [member(), member(batch_size=2, prefetch=1)]
    with pytest.raises(ValueError, match="a member of the ensemble draws ahead"):
        ReplayBufferEnsemble(*buffers, shared=True)
    with pytest.raises(ValueError, match="a member of the ensemble draws ahead"):
        ReplayBufferEnsemble(*buffers).share()
    assert not any(each.storage.lock.processes for each in buffers)


def test_sharing_concerns_the_members():
    buffers = [member(), member()]
    ensemble = ReplayBufferEnsemble(*buffers, shared=True)
    assert all(each.storage.lock.processes is not None for each in buffers) and ensemble.sample(4).shape == (2, 2)
    ReplayBufferEnsemble(*buffers)
    assert all(each.storage.lock.processes is not None for each in buffers)
    assert ensemble.share(False) is ensemble and not any(each.storage.lock.processes for each in buffers)


def test_members_that_are_made_late_are_made():
    late = TensorDictReplayBuffer(storage=lambda: LazyTensorStorage(4), delayed_init=True)
    assert not late.initialized
    ensemble = ReplayBufferEnsemble(late)
    assert late.initialized and ensemble.initialized and ensemble.storage[0] is late.storage


def test_components_make_members_once():
    given = components(transforms=[None, lambda data: data.set("a", data["obs"] + 1)], p=[1, 3])
    ensemble = ReplayBufferEnsemble(**given, batch_size=4)
    assert ensemble.storage is given["storages"] and ensemble.sampler is given["samplers"]
    assert ensemble.writer is given["writers"] and len(ensemble) == 2
    one = ensemble[0]
    assert type(one) is ReplayBuffer and ensemble[0] is one and ensemble[-2] is one
    assert one.storage is given["storages"][0] and one.sampler is given["samplers"][0]
    assert ensemble[1].transform is given["storages"].transforms[1]
    ensemble[1].extend(flat_td([7]))
    assert len(ensemble[1]) == 7 and ensemble[1][6]["obs"][0] == 7 and "a" in ensemble[1][6]
    assert ensemble[1:].sample(4)["a"].shape == (1, 4, 3)
    assert ensemble.sampler.p.tolist() == [0.25, 0.75]


def test_components_keep_their_generators():
    generator = torch.Generator()
    buffers = [member(generator=generator), member()]
    ensemble = ReplayBufferEnsemble(
        storages=StorageEnsemble(*(each.storage for each in buffers)),
        samplers=SamplerEnsemble(*(each.sampler for each in buffers)),
        writers=WriterEnsemble(*(each.writer for each in buffers)),
    )
    assert ensemble[0].sampler._rng is generator and ensemble[1].sampler._rng is None


def test_components_that_do_not_fit_change_none():
    class Own(Storage):
        pass

    storages = [LazyTensorStorage(4), LazyTensorStorage(8), Own(4)]
    for last, error in ((1, "the sampler holds 4 items"), (2, "no default way")):
        parts = {
            "storages": StorageEnsemble(storages[0], storages[last]),
            "samplers": SamplerEnsemble(RandomSampler(), PrioritizedSampler(4, 1, 1) if last == 1 else RandomSampler()),
            "writers": WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()),
        }
        with pytest.raises((ValueError, NotImplementedError), match=error):
            ReplayBufferEnsemble(**parts)
        assert not any(each.attached() for each in storages) and not hasattr(parts["writers"][0], "_storage")


def test_a_generator_is_handed_to_every_component():
    buffers = [member(), member(storage=ListStorage)]
    generator = torch.Generator()
    ensemble = ReplayBufferEnsemble(*buffers, generator=generator)
    parts = [getattr(each, name) for each in buffers for name in ("storage", "sampler", "writer")]
    assert all(part._rng is generator for part in (*parts, *buffers, ensemble.sampler))
    state = torch.get_rng_state()
    ensemble.sample(4)
    assert torch.equal(torch.get_rng_state(), state)
    ensemble.set_rng(None)
    assert all(part._rng is None for part in (*parts, *buffers, ensemble.sampler))


def test_without_a_generator_members_keep_theirs():
    generator = torch.Generator()
    buffers = [member(generator=generator), member()]
    ensemble = ReplayBufferEnsemble(*buffers)
    assert buffers[0].sampler._rng is generator and buffers[1].sampler._rng is None and ensemble.sampler._rng is None


def test_components_are_those_that_the_members_have_now():
    ensemble = ReplayBufferEnsemble(member(), member(), p=[1, 2])
    sampler, storage = PrioritizedSampler(8, 1, 1), LazyTensorStorage(8)
    ensemble[1].set_sampler(sampler)
    assert ensemble.sampler[1] is sampler and ensemble.sampler.p.tolist() == torch.tensor([1 / 3, 2 / 3]).tolist()
    assert "priority_weight" in ensemble.sample(4)
    ensemble[0].set_storage(storage)
    assert ensemble.storage[0] is storage and len(ensemble.storage) == 2
    with pytest.raises(RuntimeError, match="member 0 of the ensemble has no items"):
        ensemble.sample(4)
    for call in (ensemble.set_storage, ensemble.set_sampler, ensemble.set_writer):
        with pytest.raises(RuntimeError, match=r"ensemble\[i\]\.set_"):
            call(sampler)


# ---------------------------------------------------------------------- indexing


@pytest.mark.parametrize("built", ["buffers", "components"])
def test_an_int_is_the_member_itself(built):
    buffers = [member(), member(), member()]
    ensemble = ReplayBufferEnsemble(*buffers) if built == "buffers" else ReplayBufferEnsemble(**components(3))
    members = [ensemble[i] for i in range(3)]
    assert built == "components" or all(one is other for one, other in zip(members, buffers, strict=True))
    for index in (1, -2, torch.tensor(1), torch.tensor(1).numpy(), torch.tensor([1]).numpy()[0], (1,)):
        assert ensemble[index] is members[1]
    assert ensemble[:] is ensemble and ensemble[...] is ensemble and len(ensemble) == 3


@pytest.mark.parametrize(
    ("index", "places"),
    [
        (slice(0, 2), [0, 1]),
        (slice(None, None, -1), [2, 1, 0]),
        ([2, 0], [2, 0]),
        ([-1], [2]),
        ([1, 1, 0], [1, 1, 0]),
        (range(1, 3), [1, 2]),
        (torch.tensor([0, 2]), [0, 2]),
        (torch.tensor([0, 2]).numpy(), [0, 2]),
        (torch.tensor([True, False, True]), [0, 2]),
        ([False, True, True], [1, 2]),
    ],
)
def test_several_members_are_an_ensemble(index, places):
    ensemble = ReplayBufferEnsemble(
        *(member(100 * i) for i in range(3)),
        p=[1, 2, 5],
        batch_size=12,
        transform=lambda data: data.set("a", data["obs"]),
    )
    part = ensemble[index]
    assert type(part) is ReplayBufferEnsemble and [part[i] for i in range(len(part))] == [ensemble[i] for i in places]
    p = torch.tensor([1.0, 2, 5])[places]
    assert torch.allclose(part.sampler.p, p / p.sum())
    assert part.transform is ensemble.transform and part.batch_size == 12
    sample = part.sample()
    assert sample.batch_size == (len(places), 12 // len(places)) and "a" in sample
    assert torch.equal(sample["obs"][..., 0] // 100, torch.tensor(places)[sample["index", "buffer_ids"]].float())
    assert ensemble.sampler.p.tolist() == [0.125, 0.25, 0.625]


def test_an_ensemble_of_some_keeps_how_it_samples():
    generator = torch.Generator()
    ensemble = ReplayBufferEnsemble(*(member() for _ in range(3)), sample_from_all=True, generator=generator)
    part = ensemble[1:]
    assert part.sampler.sample_from_all and part.sampler.num_buffer_sampled == 2 and part.sampler._rng is generator
    assert part.sample(4)["index", "buffer_ids"].tolist() == [[0, 0], [1, 1]]
    several = ReplayBufferEnsemble(*(member() for _ in range(3)), num_buffer_sampled=2, collate_fn=torch.cat)[1:]
    assert several.sampler.num_buffer_sampled == 2 and several.sample(4).shape == (4,) and several.sampler.p is None
    with pytest.raises(ValueError, match="p of 0"):
        ReplayBufferEnsemble(*(member() for _ in range(3)), p=[1, 0, 0])[1:]


def test_items_of_one_member_come_through_it():
    ensemble = ReplayBufferEnsemble(member(100, transform=lambda data: data.set("a", data["obs"])), member(200))
    check_same(ensemble[0, 2], ensemble[0][2])
    check_same(ensemble[1, :3], ensemble[1][:3])
    check_same(ensemble[torch.tensor(0), "obs"], ensemble[0]["obs"])
    with pytest.raises(IndexError):
        ensemble[0, 6]


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_items_of_every_member_are_collated(storage):
    def fail(data):
        raise AssertionError("transforms are not applied")

    ensemble = ReplayBufferEnsemble(
        *(member(100 * i, storage=storage, transform=fail) for i in range(3)), transform=fail, p=[1, 2, 3]
    )
    for every in (slice(None), ...):
        got = ensemble[every, 4]
        assert got.batch_size == (3,) and got["obs"][:, 0].tolist() == [4, 104, 204]
        assert ensemble[every, [1, 2]]["obs"][..., 0].tolist() == [[1, 2], [101, 102], [201, 202]]
        assert ensemble[every, 3:5]["obs"][..., 0].tolist() == [[3, 4], [103, 104], [203, 204]]
    assert ensemble[[2, 0], -1]["obs"][:, 0].tolist() == [205, 5]
    assert ensemble[1:2, 0]["obs"][:, 0].tolist() == [100]
    as_they_are = ReplayBufferEnsemble(ensemble[0], ensemble[1], collate_fn=lambda parts: parts)
    for got in (ensemble[:, 0], *as_they_are[:, 0]):
        got["obs"].fill_(-1)
        assert ensemble.storage[0][0]["obs"][0] == 0 and ensemble.storage[1][0]["obs"][0] == 100  # they are copies
    with pytest.raises(IndexError):
        ensemble[:, 6]


def test_items_of_storages_with_several_item_dims():
    def lanes(first):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
        buffer.extend(TensorDict({"a": first + torch.arange(12).reshape(3, 4)}, [3, 4]))
        return buffer

    ensemble = ReplayBufferEnsemble(lanes(0), lanes(100))
    assert ensemble[:, 1]["a"].tolist() == [[1, 5, 9], [101, 105, 109]]
    assert ensemble[:, 1, 2]["a"].tolist() == [9, 109]


def test_repr_shows_the_components_of_the_members():
    samplers = [PrioritizedSampler(3, 1, 1), RandomSampler()]
    buffers = [ReplayBuffer(storage=ListStorage(3), sampler=sampler) for sampler in samplers]
    ensemble = ReplayBufferEnsemble(*buffers, transform=torch.nn.Identity(), batch_size=4, collate_fn=torch.stack)
    assert repr(ensemble) == (
        "ReplayBufferEnsemble(\n"
        "    storages=StorageEnsemble(\n"
        "        storages=(ListStorage(), ListStorage()),\n"
        "        transforms=[Compose(\n"
        "        ), Compose(\n"
        "        )]),\n"
        "    samplers=SamplerEnsemble(\n"
        "        samplers=(PrioritizedSampler(alpha=1.0, beta=1.0, eps=1e-08, reduction=max), RandomSampler())),\n"
        "    writers=WriterEnsemble(\n"
        f"        writers=({buffers[0].writer}, {buffers[1].writer})),\n"
        "batch_size=4,\n"
        "transform=Compose(\n"
        "        Identity()),\n"
        f"collate_fn={torch.stack})"
    )
    assert isinstance(ensemble.transform, Compose) and isinstance(buffers[0].writer, RoundRobinWriter)
    assert isinstance(member().writer, TensorDictRoundRobinWriter)
