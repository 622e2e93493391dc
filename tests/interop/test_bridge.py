"""Tensors to JAX and back: every dtype, every layout of memory, nothing shared that was not asked for."""

import contextlib
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import MemoryMappedTensor
from torch import Tensor

from interop import to_jax, to_torch
from interop.data import bridge
from tests.interop.bits import TORCH_DEVICES, bits, edges, of_each_dtype, on_each_device, same_bits, settled

both_settings = pytest.mark.parametrize("wide", [False, True], ids=["32-bit", "64-bit"])
both_ways = pytest.mark.parametrize("copy", [True, False], ids=["copied", "shared"])


class Marked(Tensor):
    """A tensor subclass without anything of its own."""


def keeps_64_bits() -> bool:
    """Whether JAX's 64-bit types are on for the caller."""
    return jnp.asarray(np.float64(1)).dtype == np.float64


def device_of(array: jax.Array) -> str:
    return {"cpu": "cpu", "gpu": "cuda"}[next(iter(array.devices())).platform]


# ------------------------------------------------------------------ values


@on_each_device
@both_settings
@both_ways
@of_each_dtype
def test_every_bit_crosses_both_ways(device, wide, copy, dtype):
    tensor = edges(dtype).to(device)
    with jax.enable_x64(wide):
        array = to_jax(tensor, copy=copy)
        back = to_torch(array, copy=copy)
        assert keeps_64_bits() == wide
    assert array.dtype == bridge.DTYPES[dtype]
    assert same_bits(array, tensor)
    assert back.dtype == dtype
    assert same_bits(back, tensor)
    assert device_of(array) == device and back.device.type == device


@on_each_device
@both_settings
@of_each_dtype
def test_arrays_made_by_jax_cross_exactly(device, wide, dtype):
    host = np.frombuffer(bits(edges(dtype))[2], bridge.DTYPES[dtype]).reshape(3, 1, 2)
    with bridge.exact():
        array = jax.device_put(host, bridge.jax_device(torch.device(device)))
    with jax.enable_x64(wide):
        tensor = to_torch(array)
        assert keeps_64_bits() == wide
    assert tensor.dtype == dtype and tensor.shape == (3, 1, 2)
    assert same_bits(tensor, array)
    assert not tensor.requires_grad


def test_what_32_bits_cannot_hold_crosses_with_64_bit_types_off():
    assert not keeps_64_bits()
    assert int(to_torch(to_jax(torch.tensor(2**40 + 1)))) == 2**40 + 1
    assert float(to_torch(to_jax(torch.tensor(1 / 3, dtype=torch.float64)))) == 1 / 3
    assert np.signbit(np.asarray(to_jax(torch.tensor(-0.0, dtype=torch.float64))))
    assert np.isnan(np.asarray(to_jax(torch.tensor(float("nan"), dtype=torch.bfloat16))).astype(np.float32))


def test_the_setting_of_the_process_is_left_alone():
    before = jax.config.jax_enable_x64
    for wanted in (True, False):
        try:
            jax.config.update("jax_enable_x64", wanted)
            to_torch(to_jax(torch.ones(3, dtype=torch.float64)))
            with pytest.raises(TypeError):
                to_jax(torch.ones(3, dtype=torch.uint32))
            assert jax.config.jax_enable_x64 == wanted
            assert keeps_64_bits() == wanted
        finally:
            jax.config.update("jax_enable_x64", before)


def test_the_setting_of_another_thread_is_left_alone():
    seen = []

    def cross() -> None:
        to_jax(torch.ones(3, dtype=torch.float64))
        seen.append(keeps_64_bits())

    with jax.enable_x64(True):
        thread = threading.Thread(target=cross)
        thread.start()
        thread.join()
        assert keeps_64_bits()
    assert seen == [False]


# ------------------------------------------------------------------ memory


def base(dtype: torch.dtype, device: str) -> Tensor:
    """[6, 4, 3], all edge values in a row."""
    return edges(dtype).repeat(12).reshape(6, 4, 3).to(device)


LAYOUTS = {
    "dense": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "permuted": lambda t: t.permute(1, 2, 0),
    "sliced": lambda t: t[1:5, 1:, :2],
    "stepped": lambda t: t[::2, ::3, 1::2],
    "one column": lambda t: t[:, 2, 1],
    "offset": lambda t: t.reshape(-1)[1:],
    "expanded": lambda t: t[:, :1].expand(6, 5, 3),
    "expanded scalar": lambda t: t[0, 0, 0].expand(2, 3),
    "no dims": lambda t: t[5, 3, 2],
    "size one dims": lambda t: t.reshape(-1)[:36].reshape(3, 1, 6, 2),
    "size one dims, transposed": lambda t: t.reshape(-1)[:36].reshape(3, 1, 6, 2).transpose(0, 1).transpose(2, 3),
    "odd strides on size one": lambda t: t.as_strided((1, 4, 1), (1000, 3, 7)),
    "overlapping": lambda t: t.as_strided((5, 4), (2, 1)),
    "empty": lambda t: t[:0],
    "empty in the middle": lambda t: t[:, 2:2, ::2],
    "flipped": lambda t: t.flip(0, 2),
    "channels last": lambda t: t[None].contiguous(memory_format=torch.channels_last),
    "subclass": lambda t: t.as_subclass(Marked)[1:],
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.dtype.is_floating_point or t.dtype.is_complex),
}
if "cuda" in TORCH_DEVICES:
    LAYOUTS["pinned"] = lambda t: t.cpu().pin_memory()
SOME = [torch.bool, torch.uint8, torch.bfloat16, torch.int64, torch.float32, torch.complex64]


@on_each_device
@both_ways
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", SOME, ids=str)
def test_every_layout_of_memory_crosses(device, copy, layout, dtype):
    tensor = LAYOUTS[layout](base(dtype, device))
    array = to_jax(tensor, copy=copy)
    assert array.shape == tuple(tensor.shape)
    assert same_bits(array, tensor)
    assert same_bits(to_torch(array, copy=copy), tensor)


@both_ways
@pytest.mark.parametrize("offset", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
def test_storage_offsets_that_are_not_aligned_cross(copy, offset, dtype):
    tensor = edges(dtype).repeat(40)[offset:]
    assert same_bits(to_jax(tensor, copy=copy), tensor)


@both_ways
def test_int64_at_an_odd_byte_crosses(copy):
    raw = torch.arange(65, dtype=torch.uint8)
    tensor = torch.frombuffer(raw.numpy().data, dtype=torch.int64, count=8, offset=1)
    assert tensor.data_ptr() % 8
    wanted = np.frombuffer(raw.numpy().tobytes(), np.int64, 8, 1)
    np.testing.assert_array_equal(np.asarray(to_jax(tensor, copy=copy)), wanted)


@both_ways
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugated_and_negated_views_cross_as_what_they_show(copy, dtype):
    tensor = torch.tensor([1 + 2j, -3 - 4j], dtype=dtype)
    conjugate, negated = tensor.conj(), tensor.conj().imag
    assert conjugate.is_conj() and negated.is_neg()
    assert np.asarray(to_jax(conjugate, copy=copy)).tolist() == [1 - 2j, -3 + 4j]
    assert np.asarray(to_jax(negated, copy=copy)).tolist() == [-2.0, 4.0]


@both_ways
def test_memory_mapped_tensors_cross(tmp_path, copy):
    tensor = MemoryMappedTensor.from_tensor(torch.arange(12.0).reshape(3, 4), filename=tmp_path / "a.memmap")
    for view in (tensor, tensor[1:], tensor.t()):
        assert same_bits(to_jax(view, copy=copy), view)


@on_each_device
@both_ways
def test_the_graph_stays_behind(device, copy):
    leaf = torch.arange(3.0, device=device, requires_grad=True)
    made = leaf * 2
    for tensor in (leaf, made):
        array = to_jax(tensor, copy=copy)
        assert same_bits(array, tensor)
        assert not to_torch(array).requires_grad
    assert leaf.requires_grad and made.grad_fn is not None
    made.sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]


# ------------------------------------------------------------------ who sees whose writes


@on_each_device
@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if not name.startswith(("overlapping", "parameter", "empty"))]
)
def test_by_default_nothing_is_shared_towards_jax(device, layout):
    memory = base(torch.float32, device)
    tensor = LAYOUTS[layout](memory)
    array = to_jax(tensor)
    before = bits(array)
    (memory if "expanded" in layout else tensor).fill_(7)
    assert bits(array) == before


def test_by_default_a_conjugated_view_shares_nothing():
    memory = torch.tensor([1 + 2j, 3 + 4j])
    array = to_jax(memory.conj())
    memory.zero_()
    assert np.asarray(array).tolist() == [1 - 2j, 3 - 4j]


@on_each_device
@of_each_dtype
def test_by_default_nothing_is_shared_towards_torch(device, dtype):
    array = to_jax(edges(dtype).to(device))
    before = bits(array)
    for _ in range(2):
        tensor = to_torch(array)
        assert bits(tensor) == before
        tensor.zero_()
        assert not settled(tensor).any()
        assert bits(array) == before


@on_each_device
@pytest.mark.parametrize("count", [16, 1000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_without_a_copy_dense_memory_is_shared(device, count, dtype):
    tensor = torch.ones(count, dtype=dtype, device=device)
    array = to_jax(tensor, copy=False)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    back = to_torch(array, copy=False)
    assert back.data_ptr() == tensor.data_ptr()
    back.zero_()
    assert not settled(tensor).any()


@both_ways
@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_memory_outlives_the_side_it_came_from(copy, dtype):
    wanted = bits(edges(dtype).repeat(100))
    array = to_jax(edges(dtype).repeat(100), copy=copy)
    gc.collect()
    crowd = [torch.full((600,), 3).to(dtype) for _ in range(50)]
    assert bits(array) == wanted
    tensor = to_torch(array, copy=copy)
    del array
    gc.collect()
    crowd += [to_jax(torch.full((600,), 3).to(dtype)) for _ in range(50)]
    assert bits(tensor) == wanted


@on_each_device
@both_ways
def test_what_was_queued_before_the_call_is_in_the_array(device, copy):
    side = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
    with side:
        factor = torch.full((2000, 2000), 1 / 2000, device=device)
        tensor = torch.ones(2000, 2000, device=device)
        for _ in range(3 if device == "cpu" else 200):
            tensor = factor @ tensor
        tensor.fill_(5)
        array = to_jax(tensor, copy=copy)
    assert (np.asarray(array) == 5).all()


@on_each_device
@both_ways
def test_what_jax_still_computes_is_in_the_tensor(device, copy):
    factor = to_jax(torch.full((1000, 1000), 1 / 1000, device=device))

    @jax.jit
    def power(array: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5 if device == "cpu" else 500, lambda _, held: factor @ held, array)

    side = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
    with side:
        tensor = to_torch(power(jnp.ones_like(factor)), copy=copy)
        spread = (tensor - 1).abs().amax()
    assert float(spread) < 1e-3


# ------------------------------------------------------------------ any shape, any strides


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """A tensor of any dtype: a random shape, permuted, cut and stepped through."""
    dtype = draw(st.sampled_from(list(bridge.DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    raw = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(0, 256, (max(1, int(np.prod(shape))), 16))
    memory = torch.from_numpy(raw.astype(np.uint8))
    values = memory[:, 0] > 127 if dtype == torch.bool else memory.view(dtype)[:, 0]
    tensor = values[: int(np.prod(shape))].reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dim in range(len(shape)):
        tensor = tensor.narrow(dim, 0, tensor.shape[dim])[(slice(None),) * dim + (slice(None, None, draw(STEPS)),)]
    return tensor


STEPS = st.integers(1, 3)


@given(tensor=strided(), copy=st.booleans(), wide=st.booleans())
def test_any_tensor_comes_back_as_it_went(tensor, copy, wide):
    with jax.enable_x64(wide):
        array = to_jax(tensor, copy=copy)
        back = to_torch(array, copy=copy)
    assert same_bits(array, tensor)
    assert same_bits(back, tensor)
    assert back.is_contiguous()
