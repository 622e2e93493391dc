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
    TensorStorageCheckpointer,
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
each_buffer = pytest.mark.parametrize("make", BUFFERS)
in_tensors = pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])


# ------------------------------------------------------------------ rows


def changed(key, change):
    def make(ids):
        data = nested_td(ids)
        return data.set(key, change(data.get(key)))

    return make


BAD_ROWS = {
    "missing key": (lambda ids: nested_td(ids).exclude(("next", "reward")), KeyError, "reward"),
    "renamed key": (lambda ids: nested_td(ids).rename_key_("obs", "observation"), KeyError, "observation"),
    "extra key": (lambda ids: nested_td(ids).set("new", torch.zeros(len(ids))), KeyError, "new"),
    "other dtype": (changed("obs", lambda leaf: leaf.float()), RuntimeError, "float32"),
    "wider": (changed("obs", lambda leaf: torch.cat([leaf, leaf], -1)), RuntimeError, "obs"),
    "width one": (changed(("next", "pixels"), lambda leaf: leaf[..., :1, :]), RuntimeError, "pixels"),
    "a dim more": (changed("obs", lambda leaf: leaf[..., None]), RuntimeError, "obs"),
    "a dim less": (changed("obs", lambda leaf: leaf[..., 0]), RuntimeError, "obs"),
    "tensor for tensordict": (lambda ids: nested_td(ids).set("next", torch.zeros(len(ids))), TypeError, "next"),
    "tensordict for tensor": (lambda ids: nested_td(ids).set("obs", nested_td(ids)), TypeError, "obs"),
    "text": (lambda ids: nested_td(ids).set("obs", NonTensorData("text", batch_size=[len(ids)])), TypeError, "obs"),
    "sparse": (changed("obs", lambda leaf: leaf.to_sparse()), (TypeError, RuntimeError), "obs"),
    "on no device": (changed("obs", lambda leaf: leaf.to("meta")), (TypeError, RuntimeError), "obs"),
}


@each_buffer
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_rows_unlike_the_stored_ones_are_refused(make, bad):
    rows, error, match = BAD_ROWS[bad]
    buffer = BUFFERS[make]()
    buffer.extend(nested_td([0, 1, 2]))
    with refused(buffer, error, match):
        buffer.extend(rows([5, 6]))
    one = rows([5])
    if bad != "sparse":
        with refused(buffer, error, match):
            buffer.add(one[0])
        if not isinstance(buffer, TensorDictReplayBuffer):
            with refused(buffer, (error, RuntimeError) if isinstance(error, type) else error):
                buffer.extend([nested_td([5])[0], one[0]])
        with refused(buffer, error, match):
            buffer[0] = one[0]
    for index in (slice(0, 1), torch.tensor([0])):
        with refused(buffer, error, match):
            buffer[index] = one
    assert buffer.extend(nested_td([3, 4])).tolist() == [3, 4]


@pytest.mark.parametrize(
    "data", [None, np.array([None, 1]), {"a": iter([1])}, {"a": None}, {}, ()], ids=lambda data: type(data).__name__
)
def test_tensor_storages_refuse_data_without_tensors(data):
    buffer = ReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    for call in (buffer.extend, buffer.add):
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            call(data)
        assert not buffer.storage.initialized and len(buffer) == 0 and buffer.write_count == 0
    buffer.extend(plain_tensor([0, 1]))
    for call in (buffer.extend, buffer.add):
        with refused(buffer, (TypeError, RuntimeError, ValueError)):
            call(data)


@in_tensors
def test_a_first_write_that_is_refused_fixes_no_layout(storage):
    buffer = plain(storage)
    with pytest.raises((TypeError, RuntimeError)):
        buffer.extend({"x": torch.zeros(3), "y": torch.zeros(3, 1).to_sparse()})
    assert (len(buffer), buffer.write_count) == (0, 0)
    buffer.extend(torch.arange(3))
    assert buffer[:].tolist() == [0, 1, 2]


@each_buffer
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


@in_tensors
def test_edits_by_key_are_checked(storage):
    buffer = plain(storage)
    buffer.extend(nested_td([0, 1, 2]))
    obs = torch.ones(3, 3, dtype=torch.float64)
    for call, error in (
        (lambda: buffer.set_(("next", "new"), obs), KeyError),
        (lambda: buffer.set_("obs", obs[:1]), RuntimeError),
        (lambda: buffer.set_("obs", obs[:, :1]), RuntimeError),
        (lambda: buffer.set_("obs", obs.float()), RuntimeError),
        (lambda: buffer.set_at_("new", obs[0], 0), KeyError),
        (lambda: buffer.set_at_("obs", obs[:1], torch.tensor([5])), IndexError),
        (lambda: buffer.set_at_("obs", obs[:2], torch.tensor([0, 1, 2])), RuntimeError),
        (lambda: buffer.update_({"obs": obs, ("next", "reward"): torch.ones(2)}), RuntimeError),
        (lambda: buffer.update_(nested_td([7, 8])), RuntimeError),
        (lambda: buffer.write_all(nested_td([1] * 9)), (RuntimeError, IndexError)),
        (lambda: buffer.write_all(nested_td([7, 8]), end=3), RuntimeError),
    ):
        with refused(buffer, error):
            call()


@in_tensors
def test_assignments_are_checked(storage):
    buffer = plain(storage)
    buffer.extend(plain_tensor([0, 1, 2]))
    for index, value, error in (
        (-9, plain_tensor([1])[0], IndexError),
        (torch.tensor([0, 8]), plain_tensor([1, 2]), IndexError),
        (torch.tensor([0, 1]), plain_tensor([1]), RuntimeError),
        (slice(0, 2), plain_tensor([1, 2, 3]), RuntimeError),
        (0, torch.zeros(1), RuntimeError),
        (0, 5.0, RuntimeError),
        (0, None, TypeError),
        (torch.tensor([0.5]), plain_tensor([1]), TypeError),
    ):
        with refused(buffer, error):
            buffer[index] = value


# ------------------------------------------------------------------ draws


@each_buffer
@pytest.mark.parametrize("batch_size", [0, -1, 2.5, "3", True])
def test_bad_batch_sizes_are_refused(make, batch_size):
    buffer = BUFFERS[make]()
    buffer.extend(nested_td([0, 1, 2]))
    with refused(buffer, (TypeError, ValueError), "batch_size"):
        buffer.sample(batch_size)
    with pytest.raises((TypeError, ValueError), match="batch_size"):
        ReplayBuffer(batch_size=batch_size)


@each_buffer
def test_sampling_needs_items_and_a_batch_size(make):
    buffer = BUFFERS[make]()
    with refused(buffer, RuntimeError, "empty"):
        buffer.sample(3)
    buffer.extend(nested_td([0, 1, 2]))
    for call in (buffer.sample, lambda: next(iter(buffer)), buffer.next):
        with refused(buffer, RuntimeError, "batch_size"):
            call()
    buffer.empty()
    with refused(buffer, RuntimeError, "empty"):
        buffer.sample(3)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_refused_draw_leaves_the_generator_alone(seed, prefetch, storage):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    sampler = PrioritizedSampler(8, 0.6, 0.4, eps=0)
    buffer = ReplayBuffer(storage=storage(8), sampler=sampler, generator=generator, batch_size=2, prefetch=prefetch)
    with refused(buffer, RuntimeError, "empty"):
        buffer.sample()
    buffer.extend(plain_tensor([0, 1]))
    buffer.update_priority(torch.arange(2), 0.0)
    with refused(buffer, RuntimeError, "p_sum"):
        buffer.sample()
    buffer.update_priority(torch.arange(2), 1.0)
    assert buffer.sample().shape == (2, 3)


def test_a_sampler_that_returns_slots_without_items_leaves_the_generator_alone():
    class Beyond(RandomSampler):
        def sample(self, storage, batch_size):
            return super().sample(storage, batch_size)[0] + 10, {}

    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=Beyond())
    buffer.extend(plain_tensor([0, 1]))
    with refused(buffer, IndexError):
        buffer.sample(3)


# ------------------------------------------------------------------ priorities

PRIORITIES = {
    "nan": [1.0, torch.nan],
    "inf": [torch.inf, 1.0],
    "negative": [1.0, -1.0],
    "too large for the dtype": torch.tensor([1e300, 1.0], dtype=torch.float64),
}


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("alpha", [0.0, 0.7])
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


@pytest.mark.parametrize("index", [3, 8, 16, 2**31, 2**32 + 1, -2, -(2**63)])
def test_slots_without_items_are_refused(index):
    buffer = by_priority(LazyTensorStorage)
    buffer.extend(plain_tensor([0, 1, 2]))
    with refused(buffer, IndexError, str(abs(index))):
        buffer.update_priority(index, 5.0)
    with refused(buffer, IndexError):
        buffer.update_priority(torch.tensor([0, index, 1]), torch.tensor([7.0, 8.0, 9.0]))
    for marking in (buffer, buffer.sampler):
        with refused(buffer, IndexError):
            marking.mark_update(torch.tensor([0, index]))
    assert set(buffer.sample(64)[:, 0].tolist()) <= {0.0, 1.0, 2.0}


# ------------------------------------------------------------------ components


def test_components_of_the_wrong_kind_are_refused():
    with pytest.raises(TypeError):
        ReplayBuffer(LazyTensorStorage(8))
    for name, wrong in (
        ("storage", RandomSampler()), ("storage", lambda: 5), ("sampler", ListStorage(5)), ("sampler", lambda: None),
        ("writer", RandomSampler()), ("writer", RoundRobinWriter().add),
    ):  # fmt: skip
        with pytest.raises(TypeError):
            ReplayBuffer(**{name: wrong})
    buffer = plain(LazyTensorStorage)
    buffer.extend(plain_tensor([0, 1]))
    for call, wrong in ((buffer.set_storage, 5), (buffer.set_sampler, "x"), (buffer.set_writer, ListStorage(5))):
        with refused(buffer, TypeError):
            call(wrong)
    with refused(buffer, ValueError, "holds 5 items"):
        buffer.set_sampler(PrioritizedSampler(5, 1.0, 1.0))
    assert buffer.sample(4).shape == (4, 3)


def test_a_refused_constructor_leaves_the_storage_alone():
    storage = LazyTensorStorage(10)
    storage.checkpointer = mine = TensorStorageCheckpointer()
    for bad in ({"sampler": PrioritizedSampler(5, 1.0, 1.0)}, {"writer": 5}, {"transform": 5}):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            ReplayBuffer(storage=storage, **bad)
        assert storage.checkpointer is mine and storage.followers.all() == []


@pytest.mark.parametrize(
    "bad", [{"generator": 42}, {"collate_fn": 3}, {"dim_extend": 1.5}, {"dim_extend": -1}], ids=repr
)
def test_bad_arguments_are_refused(bad):
    with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
        ReplayBuffer(**bad)


def test_arguments_that_exclude_each_other_are_refused():
    with pytest.raises(TypeError):
        ReplayBuffer(transform=lambda data: data, transform_factory=lambda: None)

    class Dropping(RandomSampler):
        drop_last = True

    with pytest.raises(ValueError, match="drop_last"):
        ReplayBuffer(sampler=Dropping())
    with pytest.raises(NotImplementedError):
        plain(LazyTensorStorage).extend(plain_tensor([1]), update_priority=True)
