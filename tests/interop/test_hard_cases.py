"""Cases that replay buffers are known to get wrong, with their numbers. `tests/fbuf` has those of the functions."""

import contextlib
import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

import fbuf
from fbuf import priority_tree
from interop import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    to_jax,
    to_torch,
)
from interop.data.bridge import DTYPES
from tests.fbuf import compiled
from tests.fbuf.model import assert_tree_is_exact
from tests.interop.bits import edges, of_each_dtype, on_each_device, same_bits
from tests.interop.rows import ALL_STORAGES, KINDS, STORAGES, check_same, flat_td, plain_tensor, state_of, tensors_of

in_each_storage = pytest.mark.parametrize("make", ALL_STORAGES.values(), ids=ALL_STORAGES)
in_tensors = pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
of_each_kind = pytest.mark.parametrize("rows", KINDS.values(), ids=KINDS)


def steps(count, first=0, **entries):
    return TensorDict({"x": torch.arange(first, first + count), **entries}, [count])


# ------------------------------------------------------------------ order of writing


@in_each_storage
@pytest.mark.parametrize("first", [0, 3], ids=["empty", "used"])
def test_buffers_keep_the_last_rows_of_an_extend_longer_than_the_buffer(make, first):
    at_once, one_by_one = ReplayBuffer(storage=make(4)), ReplayBuffer(storage=make(4))
    for buffer in (at_once, one_by_one):
        for row in range(-first, 0):
            buffer.add(torch.tensor(row))
    slots = at_once.extend(torch.arange(10))
    added = [one_by_one.add(torch.tensor(row)) for row in range(10)]
    assert slots.tolist() == added == [(first + row) % 4 for row in range(10)]
    assert at_once[:].tolist() == one_by_one[:].tolist()
    assert len(at_once) == len(one_by_one) == 4
    assert at_once.write_count == one_by_one.write_count == first + 10
    cursor = (first + 10) % 4
    assert at_once.add(torch.tensor(10)) == one_by_one.add(torch.tensor(10)) == cursor
    assert at_once[(torch.arange(4) + cursor + 1) % 4].tolist() == [7, 8, 9, 10]


def test_several_item_dims_are_swapped_and_the_capacity_is_rounded_up():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    assert buffer.storage.max_size == 100
    index = buffer.extend(torch.arange(12).reshape(3, 4))
    assert buffer.storage.max_size == 102 and len(buffer) == 12 and buffer.write_count == 4
    assert index.shape == (12, 2) and index[:4].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert buffer.storage[1].tolist() == [1, 5, 9]
    batch, info = buffer.sample(5, return_info=True)
    assert isinstance(info["index"], tuple) and [each.shape for each in info["index"]] == [(5,), (5,)]
    assert torch.equal(buffer.storage[info["index"]], batch)
    third = ReplayBuffer(storage=LazyTensorStorage(24, ndim=3))
    data = torch.arange(24).reshape(2, 3, 4)
    third.extend(data)
    assert torch.equal(third.storage[:], data.transpose(0, 2)) and torch.equal(third[:], data)


def test_write_count_counts_rows_and_has_no_bound():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    buffer.extend(torch.zeros(2, 30))
    assert buffer.write_count == 30 and len(buffer) == 8
    buffer.empty(empty_write_count=False)
    assert buffer.write_count == 30 and len(buffer) == 0
    buffer.empty()
    assert buffer.write_count == 0


def test_a_list_at_the_root_is_a_stack_and_a_tuple_is_a_pytree():
    stacked = ReplayBuffer(storage=LazyTensorStorage(10))
    assert stacked.extend([torch.zeros(3), torch.ones(3)]).tolist() == [0, 1]
    assert stacked[:].shape == (2, 3)
    pytree = ReplayBuffer(storage=LazyTensorStorage(10))
    pytree.extend((torch.zeros(3), torch.ones(3, 2)))
    assert len(pytree) == 3 and isinstance(pytree[:], tuple)
    listed = ReplayBuffer(storage=ListStorage(10), collate_fn=lambda items: items)
    assert listed.extend(range(3)).tolist() == [0, 1, 2] and listed[:] == [0, 1, 2]
    with pytest.raises(TypeError, match="dict"):
        listed.extend({"a": torch.zeros(3)})


@in_each_storage
def test_locked_and_lazily_stacked_tensordicts_are_stored(make):
    buffer = TensorDictReplayBuffer(storage=make(10))
    data = TensorDict({"a": torch.rand(3), "n": {"b": torch.rand(3, 2)}}, [3]).lock_()
    lazy_below = TensorDict({**data, "n": lazy_stack(list(data["n"]))}, [3])
    for rows in (data, lazy_stack(list(data.unbind(0))), lazy_below):
        buffer.extend(rows)
    buffer.add(data[0].lock_())
    assert data.is_locked and set(data.keys()) == {"a", "n"}
    assert torch.equal(buffer[:9]["a"], data["a"].repeat(3)) and buffer[9]["a"] == data["a"][0]
    assert torch.equal(buffer[:9]["n", "b"], data["n", "b"].repeat(3, 1))
    assert buffer[:]["index"].tolist() == list(range(10))
    buffer.sample(4)["new"] = torch.zeros(4)


# ------------------------------------------------------------------ draws and priorities


def prioritized(capacity: int, count: int, device: str = "cpu", **options: float) -> PrioritizedReplayBuffer:
    buffer = PrioritizedReplayBuffer(storage=LazyTensorStorage(capacity, device=device), **options)
    buffer.extend(torch.arange(float(count), device=device))
    return buffer


def leaves(state: fbuf.PrioritizedState, count: int) -> list[float]:
    return np.asarray(state.tree.leaves[:count]).tolist()


@on_each_device
def test_buffers_take_the_last_of_equal_indices(device):
    for _ in range(100):
        buffer = prioritized(6, 6, device, alpha=1, beta=1, eps=0)
        buffer.update_priority(torch.tensor([3, 3, 5]), torch.tensor([1.0, 9.0, 2.0]))
        assert buffer.sampler.priorities.tolist() == [1, 1, 1, 9, 1, 2]
        assert float(priority_tree.total(buffer.sampler.functional_state.tree)) == 15
        assert buffer.sampler.default_priority == 9


@on_each_device
def test_buffers_draw_stored_items_of_positive_priority_alone(device):
    values = np.random.default_rng(0).uniform(1e-3, 1e3, 100).astype(np.float32)
    values[::3] = 0
    buffer = prioritized(500, 100, device, alpha=1, beta=1, eps=0)
    buffer.update_priority(torch.arange(100), torch.from_numpy(values))
    items, info = buffer.sample(300_000, return_info=True)
    slots = info["index"].cpu().numpy()
    assert slots.max() == 98 and slots.min() == 1
    assert values[slots].all()
    np.testing.assert_array_equal(items.cpu().numpy(), slots)
    share, wanted = np.bincount(slots, minlength=100) / len(slots), values / values.sum()
    assert (np.abs(share - wanted) <= 6 * np.sqrt(wanted / len(slots))).all()
    # Weights are relative to the smallest priority of the buffer, whether or not it is in the batch.
    np.testing.assert_allclose(info["priority_weight"].cpu(), values[values > 0].min() / values[slots], rtol=1e-5)


@on_each_device
def test_buffers_do_not_drift(device):
    buffer, random = prioritized(8192, 8192, device, alpha=1, beta=1, eps=0), np.random.default_rng(0)
    for number in range(300):
        slots, values = random.integers(0, 8192, 32), random.uniform(0.1, 5, 32).astype(np.float32)
        buffer.update_priority(torch.from_numpy(slots), torch.from_numpy(values))
        if number % 30 == 0:
            buffer.sample(1)  # brings the changes into the tree
    tree = buffer.sampler.functional_state.tree
    assert_tree_is_exact(tree)
    total = np.asarray(tree.leaves, np.float64).sum()
    assert float(priority_tree.total(tree)) == pytest.approx(total, rel=1e-6)


@on_each_device
def test_buffers_apply_alpha_once(device):
    buffer = prioritized(4, 1, device, alpha=0.5, beta=1, eps=0)
    buffer.update_priority(0, 4.0)
    assert leaves(buffer.sampler.functional_state, 1) == [2]
    buffer.add(torch.tensor(1.0))
    assert leaves(buffer.sampler.functional_state, 2) == [2, 2]
    buffer.update_priority(torch.tensor([1]), torch.tensor([1.0]))
    assert leaves(buffer.sampler.functional_state, 2) == [2, 1]
    _, info = buffer.sample(64, return_info=True)
    index = info["index"].cpu()
    assert set(index.tolist()) == {0, 1}
    torch.testing.assert_close(info["priority_weight"].cpu(), torch.tensor([0.5, 1])[index])
    buffer.sampler.alpha = 1
    assert leaves(buffer.sampler.functional_state, 2) == [4, 1]
    assert buffer.sampler.priorities.tolist() == [4, 1]


def test_a_new_item_has_the_greatest_raw_priority_raised_to_alpha_once():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.9, eps=0, storage=LazyTensorStorage(8))
    buffer.extend(steps(2, td_error=torch.tensor([0.1, 0.2])))
    assert buffer.sampler.default_priority == 1  # the write itself counted as 1
    new = steps(1, td_error=torch.zeros(1))
    buffer.extend(new, update_priority=False)
    torch.testing.assert_close(buffer.sampler.priorities[:3], torch.tensor([0.1, 0.2, 1]))
    buffer.update_priority(0, 16.0)
    assert buffer.sampler.default_priority == 16
    buffer.extend(new, update_priority=False)
    assert buffer.sampler.functional_state.tree.leaves[3] == 4


def test_the_last_batch_of_an_epoch_is_short_and_next_is_none_between_epochs():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=3)
    buffer.extend(torch.arange(10))
    for _ in range(2):
        batches = list(buffer)
        assert [len(batch) for batch in batches] == [3, 3, 3, 1]
        assert torch.cat(batches).sort().values.tolist() == list(range(10))
    buffer.set_sampler(SamplerWithoutReplacement(drop_last=True))
    for _ in range(2):
        assert [None if (batch := buffer.next()) is None else len(batch) for _ in range(4)] == [3, 3, 3, None]


# ------------------------------------------------------------------ memory


@in_tensors
@of_each_kind
def test_stored_rows_alias_neither_given_data_nor_samples(make, rows):
    buffer = ReplayBuffer(storage=make(6))
    given = rows([1, 2, 3])
    buffer.extend(given)
    for leaf in tensors_of(given):
        leaf.zero_()
    check_same(buffer[:], rows([1, 2, 3]))
    batch, info = buffer.sample(5, return_info=True)
    for leaf in [*tensors_of(batch), info["index"]]:
        leaf.zero_()
    assert all(not leaf.any() for leaf in tensors_of(batch))
    check_same(buffer[:], rows([1, 2, 3]))
    check_same(buffer.extend(rows([4])), torch.tensor([3]))


def test_the_tensors_of_a_sample_are_apart_from_each_other():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    same = plain_tensor([1, 2])
    buffer.extend({"a": same, "b": same})
    batch = buffer.sample(3)
    batch["a"].zero_()
    assert batch["b"].all()


@in_tensors
def test_a_slice_is_a_view_and_a_list_of_slots_a_copy(make):
    buffer = TensorDictReplayBuffer(storage=make(10), batch_size=4)
    buffer.extend(steps(5))
    buffer[1:3]["x"].fill_(70)
    buffer[[0, 4]]["x"].fill_(-1)
    buffer.sample()["x"].fill_(-1)
    assert buffer[:]["x"].tolist() == [0, 70, 70, 3, 4]
    buffer[4] = buffer[0]
    assert buffer[:]["x"].tolist() == [0, 70, 70, 3, 0]
    assert len(buffer) == 5 and buffer.extend(steps(1)).tolist() == [5]


@in_each_storage
def test_buffers_write_a_row_back_without_growing(make):
    buffer = ReplayBuffer(storage=make(100))
    buffer.extend(torch.arange(10.0))
    buffer[2] = buffer[2] * 10
    assert (len(buffer), buffer.write_count) == (10, 10)
    assert set(buffer.sample(999).tolist()) == {0, 1, 20, *range(3, 10)}
    assert buffer.add(torch.tensor(10.0)) == 10


@in_each_storage
def test_stored_tensors_never_keep_a_graph(make):
    rows = torch.ones(3, 2, requires_grad=True) * 2
    buffer = ReplayBuffer(storage=make(6))
    buffer.extend(rows)
    buffer.add(rows[0])
    buffer[0] = rows[1]
    for read in (buffer[:], buffer[0], buffer[3], buffer[[0, 1]], buffer.sample(4)):
        assert read.grad_fn is None and not read.requires_grad
    rows.sum().backward()
    assert not to_torch(to_jax(rows)).requires_grad


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
def test_a_copy_continues_alike_and_apart(copier, make):
    buffer = ReplayBuffer(storage=make(6), batch_size=4, generator=torch.Generator().manual_seed(0))
    buffer.extend(flat_td([0, 1, 2, 3]))
    buffer.sample()
    twin = copier(buffer)
    check_same(twin.storage[:], buffer.storage[:])
    assert (len(twin), twin.write_count, twin.writer.cursor, twin.batch_size) == (4, 4, 4, 4)
    check_same(twin.sample(), buffer.sample())
    kept = state_of(buffer)
    twin.extend(flat_td([8, 9, 10, 11]))
    check_same(state_of(buffer), kept)
    assert len(twin) == 6 and len(buffer) == 4


@on_each_device
def test_an_extend_on_a_side_stream_stores_the_final_values(device):
    buffer = ReplayBuffer(storage=LazyTensorStorage(2000, device=device))
    side = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
    factor = torch.full((2000, 2000), 1 / 2000, device=device)
    rows = torch.ones(2000, 2000, device=device)
    with side:
        for _ in range(1 if device == "cpu" else 200):
            rows = factor @ rows
        rows.fill_(5)
        buffer.extend(rows)
        rows.fill_(6)
    assert bool((buffer[:] == 5).all())
    assert bool((buffer.sample(64) == 5).all())


# ------------------------------------------------------------------ every dtype, bit for bit


def test_functions_hold_every_dtype_exactly_with_64_bit_types_on():
    tensors = {str(dtype): edges(dtype).repeat(6).reshape(3, 1, 6, 2) for dtype in DTYPES}
    buffer = fbuf.Buffer(3)
    with jax.enable_x64(True):
        rows = {name: to_jax(tensor) for name, tensor in tensors.items()}
        state = compiled.extend(buffer, compiled.init(buffer, {name: leaf[0] for name, leaf in rows.items()}), rows)[0]
        for name, leaf in jax.jit(buffer.read)(state, jnp.arange(3)).items():
            assert same_bits(to_torch(leaf), tensors[name]), name


@in_each_storage
@of_each_dtype
def test_buffers_hold_every_dtype_exactly_with_64_bit_types_off(make, dtype):
    tensor = edges(dtype).repeat(4).reshape(4, 6).t()  # strided
    buffer = ReplayBuffer(storage=make(4))
    buffer.extend(tensor[::2])
    buffer.add(tensor[1])
    buffer.extend(tensor)  # more rows than slots
    assert same_bits(buffer[:], tensor[[4, 5, 2, 3]])
    buffer[1] = tensor[2]
    assert same_bits(buffer[1], tensor[2])
    sample, info = buffer.sample(32, return_info=True)
    assert same_bits(sample, tensor[[4, 2, 2, 3]][info["index"]])
    if make is not ListStorage:
        buffer[0:1].copy_(tensor[:1])
        assert same_bits(buffer[0], tensor[0])
        buffer[[0, 0, 2]] = tensor[[0, 1, 0]]  # of equal slots the last wins
        assert same_bits(buffer[:], tensor[[1, 2, 0, 3]])
