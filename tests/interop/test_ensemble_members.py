"""Ensembles are built of buffers or of components, indexed into members, and refuse what only members can do."""

import contextlib

import pytest
import torch

from interop import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    StorageEnsemble,
    TensorDictReplayBuffer,
    WriterEnsemble,
)
from tests.interop.rows import check_same, flat_td, state_of


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


@contextlib.contextmanager
def all_refused(buffers, error, match=None):
    """The block raises `error`, and all buffers are as before."""
    before = [state_of(each) for each in buffers]
    with pytest.raises(error, match=match):
        yield
    for each, state in zip(buffers, before, strict=True):
        check_same(state_of(each), state)


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
    with pytest.raises(TypeError, match="samplers must be a SamplerEnsemble, got Own"):  # its methods are not called
        ReplayBufferEnsemble(**components() | {"samplers": type("Own", (SamplerEnsemble,), {})(member().sampler)})
    with pytest.raises(TypeError, match="buffer 1 must be a ReplayBuffer, got int"):
        ReplayBufferEnsemble(member(), 3)
    with pytest.raises(TypeError, match="buffer 0 is an ensemble itself"):
        ReplayBufferEnsemble(ReplayBufferEnsemble(member()), member())
    with pytest.raises(TypeError, match="surprise"):
        ReplayBufferEnsemble(member(), surprise=1)


def test_sharing_concerns_the_members():
    buffers = [member(), member()]
    ensemble = ReplayBufferEnsemble(*buffers, shared=True)
    assert all(each.storage.lock.processes for each in buffers) and ensemble.sample(4).shape == (2, 2)
    assert ensemble.share(False) is ensemble and not any(each.storage.lock.processes for each in buffers)
    with pytest.raises(ValueError, match="draws ahead"):
        ReplayBufferEnsemble(*buffers, member(batch_size=2, prefetch=1), shared=True)
    assert not any(each.storage.lock.processes for each in buffers)


def test_components_make_members_once():
    given = components(transforms=[None, lambda data: data.set("a", data["obs"] + 1)], p=[1, 3])
    ensemble = ReplayBufferEnsemble(**given, batch_size=4)
    one = ensemble[0]
    assert type(one) is ReplayBuffer and ensemble[0] is one and ensemble[-2] is one
    assert one.storage is given["storages"][0] and one.sampler is given["samplers"][0]
    assert ensemble[1].transform is given["storages"].transforms[1]
    ensemble[1].extend(flat_td([7]))
    assert len(ensemble[1]) == 7 and ensemble[1][6]["obs"][0] == 7 and "a" in ensemble[1][6]
    assert ensemble[1:].sample(4)["a"].shape == (1, 4, 3)
    assert ensemble.sampler.p.tolist() == [0.25, 0.75]


def test_a_generator_is_handed_to_every_component():
    buffers = [member(), member(storage=ListStorage)]
    generator = torch.Generator()
    ensemble = ReplayBufferEnsemble(*buffers, generator=generator)
    parts = [getattr(each, name) for each in buffers for name in ("storage", "sampler")]
    assert all(part._rng is generator for part in (*parts, *buffers, ensemble.sampler))
    state = torch.get_rng_state()
    ensemble.sample(4)
    assert torch.equal(torch.get_rng_state(), state)
    ensemble.set_rng(None)
    assert all(part._rng is None for part in (*parts, *buffers, ensemble.sampler))


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


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"p": [1, -1]}, ValueError),
        ({"p": ["a", "b"]}, TypeError),
        ({"p": [1, 1], "sample_from_all": True}, RuntimeError),
        ({"num_buffer_sampled": 0}, ValueError),
        ({"collate_fns": [None]}, ValueError),
        ({"collate_fn": 3}, TypeError),
        ({"prefetch": 2, "batch_size": 4, "shared": True}, ValueError),
        ({"generator": 3}, TypeError),
        ({"transform": 3}, RuntimeError),
    ],
)
def test_bad_arguments_change_no_member(options, error):
    buffers = [member(), member(generator=torch.Generator())]
    generators = [each._rng for each in buffers]
    if "generator" not in options:
        options = {**options, "generator": torch.Generator()}
    with all_refused(buffers, error):
        ReplayBufferEnsemble(*buffers, **options)
    assert [each._rng for each in buffers] == generators
    assert not any(each.storage.lock.processes for each in buffers)


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
        (slice(None, None, -1), [2, 1, 0]),
        ([-1], [2]),
        ([1, 1, 0], [1, 1, 0]),
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
    for index in ((slice(None), 6), (0, 6)):
        with pytest.raises(IndexError):
            ensemble[index]


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (-4, IndexError),
        ([True, False], IndexError),
        ([], IndexError),
        ("obs", TypeError),
        (True, TypeError),
        ((3, 0), IndexError),
        ([[0, 1]], RuntimeError),
    ],
)
def test_bad_indices(index, error):
    ensemble = ReplayBufferEnsemble(*(member() for _ in range(3)))
    with pytest.raises(error):
        ensemble[index]


# ---------------------------------------------------------------------- what only members can do


@pytest.mark.parametrize(
    "call",
    [
        lambda ensemble: ensemble.add(flat_td([1])[0]),
        lambda ensemble: ensemble.extend(flat_td([1])),
        lambda ensemble: ensemble.storage.add(1),
        lambda ensemble: ensemble.storage.__setitem__(0, 1),
    ],
)
def test_writing_to_the_ensemble_is_refused(call):
    ensemble = ReplayBufferEnsemble(member(), member())
    with all_refused([ensemble[0], ensemble[1]], RuntimeError, "ensemble"):
        call(ensemble)


@pytest.mark.parametrize(
    "call",
    [
        lambda ensemble: ensemble.empty(),
        lambda ensemble: ensemble.storage.state_dict(),
        lambda ensemble: ensemble.storage.load_state_dict({}),
        lambda ensemble: ensemble.writer.extend(1),
    ],
)
def test_what_only_members_have(call):
    ensemble = ReplayBufferEnsemble(member(), member())
    with all_refused([ensemble[0], ensemble[1]], NotImplementedError, "ensemble"):
        call(ensemble)


def test_consuming_members_are_not_drawn_from_ahead():
    buffers = [member(sampler=ConsumingSampler()), member()]
    with all_refused(buffers, ValueError, "prefetch and consuming exclude"):
        ReplayBufferEnsemble(*buffers, batch_size=4, prefetch=2)
    assert not buffers[0].readers
    ensemble = ReplayBufferEnsemble(*buffers, sample_from_all=True)
    drawn = [ensemble.sample(6)["obs"][0, :, 0] for _ in range(2)]
    assert torch.cat(drawn).sort().values.tolist() == list(range(6))
    with pytest.raises(RuntimeError, match="member 0 of the ensemble has no items"):
        ensemble.sample(6)
