"""What an ensemble refuses, and that nothing has changed then."""

import contextlib

import pytest
import torch

from interop import ConsumingSampler, LazyTensorStorage, ReplayBufferEnsemble, TensorDictReplayBuffer
from tests.interop.rows import check_same, flat_td, state_of


def member(first=0, **kwargs):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), **kwargs)
    buffer.extend(flat_td(range(first, first + 6)))
    return buffer


@contextlib.contextmanager
def all_refused(buffers, error, match=None):
    """The block raises `error`, and all buffers are as before."""
    before = [state_of(each) for each in buffers]
    with pytest.raises(error, match=match):
        yield
    for each, state in zip(buffers, before, strict=True):
        check_same(state_of(each), state)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"p": [1, -1]}, ValueError),
        ({"p": [1, float("nan")]}, ValueError),
        ({"p": [1, float("inf")]}, ValueError),
        ({"p": [0, 0]}, ValueError),
        ({"p": [1]}, ValueError),
        ({"p": [[1, 1]]}, ValueError),
        ({"p": 0.5}, ValueError),
        ({"p": ["a", "b"]}, TypeError),
        ({"p": [True, True]}, TypeError),
        ({"p": [1, 1], "sample_from_all": True}, RuntimeError),
        ({"num_buffer_sampled": 0}, ValueError),
        ({"num_buffer_sampled": 1.5}, TypeError),
        ({"collate_fns": [None]}, ValueError),
        ({"collate_fns": [None, 3]}, TypeError),
        ({"collate_fn": 3}, TypeError),
        ({"batch_size": 0}, ValueError),
        ({"prefetch": 2}, ValueError),
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


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (3, IndexError),
        (-4, IndexError),
        ([0, 3], IndexError),
        (torch.tensor([-4]), IndexError),
        ([True, False], IndexError),
        (slice(3, None), IndexError),
        ([], IndexError),
        (torch.tensor(1.0), TypeError),
        (torch.tensor([0.0, 1.0]), TypeError),
        ([0.5], TypeError),
        (torch.zeros(2).numpy(), TypeError),
        ("obs", TypeError),
        (None, TypeError),
        (True, TypeError),
        (0.0, TypeError),
        ((), TypeError),
        ((3, 0), IndexError),
        (("obs", 0), TypeError),
        (torch.zeros(2, 2, dtype=torch.int64), RuntimeError),
        ([[0, 1]], RuntimeError),
    ],
)
def test_bad_indices(index, error):
    ensemble = ReplayBufferEnsemble(*(member() for _ in range(3)))
    with pytest.raises(error):
        ensemble[index]


@pytest.mark.parametrize(
    "call",
    [
        lambda ensemble: ensemble.add(flat_td([1])[0]),
        lambda ensemble: ensemble.extend(flat_td([1])),
        lambda ensemble: ensemble.__setitem__(0, flat_td([1])),
        lambda ensemble: ensemble.__setitem__((0, 1), flat_td([1])[0]),
        lambda ensemble: ensemble.__setitem__("obs", 1),
        lambda ensemble: ensemble.set_("obs", torch.zeros(6, 3)),
        lambda ensemble: ensemble.set_at_("obs", torch.zeros(3), 0),
        lambda ensemble: ensemble.update_({"obs": torch.zeros(6, 3)}),
        lambda ensemble: ensemble.update_({"obs": torch.zeros(6, 3)}, keys_to_update=["nothing"]),
        lambda ensemble: ensemble.update_if_present(index=torch.tensor([0]), generation=torch.tensor([0]), patch={}),
        lambda ensemble: ensemble.write_all(flat_td(range(6))),
        lambda ensemble: ensemble.read_all_in_order(),
        lambda ensemble: ensemble.storage.add(1),
        lambda ensemble: ensemble.storage.extend([1]),
        lambda ensemble: ensemble.storage.set(0, 1),
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
        lambda ensemble: ensemble.state_dict(),
        lambda ensemble: ensemble.load_state_dict({}),
        lambda ensemble: ensemble.storage._empty(),
        lambda ensemble: ensemble.storage.state_dict(),
        lambda ensemble: ensemble.storage.load_state_dict({}),
        lambda ensemble: ensemble.sampler._empty(),
        lambda ensemble: ensemble.writer._empty(),
        lambda ensemble: ensemble.writer.add(),
        lambda ensemble: ensemble.writer.extend(1),
    ],
)
def test_what_only_members_have(call):
    ensemble = ReplayBufferEnsemble(member(), member())
    with all_refused([ensemble[0], ensemble[1]], NotImplementedError, "ensemble"):
        call(ensemble)


def test_consuming_members_are_not_drawn_from_ahead():
    buffers = [member(sampler=ConsumingSampler()), member()]
    with all_refused(buffers, ValueError, "ConsumingSampler"):
        ReplayBufferEnsemble(*buffers, batch_size=4, prefetch=2)
    assert not buffers[0]._readers
    ensemble = ReplayBufferEnsemble(*buffers, sample_from_all=True)
    drawn = [ensemble.sample(6)["obs"][0, :, 0] for _ in range(2)]
    assert torch.cat(drawn).sort().values.tolist() == list(range(6))
    with pytest.raises(RuntimeError, match="member 0 of the ensemble has no items"):
        ensemble.sample(6)


def test_numbers_to_watch_are_those_of_all_members():
    ensemble = ReplayBufferEnsemble(member(), member(), batch_size=4, prefetch=2)
    ensemble.sample()
    assert ensemble.stats() == {
        "size": 12,
        "write_count": 12,
        "prefetch_queue_size": 2,
        "initialized": True,
        "capacity": 16,
        "utilization": 0.75,
    }


def test_writes_are_counted_by_members():
    ensemble = ReplayBufferEnsemble(member(), member())
    with pytest.raises(AttributeError, match=r"ensemble\[i\]\.write_count"):
        ensemble.write_count
    assert not hasattr(ensemble, "write_count") and ensemble[0].write_count == 6
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        ensemble.nothing_of_this_name
