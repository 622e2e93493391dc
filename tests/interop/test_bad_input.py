"""Input that is refused: a clear error, and the buffer exactly as before."""

import numpy as np
import pytest
import torch
from tensordict import NonTensorData

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import check_same, nested_td, plain_tensor, refused, state_of

CAPACITY = 8


def plain(storage):
    return ReplayBuffer(storage=storage(CAPACITY), generator=torch.Generator().manual_seed(0))


def by_priority(storage):
    buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage(CAPACITY))
    buffer.set_rng(torch.Generator().manual_seed(0))
    return buffer


def tensordicts(storage):
    return TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=storage(CAPACITY), generator=torch.Generator().manual_seed(0)
    )


BUFFERS = {
    "uniform in memory": lambda: plain(LazyTensorStorage),
    "uniform in files": lambda: plain(LazyMemmapStorage),
    "prioritized in memory": lambda: by_priority(LazyTensorStorage),
    "prioritized tensordicts in files": lambda: tensordicts(LazyMemmapStorage),
}


def changed(key, change):
    def make(ids):
        data = nested_td(ids)
        return data.set(key, change(data.get(key)))

    return make


BAD_ROWS = {
    "missing key": (lambda ids: nested_td(ids).exclude("obs"), KeyError, "obs"),
    "missing nested key": (lambda ids: nested_td(ids).exclude(("next", "reward")), KeyError, "reward"),
    "renamed key": (lambda ids: nested_td(ids).rename_key_("obs", "observation"), KeyError, "observation"),
    "extra key": (lambda ids: nested_td(ids).set("new", torch.zeros(len(ids))), KeyError, "new"),
    "other dtype": (changed("obs", lambda leaf: leaf.float()), RuntimeError, "float32"),
    "bool for uint8": (changed(("next", "pixels"), lambda leaf: leaf.bool()), RuntimeError, "bool"),
    "wider": (changed("obs", lambda leaf: torch.cat([leaf, leaf], -1)), RuntimeError, "obs"),
    "width one": (changed("obs", lambda leaf: leaf[..., :1]), RuntimeError, "obs"),
    "width one below": (changed(("next", "pixels"), lambda leaf: leaf[..., :1, :]), RuntimeError, "pixels"),
    "a dim more": (changed("obs", lambda leaf: leaf[..., None]), RuntimeError, "obs"),
    "a dim less": (changed("obs", lambda leaf: leaf[..., 0]), RuntimeError, "obs"),
    "tensor for tensordict": (lambda ids: nested_td(ids).set("next", torch.zeros(len(ids))), TypeError, "next"),
    "tensordict for tensor": (lambda ids: nested_td(ids).set("obs", nested_td(ids)), TypeError, "obs"),
    "objects": (lambda ids: nested_td(ids).set("obs", NonTensorData("text", batch_size=[len(ids)])), TypeError, "obs"),
}


@pytest.mark.parametrize("make", BUFFERS)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_rows_unlike_the_stored_ones_are_refused(make, bad):
    rows, error, match = BAD_ROWS[bad]
    buffer = BUFFERS[make]()
    buffer.extend(nested_td([0, 1, 2]))
    with refused(buffer, error, match):
        buffer.extend(rows([5, 6]))
    with refused(buffer, error, match):
        buffer.add(rows([5])[0])
    if not isinstance(buffer, TensorDictReplayBuffer):
        with refused(buffer, (error, RuntimeError)):
            buffer.extend([nested_td([5])[0], rows([6])[0]])
    for index in (0, slice(0, 1), torch.tensor([0])):
        with refused(buffer, error, match):
            buffer[index] = rows([5])[0] if index == 0 and isinstance(index, int) else rows([5])
    assert buffer.extend(nested_td([3, 4])).tolist() == [3, 4]


@pytest.mark.parametrize(
    "data", [3.5, None, np.zeros((2, 3)), range(3), {"a": 1.0}, {"a": np.zeros(3)}, {}, ()], ids=repr
)
def test_what_is_no_tensor_is_refused_by_tensor_storages(data):
    buffer = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    for call in (buffer.extend, buffer.add):
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            call(data)
        assert not buffer.storage.initialized and len(buffer) == 0 and buffer.write_count == 0
    buffer.extend(plain_tensor([0, 1]))
    for call in (buffer.extend, buffer.add):
        with refused(buffer, (TypeError, RuntimeError, ValueError)):
            call(data)


@pytest.mark.parametrize("make", BUFFERS)
def test_empty_batches_are_refused_or_write_nothing(make):
    buffer = BUFFERS[make]()
    buffer.extend(nested_td([0, 1, 2]))
    if isinstance(buffer, TensorDictReplayBuffer):
        before = state_of(buffer)
        assert buffer.extend(nested_td([])).shape == (0,)
        check_same(state_of(buffer), before)
    else:
        for data in (nested_td([]), []):
            with refused(buffer, RuntimeError, "at least one element"):
                buffer.extend(data)


@pytest.mark.parametrize("make", BUFFERS)
@pytest.mark.parametrize("batch_size", [0, -1, 2.5, "3", True])
def test_bad_batch_sizes_are_refused(make, batch_size):
    buffer = BUFFERS[make]()
    buffer.extend(nested_td([0, 1, 2]))
    with refused(buffer, (TypeError, ValueError), "batch_size"):
        buffer.sample(batch_size)
    with pytest.raises((TypeError, ValueError), match="batch_size"):
        ReplayBuffer(batch_size=batch_size)


@pytest.mark.parametrize("make", BUFFERS)
def test_sampling_needs_items_and_a_batch_size(make):
    buffer = BUFFERS[make]()
    with refused(buffer, RuntimeError, "empty"):
        buffer.sample(3)
    buffer.extend(nested_td([0, 1, 2]))
    with refused(buffer, RuntimeError, "batch_size"):
        buffer.sample()
    with refused(buffer, RuntimeError, "batch_size"):
        next(iter(buffer))
    with refused(buffer, RuntimeError, "batch_size"):
        buffer.next()
    buffer.empty()
    with refused(buffer, RuntimeError, "empty"):
        buffer.sample(3)


PRIORITIES = {
    "nan": [1.0, torch.nan],
    "inf": [torch.inf, 1.0],
    "negative": [1.0, -1.0],
    "too large for the dtype": torch.tensor([1e300, 1.0], dtype=torch.float64),
}


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_bad_priorities_are_refused(priority, alpha):
    buffer = PrioritizedReplayBuffer(alpha=alpha, beta=0.5, storage=LazyTensorStorage(CAPACITY))
    buffer.extend(plain_tensor([0, 1, 2]))
    buffer.update_priority([0, 1, 2], [1.0, 2.0, 3.0])
    values = torch.as_tensor(PRIORITIES[priority])
    with refused(buffer, ValueError, "priorit"):
        buffer.update_priority([0, 1], values)
    with refused(buffer, ValueError, "priorit"):
        buffer.update_priority(2, values[~((values >= 0) & (values < 1e100))][0])
    buffer.sample(16)


@pytest.mark.parametrize("index", [3, 8, 15, 16, 100, 10**6, 2**31, 2**32, 2**32 + 1, 2**40, -2, -(2**31), -(2**40)])
def test_priorities_for_what_is_not_stored_are_refused(index):
    buffer = by_priority(LazyTensorStorage)
    buffer.extend(plain_tensor([0, 1, 2]))
    with refused(buffer, IndexError, str(abs(index))):
        buffer.update_priority(index, 5.0)
    with refused(buffer, IndexError):
        buffer.update_priority(torch.tensor([0, index, 1]), torch.tensor([7.0, 8.0, 9.0]))


@pytest.mark.parametrize("index", [3, 7, 8, 2**31, -2, -(2**63), torch.tensor([0, 5])], ids=repr)
def test_what_is_not_stored_cannot_be_marked(index):
    buffer = by_priority(LazyTensorStorage)
    buffer.extend(plain_tensor([0, 1, 2]))
    with refused(buffer, IndexError):
        buffer.mark_update(index)
    with refused(buffer, IndexError):
        buffer.sampler.mark_update(index)  # by itself it knows of the items that it was told of
    assert set(buffer.sample(64)[:, 0].tolist()) <= {0.0, 1.0, 2.0}


def test_a_sampler_smaller_than_the_storage_is_refused():
    with pytest.raises(ValueError, match=r"5.*8|8.*5"):
        ReplayBuffer(storage=LazyTensorStorage(8), sampler=PrioritizedSampler(5, 1.0, 1.0))
    buffer = plain(LazyTensorStorage)
    buffer.extend(plain_tensor([0, 1]))
    with refused(buffer, ValueError):
        buffer.set_sampler(PrioritizedSampler(5, 1.0, 1.0))
    assert buffer.sample(4).shape == (4, 3)


def test_components_of_the_wrong_kind_are_refused():
    with pytest.raises(TypeError):
        ReplayBuffer(LazyTensorStorage(8))
    for name, wrong in (
        ("storage", RandomSampler()), ("storage", 5), ("storage", lambda: 5), ("sampler", ListStorage(5)),
        ("sampler", lambda: None), ("writer", RandomSampler()), ("writer", RoundRobinWriter().add),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            ReplayBuffer(**{name: wrong})
    buffer = plain(LazyTensorStorage)
    buffer.extend(plain_tensor([0, 1]))
    for call, wrong in ((buffer.set_storage, 5), (buffer.set_sampler, "x"), (buffer.set_writer, ListStorage(5))):
        with refused(buffer, TypeError):
            call(wrong)


def test_arguments_that_exclude_each_other_are_refused():
    with pytest.raises(TypeError):
        ReplayBuffer(transform=lambda data: data, transform_factory=lambda: None)
    with pytest.raises(ValueError):
        ReplayBuffer(dim_extend=-1)

    class Dropping(RandomSampler):
        drop_last = True

    with pytest.raises(ValueError, match="drop_last"):
        ReplayBuffer(sampler=Dropping())
    with pytest.raises(NotImplementedError):
        plain(LazyTensorStorage).extend(plain_tensor([1]), update_priority=True)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_edits_by_key_are_checked(storage):
    buffer = plain(storage)
    buffer.extend(nested_td([0, 1, 2]))
    obs = torch.ones(3, 3, dtype=torch.float64)
    for call, error in (
        (lambda: buffer.set_("new", obs), KeyError),
        (lambda: buffer.set_(("next", "new"), obs), KeyError),
        (lambda: buffer.set_("obs", obs[:2]), RuntimeError),
        (lambda: buffer.set_("obs", obs[:, :1]), RuntimeError),
        (lambda: buffer.set_("obs", obs[:1]), RuntimeError),
        (lambda: buffer.set_("obs", obs.float()), RuntimeError),
        (lambda: buffer.set_at_("new", obs[0], 0), KeyError),
        (lambda: buffer.set_at_("obs", obs[0], 3), IndexError),
        (lambda: buffer.set_at_("obs", obs[:1], torch.tensor([5])), IndexError),
        (lambda: buffer.set_at_("obs", obs[0, :1], 0), RuntimeError),
        (lambda: buffer.set_at_("obs", obs[:2], torch.tensor([0, 1, 2])), RuntimeError),
        (lambda: buffer.update_({"obs": obs, "new": obs[:2]}), RuntimeError),
        (lambda: buffer.update_({"obs": obs[:2], "new": obs}), RuntimeError),
        (lambda: buffer.update_({"obs": obs, ("next", "reward"): torch.ones(2)}), RuntimeError),
        (lambda: buffer.update_(nested_td([7, 8])), RuntimeError),
        (lambda: buffer.write_all(nested_td([1] * 9)), (RuntimeError, IndexError)),
        (lambda: buffer.write_all(nested_td([7, 8]), end=3), RuntimeError),
    ):
        with refused(buffer, error):
            call()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_assignments_are_checked(storage):
    buffer = plain(storage)
    buffer.extend(plain_tensor([0, 1, 2]))
    for index, value, error in (
        (8, plain_tensor([1])[0], IndexError),
        (-9, plain_tensor([1])[0], IndexError),
        (torch.tensor([0, 8]), plain_tensor([1, 2]), IndexError),
        (torch.tensor([0, 1]), plain_tensor([1]), RuntimeError),
        (torch.tensor([0, 1]), plain_tensor([1])[0], RuntimeError),
        (slice(0, 2), plain_tensor([1, 2, 3]), RuntimeError),
        (slice(0, 2), plain_tensor([1]), RuntimeError),
        (0, torch.zeros(1), RuntimeError),
        (0, torch.zeros(()), RuntimeError),
        (0, 5.0, TypeError),
        (torch.tensor([0.5]), plain_tensor([1]), TypeError),
        (0.5, plain_tensor([1])[0], TypeError),
    ):
        with refused(buffer, error):
            buffer[index] = value
