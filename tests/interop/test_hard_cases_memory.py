"""Whose memory is whose: what is stored stays as it was written, in every dtype, whatever happens on either side."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
import torch

import fbuf
from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, to_jax, to_torch
from interop.data.bridge import DTYPES
from tests.fbuf import compiled
from tests.interop.bits import edges, of_each_dtype, on_each_device, same_bits

STORAGES = {"memory": LazyTensorStorage, "memmap": LazyMemmapStorage, "list": ListStorage}
in_each_storage = pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
in_tensors = pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage], ids=["memory", "memmap"])


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
