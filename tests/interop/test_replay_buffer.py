"""ReplayBuffer: construction, writing, reading, editing."""

import gc
import weakref

import pytest
import torch

from interop import (
    Compose,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorStorage,
)
from tests.interop.rows import (
    KINDS,
    STORAGES,
    check_same,
    first_of,
    flat_td,
    nested_td,
    plain_tensor,
)


@pytest.fixture(params=STORAGES)
def storage(request):
    return STORAGES[request.param]


@pytest.fixture(params=KINDS)
def rows(request):
    return KINDS[request.param]


def test_the_default_buffer_is_a_list_of_a_thousand_drawn_uniformly():
    buffer = ReplayBuffer()
    assert type(buffer.storage) is ListStorage and buffer.storage.max_size == 1000
    assert type(buffer.sampler) is RandomSampler
    assert type(buffer.writer) is RoundRobinWriter
    assert isinstance(buffer.transform, Compose) and len(buffer.transform) == 0 and not buffer.transform.training
    assert buffer.batch_size is None and buffer.dim_extend == 0 and buffer.initialized
    assert len(buffer) == 0 and buffer.write_count == 0


def test_components_are_made_at_the_first_use_when_asked():
    tries = []

    def make():
        tries.append(1)
        if len(tries) == 1:
            raise OSError("disk")
        return LazyTensorStorage(5)

    buffer = ReplayBuffer(storage=make, transform_factory=lambda: lambda data: data + 1)
    assert not buffer.initialized and not tries
    with pytest.raises(OSError, match="disk"):
        len(buffer)
    assert not buffer.initialized
    buffer.extend(torch.zeros(3))  # tries again
    assert buffer.initialized and len(buffer) == 3 and len(tries) == 2
    assert torch.equal(buffer[:], torch.ones(3))


def test_the_ring_recycles_the_oldest_rows(storage, rows):
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend(rows([0, 1, 2, 3]))
    check_same(buffer.extend(rows([4, 5, 6, 7])), torch.tensor([4, 5, 0, 1]))
    assert len(buffer) == 6 and buffer.write_count == 8 and buffer.writer.cursor == 2
    check_same(buffer[:], rows([6, 7, 2, 3, 4, 5]))
    index = buffer.extend(rows(list(range(15))))  # more rows than slots: the last ones stay
    check_same(index, torch.arange(2, 17) % 6)
    assert len(buffer) == 6 and buffer.write_count == 23 and buffer.writer.cursor == 5
    kept = torch.empty(6, dtype=torch.int64)
    kept[index] = torch.arange(15)
    check_same(buffer[:], rows(kept))


def test_add_writes_one_item_and_returns_its_slot(storage, rows, monkeypatch):
    monkeypatch.setenv("RL_WARNINGS", "0")
    buffer = ReplayBuffer(storage=storage(3))
    for step in range(4):
        slot = buffer.add(first_of(rows([step])))
        assert type(slot) is int and slot == step % 3
    assert len(buffer) == 3 and buffer.write_count == 4 and buffer.writer.cursor == 1
    check_same(buffer[:], rows([3, 1, 2]))


def test_add_of_a_batched_tensordict_warns_and_can_be_silenced(monkeypatch):
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    with pytest.warns(UserWarning, match="extend"):
        buffer.add(flat_td([1, 2]))
    monkeypatch.setenv("RL_WARNINGS", "0")
    buffer.add(flat_td([1, 2]))
    assert buffer[:].batch_size == (2, 2)


def test_samples_are_stored_rows_under_their_index(storage, rows):
    buffer = ReplayBuffer(storage=storage(6), batch_size=16)
    buffer.extend(rows(list(range(8))))
    batch, info = buffer.sample(return_info=True)
    index = info["index"]
    assert index.dtype == torch.int64 and index.shape == (16,) and int(index.min()) >= 0 and int(index.max()) < 6
    check_same(batch, rows(torch.tensor([6, 7, 2, 3, 4, 5])[index]))
    assert set(info) == {"index"}
    buffer.empty()
    buffer.extend(rows([4]))
    check_same(buffer.next(), rows([4] * 16))


def test_a_generator_leaves_the_global_one_alone_and_can_be_replaced():
    buffer = ReplayBuffer(storage=LazyTensorStorage(50), generator=torch.Generator().manual_seed(3))
    buffer.extend(plain_tensor(list(range(50))))
    before = torch.get_rng_state()
    first = buffer.sample(20)
    assert torch.equal(before, torch.get_rng_state())
    buffer.set_rng(torch.Generator().manual_seed(3))
    check_same(buffer.sample(20), first)
    assert all(part.buffer_generator is buffer.generator for part in (buffer.storage, buffer.sampler, buffer.writer))


def test_empty_forgets_items_and_keeps_structure(storage, rows):
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend(rows([0, 1, 2, 3]))
    assert buffer.empty() is None
    assert len(buffer) == 0 and buffer.write_count == 0 and buffer.writer.cursor == 0
    check_same(buffer.extend(rows([8, 9])), torch.arange(2))
    check_same(buffer[:], rows([8, 9]))


def test_a_storage_of_given_data_counts_as_full():
    buffer = ReplayBuffer(storage=TensorStorage(plain_tensor([1, 2, 3])))
    assert len(buffer) == 3 and buffer.writer.cursor == 0 and buffer.write_count == 0
    assert buffer.add(plain_tensor([9])[0]) == 0
    assert len(buffer) == 3
    check_same(buffer[:], plain_tensor([9, 2, 3]))


def test_write_all_and_read_all_in_order(storage):
    buffer = ReplayBuffer(storage=storage(4))
    buffer.extend(nested_td([0, 1, 2]))
    before = (len(buffer), buffer.writer.cursor, buffer.write_count)
    assert buffer.write_all(nested_td([7, 8])) is None
    check_same(buffer.read_all_in_order(), nested_td([7, 8, 2]))
    check_same(buffer.read_all_in_order(end=1), nested_td([7]))
    buffer.write_all(nested_td([5, 6]), end=2)
    check_same(buffer.read_all_in_order(), nested_td([5, 6, 2]))
    assert (len(buffer), buffer.writer.cursor, buffer.write_count) == before
    buffer.extend(nested_td([3]))
    buffer.write_all(nested_td([9, 8, 7, 6]))
    with pytest.raises(RuntimeError):
        buffer.write_all(nested_td([1, 2]))  # a full buffer needs all rows
    check_same(buffer[:], nested_td([9, 8, 7, 6]))


def test_keys_are_edited_in_place(storage):
    buffer = ReplayBuffer(storage=storage(4))
    buffer.extend(nested_td([0, 1, 2]))
    assert buffer.set_("obs", torch.full((3, 3), 9.0, dtype=torch.float64)) is buffer
    assert buffer.set_at_(("next", "reward"), torch.tensor([5.0]), torch.tensor([1])) is buffer
    check_same(buffer[:]["obs"], torch.full((3, 3), 9.0, dtype=torch.float64))
    check_same(buffer[:]["next", "reward"], torch.tensor([0.0, 5.0, 2.0]))
    assert set(buffer.sample(8)["obs"].flatten().tolist()) == {9.0}
    assert buffer.update_(nested_td([4, 5, 6])) is buffer
    check_same(buffer[:], nested_td([4, 5, 6]))
    buffer.update_(nested_td([7, 8, 9]), keys_to_update=["obs"])
    check_same(buffer[:]["obs"], nested_td([7, 8, 9])["obs"])
    check_same(buffer[:]["next"], nested_td([4, 5, 6])["next"])
    buffer.update_({"obs": nested_td([1, 1, 1])["obs"]})
    check_same(buffer[:]["obs"], nested_td([1, 1, 1])["obs"])


def test_set_storage_resets_or_takes_the_collate_function():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.set_storage(ListStorage(10))
    buffer.extend([torch.zeros(2), torch.ones(2)])
    assert buffer.sample(3).shape == (3, 2)
    buffer.set_storage(ListStorage(10), collate_fn=lambda items: items)
    buffer.extend(["a", "b"])
    assert set(buffer.sample(9)) <= {"a", "b"}


def test_the_representation_names_the_parts():
    text = repr(ReplayBuffer(storage=LazyTensorStorage(3), batch_size=2))
    for part in ("ReplayBuffer(", "LazyTensorStorage(", "RandomSampler()", "RoundRobinWriter(cursor=0", "batch_size=2"):
        assert part in text
    assert "transform" not in text
    assert "transform=Compose(" in repr(ReplayBuffer(transform=lambda data: data))


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_a_storage_keeps_no_buffer_alive(make):
    storage = make(4)
    buffer = ReplayBuffer(storage=storage, prefetch=1, batch_size=1)
    assert storage.followers.all() == [buffer]
    gone = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert gone() is None and storage.followers.all() == []
