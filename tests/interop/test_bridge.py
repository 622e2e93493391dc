"""Tensors to JAX and back: every dtype and layout of memory, nothing shared unasked, and what cannot cross is refused."""

import contextlib
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict
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


# ------------------------------------------------------------------ memory


def base(dtype: torch.dtype, device: str) -> Tensor:
    """[6, 4, 3], all edge values in a row."""
    return edges(dtype).repeat(12).reshape(6, 4, 3).to(device)


LAYOUTS = {
    "dense": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "stepped": lambda t: t[::2, ::3, 1::2],
    "offset": lambda t: t.reshape(-1)[1:],
    "expanded": lambda t: t[:, :1].expand(6, 5, 3),
    "no dims": lambda t: t[5, 3, 2],
    "odd strides on size one": lambda t: t.as_strided((1, 4, 1), (1000, 3, 7)),
    "empty": lambda t: t[:0],
    "flipped": lambda t: t.flip(0, 2),
    "channels last": lambda t: t[None].contiguous(memory_format=torch.channels_last),
    "subclass": lambda t: t.as_subclass(Marked)[1:],
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.dtype.is_floating_point or t.dtype.is_complex),
}
if "cuda" in TORCH_DEVICES:
    LAYOUTS["pinned"] = lambda t: t.cpu().pin_memory()
SOME = [torch.bool, torch.bfloat16, torch.int64]


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
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugated_and_negated_views_cross_as_what_they_show(copy, dtype):
    tensor = torch.tensor([1 + 2j, -3 - 4j], dtype=dtype)
    conjugate, negated = tensor.conj(), tensor.conj().imag
    assert conjugate.is_conj() and negated.is_neg()
    assert np.asarray(to_jax(conjugate, copy=copy)).tolist() == [1 - 2j, -3 + 4j]
    assert np.asarray(to_jax(negated, copy=copy)).tolist() == [-2.0, 4.0]


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
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith(("parameter", "empty"))])
def test_by_default_nothing_is_shared_towards_jax(device, layout):
    memory = base(torch.float32, device)
    tensor = LAYOUTS[layout](memory)
    array = to_jax(tensor)
    before = bits(array)
    (memory if "expanded" in layout else tensor).fill_(7)
    assert bits(array) == before


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


# ------------------------------------------------------------------ what cannot cross


def quietly(make):
    """What torch calls a prototype, without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


REFUSED = {
    "uint32": (lambda: torch.ones(3, dtype=torch.uint32), "uint32.*float32"),
    "float8": (lambda: torch.ones(3).to(torch.float8_e4m3fn), "float8_e4m3fn.*float32"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "dense"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "dense"),
    "array": (lambda: np.ones(3), "ndarray"),
    "tensordict": (lambda: TensorDict({"a": torch.ones(3)}, [3]), "TensorDict"),
}


@pytest.mark.parametrize("name", REFUSED)
@both_ways
def test_what_jax_cannot_hold_is_refused_by_name(name, copy):
    make, match = REFUSED[name]
    data = quietly(make)
    with pytest.raises(TypeError, match=match):
        to_jax(data, copy=copy)


def test_a_device_that_jax_does_not_see_is_refused():
    for shape in ((3,), (0, 2)):
        with pytest.raises(RuntimeError, match="meta"):
            to_jax(torch.empty(shape, device="meta"))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: jax.random.key(0), "key"),
        (lambda: jnp.ones(3, "uint32"), "uint32"),
        (lambda: np.ones(3), "ndarray"),
        (lambda: torch.ones(3), "Tensor"),
    ],
)
def test_what_torch_cannot_hold_is_refused_by_name(make, match):
    with pytest.raises(TypeError, match=match):
        to_torch(make())


def test_arrays_that_are_traced_or_deleted_are_refused():
    for transform in (jax.jit, jax.vmap, jax.grad):
        with pytest.raises(TypeError, match="concrete"):
            transform(lambda x: to_torch(x).sum())(jnp.ones(3))
    tensor = torch.arange(3.0)  # a tensor enters a traced function as a constant
    assert jax.jit(lambda x: x + to_jax(tensor))(jnp.ones(3)).tolist() == [1, 2, 3]
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        to_torch(array)


TWO_DEVICES = """
import jax, numpy as np, torch
from jax.sharding import NamedSharding, PartitionSpec
from interop import to_torch
first, second = jax.devices("cpu")
mesh = jax.make_mesh((2,), ("x",), devices=[first, second], axis_types=(jax.sharding.AxisType.Auto,))
for spec in (PartitionSpec("x"), PartitionSpec()):
    try:
        to_torch(jax.device_put(np.arange(4.0), NamedSharding(mesh, spec)))
    except ValueError as error:
        assert "2 devices" in str(error), error
    else:
        raise AssertionError("an array over two devices crossed")
tensor = to_torch(jax.device_put(np.arange(4, dtype=np.int32), second))
assert tensor.tolist() == [0, 1, 2, 3] and tensor.device.type == "cpu"
"""


@pytest.mark.slow
def test_arrays_spread_over_devices_are_refused():
    several = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", TWO_DEVICES], check=True, env=several)


# ------------------------------------------------------------------ views that the storages take


@of_each_dtype
def test_a_numpy_view_shares_the_bits(dtype):
    tensor = edges(dtype).reshape(2, 3).t()
    view = bridge.numpy_view(tensor)
    assert np.shares_memory(view, bridge.numpy_view(tensor))
    assert view.shape == (3, 2)
    assert view.tobytes() == bits(tensor)[2]
    view[...] = 0
    assert not tensor.any()


@on_each_device
@of_each_dtype
def test_memory_that_was_handed_over_may_be_written(device, dtype):
    tensor = bridge.hand_over(to_jax(edges(dtype).to(device)))
    assert same_bits(tensor, edges(dtype))
    tensor.zero_()
    assert not tensor.cpu().any()
    assert not tensor.requires_grad
