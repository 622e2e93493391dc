"""Whose memory is whose: what is stored stays as it was written, in every dtype, whatever happens on either side."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fbuf
from fbuf import storage
from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorStorage, to_jax, to_torch
from interop.data.bridge import DTYPES
from tests.fbuf import compiled
from tests.interop.bits import TORCH_DEVICES, edges, of_each_dtype, on_each_device, same_bits

STORAGES = {"memory": LazyTensorStorage, "memmap": LazyMemmapStorage, "list": ListStorage}
in_each_storage = pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
in_tensors = pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage], ids=["memory", "memmap"])


def test_functions_store_what_a_tensor_shows(device):
    tensor = torch.arange(6).reshape(2, 3).T
    rows = to_jax(tensor.to(torch.int32))
    buffer = fbuf.Buffer(3)
    state = compiled.extend(buffer, compiled.init(buffer, rows[0]), rows)[0]
    tensor.zero_()
    assert state.items.tolist() == [[0, 3], [1, 4], [2, 5]]
    sample = to_torch(compiled.sample(buffer, state, jax.random.key(0), 8)[1])
    sample.zero_()
    assert state.items.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert compiled.sample(buffer, state, jax.random.key(0), 8)[1].sum() > 0


@in_tensors
def test_buffers_store_what_a_tensor_shows(make):
    tensor = torch.arange(6).reshape(2, 3).T
    buffer = ReplayBuffer(storage=make(3), generator=torch.Generator().manual_seed(0))
    buffer.extend(tensor)
    tensor.zero_()
    assert buffer[:].tolist() == [[0, 3], [1, 4], [2, 5]]
    for _ in range(3):
        sample = buffer.sample(8)
        assert sample.sum() > 0
        sample.zero_()
        buffer[[0, 1]].zero_()
        assert buffer[:].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_functions_hold_every_dtype_exactly_with_64_bit_types_on():
    tensors = {str(dtype): edges(dtype).repeat(6).reshape(3, 1, 6, 2) for dtype in DTYPES}
    buffer = fbuf.Buffer(3)
    with jax.enable_x64(True):
        rows = {name: to_jax(tensor) for name, tensor in tensors.items()}
        state = compiled.extend(buffer, compiled.init(buffer, {name: leaf[0] for name, leaf in rows.items()}), rows)[0]
        for name, leaf in buffer.read(state, jnp.arange(3)).items():
            assert same_bits(to_torch(leaf), tensors[name]), name


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex128], ids=str)
def test_functions_refuse_64_bits_where_jax_would_narrow_them(dtype):
    rows = to_jax(edges(dtype))
    buffer = fbuf.Buffer(6)
    with pytest.raises(TypeError, match="64"):
        buffer.init(rows[0])
    narrow = buffer.init(jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(rows.dtype)))
    with pytest.raises(TypeError, match="64"):
        buffer.extend(narrow, rows)


@in_each_storage
@of_each_dtype
def test_buffers_hold_every_dtype_exactly_with_64_bit_types_off(make, dtype):
    tensor = edges(dtype).repeat(6).reshape(3, 1, 6, 2)
    buffer = ReplayBuffer(storage=make(3))
    for write in (lambda: buffer.extend(tensor), lambda: buffer.add(tensor[0]), lambda: buffer[0:1].copy_(tensor[:1])):
        write()
        assert same_bits(buffer[:], tensor)
    buffer[1] = tensor[2]
    assert same_bits(buffer[1], tensor[2])
    sample, info = buffer.sample(32, return_info=True)
    assert same_bits(sample, tensor[[0, 2, 2]][info["index"]])


@on_each_device
def test_buffers_take_pinned_memory_exactly(device):
    tensor = torch.tensor([2**40 + 1, -1, 0])
    tensor = tensor.pin_memory() if "cuda" in TORCH_DEVICES else tensor
    buffer = ReplayBuffer(storage=LazyTensorStorage(3, device=device))
    buffer.extend(tensor)
    assert buffer[:].tolist() == [2**40 + 1, -1, 0]


@on_each_device
def test_an_extend_on_a_side_stream_stores_the_final_values(device):
    buffer = ReplayBuffer(storage=LazyTensorStorage(2000, device=device))
    side = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
    factor = torch.full((2000, 2000), 1 / 2000, device=device)
    rows = torch.ones(2000, 2000, device=device)
    with side:
        for _ in range(2 if device == "cpu" else 200):
            rows = factor @ rows
        rows.fill_(5)
        buffer.extend(rows)
        rows.fill_(6)
    assert bool((buffer[:] == 5).all())
    assert bool((buffer.sample(64) == 5).all())


# ------------------------------------------------------------------ in one line each


def test_functions_write_a_row_back_without_growing(device):
    buffer = fbuf.Buffer(100)
    state = compiled.extend(buffer, compiled.init(buffer, jnp.zeros(())), jnp.arange(10.0))[0]
    state = dataclasses.replace(state, items=storage.write(state.items, jnp.array([2]), jnp.array([20.0])))
    assert int(buffer.size(state)) == 10
    assert set(compiled.sample(buffer, state, jax.random.key(0), 999)[1].tolist()) == {0, 1, 20, *range(3, 10)}


@in_each_storage
def test_buffers_write_a_row_back_without_growing(make):
    buffer = ReplayBuffer(storage=make(100))
    buffer.extend(torch.arange(10.0))
    buffer[2] = buffer[2] * 10
    assert (len(buffer), buffer.write_count) == (10, 10)
    assert set(buffer.sample(999).tolist()) == {0, 1, 20, *range(3, 10)}
    assert buffer.add(torch.tensor(10.0)) == 10


@in_each_storage
@pytest.mark.parametrize("index", [-1, -10, torch.tensor([-1]), np.array([-2, -1]), slice(-3, None)], ids=repr)
def test_what_is_written_at_an_index_is_read_there(make, index):
    buffer = ReplayBuffer(storage=make(100))
    buffer.extend(torch.arange(10.0))
    new = list(buffer[index] - 100) if make is ListStorage and not isinstance(index, int) else buffer[index] - 100
    buffer[index] = new
    assert (buffer[index] < 0).all()
    assert len(buffer) == 10


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


def test_memory_given_with_a_graph_is_read_without_it():
    memory = torch.zeros(4, 2, requires_grad=True) * 2
    buffer = ReplayBuffer(storage=TensorStorage(memory))
    buffer.extend(torch.ones(3, 2, requires_grad=True))
    for read in (buffer[:], buffer[0], buffer[[0, 1]], buffer.sample(4)):
        assert read.grad_fn is None and not read.requires_grad
