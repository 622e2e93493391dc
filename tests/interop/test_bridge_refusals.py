"""What cannot cross between torch and JAX is refused by name; and the views that the storages take."""

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

from interop import to_jax, to_torch
from interop.data import bridge
from tests.interop.bits import bits, edges, of_each_dtype, on_each_device, same_bits


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


UNKNOWN = {
    "uint32": lambda: torch.ones(3, dtype=torch.uint32),
    "uint64": lambda: torch.ones(3, dtype=torch.uint64),
    "float8_e4m3fn": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: torch.ones(3).to(torch.float8_e5m2),
    "complex32": lambda: torch.ones(3, dtype=torch.complex32),
    "quint8": quantized,
}
NOT_DENSE = {
    "coordinates": lambda: torch.eye(3).to_sparse(),
    "rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


def quietly(make):
    """What torch calls a prototype, without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("copy", [True, False])
def test_dtypes_that_jax_or_numpy_lack_are_refused(name, copy):
    tensor = quietly(UNKNOWN[name])
    with pytest.raises(TypeError, match=f"{name}.*float32"):
        to_jax(tensor, copy=copy)


@pytest.mark.parametrize("name", NOT_DENSE)
def test_tensors_that_are_not_dense_are_refused(name):
    tensor = quietly(NOT_DENSE[name])
    with pytest.raises(TypeError, match="dense"):
        to_jax(tensor)


@pytest.mark.parametrize(
    "data",
    [np.ones(3), [1.0], 1.0, None, jnp.ones, TensorDict({"a": torch.ones(3)}, [3])],
    ids=lambda d: type(d).__name__,
)
def test_what_is_no_tensor_is_refused(data):
    with pytest.raises(TypeError, match=type(data).__name__):
        to_jax(data)


@pytest.mark.parametrize("shape", [(3,), (0, 2)])
def test_a_device_that_jax_does_not_see_is_refused(shape):
    with pytest.raises(RuntimeError, match="meta"):
        to_jax(torch.empty(shape, device="meta"))


def test_traced_arrays_are_refused():
    for transform in (jax.jit, jax.vmap, jax.grad):
        with pytest.raises(TypeError, match="concrete"):
            transform(lambda x: to_torch(x).sum())(jnp.ones(3))


def test_a_tensor_enters_a_traced_function_as_a_constant():
    tensor = torch.arange(3.0)
    assert jax.jit(lambda x: x + to_jax(tensor))(jnp.ones(3)).tolist() == [1, 2, 3]


@pytest.mark.parametrize("shape", [None, (2,), (2, 3)])
def test_random_keys_are_refused(shape):
    key = jax.random.key(0) if shape is None else jax.random.split(jax.random.key(0), shape)
    with pytest.raises(TypeError, match="key"):
        to_torch(key)


@pytest.mark.parametrize("dtype", ["uint32", "float8_e4m3fn", "int4"])
def test_array_dtypes_outside_the_table_are_refused(dtype):
    with pytest.raises(TypeError, match=dtype):
        to_torch(jnp.ones(3, dtype))


@pytest.mark.parametrize("data", [np.ones(3), torch.ones(3), 1.0, None], ids=lambda data: type(data).__name__)
def test_what_is_no_jax_array_is_refused(data):
    with pytest.raises(TypeError, match=type(data).__name__):
        to_torch(data)


def test_a_deleted_array_is_refused():
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


def test_plain_keeps_the_memory_of_what_is_plain_already():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert bridge.plain(tensor).data_ptr() == tensor.data_ptr()
    made = bridge.plain(torch.nn.Parameter(tensor).t())
    assert type(made) is torch.Tensor and made.is_contiguous() and not made.requires_grad
    assert same_bits(made, tensor.t())


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
    assert not tensor.any()
    assert not tensor.requires_grad
