"""Tensors from torch to JAX and back over DLPack.

Values and dtypes cross exactly, also where JAX's 64-bit types are off; that setting is not changed for the caller.
`to_jax` and `to_torch` copy by default. On a GPU, DLPack orders the streams: work that was queued before the call is
finished before the data is read.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from interop.data import settings

try:  # see `Crossing`
    from jaxlib._jax import buffer_to_dlpack_managed_tensor as _out  # type: ignore[import-not-found]
    from jaxlib._jax import dlpack_managed_tensor_to_buffer as _in
    from torch._C import _from_dlpack as _tensor_of
    from torch._C import _to_dlpack as _capsule_of

    _are_direct = True
except ImportError:
    _are_direct = False

DTYPES: dict[torch.dtype, np.dtype] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.uint16: np.dtype(np.uint16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
_DTYPES = frozenset(DTYPES)
FROM_NUMPY = {torch_dtype: dtype for dtype, torch_dtype in DTYPES.items()}
_PLATFORMS = {"cpu": "cpu", "cuda": "gpu"}  # torch's name of a kind of device, and JAX's
_HAS_ACCELERATOR = torch.cuda.is_available()
_NOTHING = contextlib.nullcontext()
_dtype_of, _layout_of, _has_graph = attrgetter("dtype"), attrgetter("layout"), attrgetter("requires_grad")


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which the device is JAX's default device."""
    settings.start_jax()
    if jax.default_backend() == _PLATFORMS.get(device.type):
        return _NOTHING
    return jax.default_device(jax_device(device))


def exact(device: torch.device | None = None) -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX keeps int64 and float64, which it narrows outside, and in which the device is its default."""
    settings.start_jax()
    if device is None or (place := on(device)) is _NOTHING:
        return jax.enable_x64(True)
    return _both(place)


@contextlib.contextmanager
def _both(place: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with jax.enable_x64(True), place:
        yield


def to_jax(tensor: Tensor, *, copy: bool = True) -> jax.Array:
    """The tensor as a JAX array of the same shape and dtype on the same device.

    The graph of a tensor that requires grad is left behind. With `copy=False` dense memory, on the CPU aligned to 64
    bytes and not pinned, is shared: the tensor must not be written while the array is in use. 64-bit types are exact,
    but operations narrow them unless JAX's 64-bit types are on (`jax.enable_x64`). TypeError for a dtype outside
    `DTYPES` or a tensor that is not strided, RuntimeError for a device that JAX does not see.
    """
    dense = plain(tensor)
    fresh = dense.data_ptr() != tensor.data_ptr() or dense.numel() == 0
    if copy and not fresh:
        dense = dense.clone(memory_format=torch.contiguous_format)
    with exact():
        return _shared(dense)


def _shared(dense: Tensor) -> jax.Array:
    """An array in the memory of a dense tensor, in the context `exact`; pinned memory is copied."""
    if _HAS_ACCELERATOR and dense.is_pinned():  # JAX takes it to be on the GPU
        dense = dense.clone(memory_format=torch.contiguous_format)
    device = jax_device(dense.device)
    if device is None:
        raise RuntimeError(f"JAX does not see the device {dense.device}: move the tensor to the CPU first")
    if dense.numel() == 0:
        return jnp.empty(tuple(dense.shape), DTYPES[dense.dtype], device=device)
    return jax.dlpack.from_dlpack(dense)


class Crossing:
    """The way of tensors to JAX and of arrays to torch, in the same memory, on a device that both see. See `crossing`.

    It uses C++ functions of jaxlib and torch, which take a tenth of the time of the public ones and are no part of their
    interfaces. Where they are missing or do not work, it uses the public ones.

    Attributes:
        place: JAX's name for the device.
    """

    def __init__(self, place: jax.Device) -> None:
        self.place = place
        self._on_cpu = place.platform == "cpu"
        self._is_direct = self._works()

    def _works(self) -> bool:
        """Whether the C++ functions do what they are used for."""
        if not _are_direct:
            return False
        given = torch.arange(16, device=torch_device(self.place))
        self._is_direct = True
        try:
            [array] = self.lend([given])
            [tensor] = self.take([array])
            return array.dtype == np.int64 and array.devices() == {self.place} and torch.equal(tensor, given)
        except Exception:  # of another version: anything
            return False

    def lend(self, tensors: Sequence[Tensor]) -> list[jax.Array]:
        """Tensors of this device as arrays in the same memory where that is dense; else in memory of their own.

        The caller keeps them unchanged until the program that reads the arrays has begun, and passes one of its results to
        `follow`. Errors as of `to_jax`.
        """
        if not _are_dense(tensors):
            tensors = [plain(tensor) for tensor in tensors]
        pinned = _HAS_ACCELERATOR and any(map(Tensor.is_pinned, tensors))
        if pinned or not self._is_direct or not all(map(Tensor.numel, tensors)):
            with exact():
                return [_shared(each) for each in tensors]
        stream = None if self._on_cpu else self._awaited_by_jax()
        return list(map(_in, map(_capsule_of, tensors), repeat(self.place), repeat(stream)))

    def _awaited_by_jax(self) -> int:
        """The stream on which JAX reads memory of others. It waits for what torch's stream does now."""
        stream: int = self.place.get_stream_for_external_ready_events()
        device = torch_device(self.place)
        torch.cuda.ExternalStream(stream, device).wait_stream(torch.cuda.current_stream(device))
        return stream

    def take(self, arrays: Sequence[jax.Array]) -> list[Tensor]:
        """Writable tensors in the memory of fresh arrays of this device that nothing else holds.

        On a GPU torch's stream waits for them, the host does not.
        """
        if not self._is_direct:
            return [torch.from_dlpack(array) for array in arrays]
        stream = None if self._on_cpu else torch.cuda.current_stream(torch_device(self.place)).cuda_stream or 1
        return list(map(_tensor_of, map(_out, arrays, repeat(stream))))

    def follow(self, result: jax.Array) -> None:
        """Have torch wait for the program of this result, so that it does not write to what the program reads.

        On a GPU the next work of torch's current stream waits, the host does not. The CPU has no streams: there the host
        waits.
        """
        if self._on_cpu:
            result.block_until_ready()
        else:
            self.take([result])


def crossing(device: torch.device) -> Crossing:
    """The way between torch and JAX on a device. RuntimeError for one that JAX does not see."""
    place = jax_device(device)
    if place is None:
        raise RuntimeError(f"JAX does not see the device {device}")
    return _crossing(place)


@functools.cache
def _crossing(place: jax.Device) -> Crossing:
    return Crossing(place)


def _are_dense(tensors: Sequence[Tensor]) -> bool:
    """Whether `plain` would return these tensors as they are. Without a step of Python for each."""
    return (
        {*map(type, tensors)} <= {Tensor}
        and {*map(_layout_of, tensors)} <= {torch.strided}
        and {*map(_dtype_of, tensors)} <= _DTYPES
        and all(map(Tensor.is_contiguous, tensors))
        and not any(chain(map(_has_graph, tensors), map(Tensor.is_neg, tensors), map(Tensor.is_conj, tensors)))
    )


def to_torch(array: jax.Array, *, copy: bool = True) -> Tensor:
    """The array as a tensor of the same shape and dtype on the same device.

    With `copy=False` the memory is shared: writing to the tensor then changes an array that JAX takes to be constant.
    TypeError for a traced array, a PRNG key, or a dtype outside `DTYPES`; ValueError for one spread over devices.
    """
    if isinstance(array, jax.core.Tracer):
        raise TypeError("to_torch needs a concrete array: inside jax.jit there is none yet, call it on the result")
    if not isinstance(array, jax.Array):
        raise TypeError(f"to_torch takes a jax.Array, got {type(array).__name__}")
    if array.dtype not in FROM_NUMPY:
        raise TypeError(f"{array.dtype} does not cross to torch; {_dtypes_text()}")
    if len(array.devices()) != 1:
        raise ValueError(f"the array is spread over {len(array.devices())} devices: gather it on one first")
    tensor = torch.from_dlpack(array)
    return tensor.clone() if copy else tensor


def plain(tensor: Tensor) -> Tensor:
    """The values as a dense, ordinary tensor without a graph; without a copy where it is one already."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{tensor.dtype} cannot cross to JAX; {_dtypes_text()}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(f"only dense tensors cross to JAX, got layout {tensor.layout}: call to_dense() first")
    tensor = tensor.detach()
    if type(tensor) is not Tensor:
        tensor = tensor.as_subclass(Tensor)
    return tensor.resolve_conj().resolve_neg().contiguous()


def numpy_view(tensor: Tensor) -> np.ndarray:
    """A NumPy view of a CPU tensor; bfloat16 appears as int16 of the same bits."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def hand_over(array: jax.Array, dtype: torch.dtype | None = None) -> Tensor:
    """A writable tensor in the memory of a fresh array that nothing else holds, cast to `dtype`."""
    if _HAS_ACCELERATOR and next(iter(array.devices())).platform != "cpu":
        tensor = torch.from_dlpack(array)
        return tensor if dtype is None else tensor.to(dtype)
    view = np.asarray(array)  # no copy; a fifth of the time of DLPack
    if dtype is not None:
        return torch.from_numpy(view.astype(DTYPES[dtype]))
    if view.dtype == DTYPES[torch.bfloat16]:
        return torch.from_numpy(view.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(view)


def jax_device(device: torch.device) -> jax.Device | None:
    """JAX's name for a torch device; None where JAX does not see it."""
    index: int | None = device.index
    if index is None and device.type == "cuda":
        index = torch.cuda.current_device() if _HAS_ACCELERATOR else 0
    return _jax_device(device.type, index)


def torch_device(device: jax.Device) -> torch.device:
    """Torch's name for a JAX device. RuntimeError for one that torch does not see."""
    kind = next((kind for kind, platform in _PLATFORMS.items() if platform == device.platform), None)
    if kind == "cpu":
        return torch.device(kind)
    if kind is None or device.local_hardware_id >= torch.cuda.device_count():
        raise RuntimeError(f"torch does not see the device {device}, only {torch.cuda.device_count()} CUDA devices")
    return torch.device(kind, device.local_hardware_id)


@functools.cache
def _jax_device(kind: str, index: int | None) -> jax.Device | None:
    if kind not in _PLATFORMS:
        return None
    settings.start_jax()
    try:
        devices = jax.local_devices(backend=_PLATFORMS[kind])
    except RuntimeError:  # no such backend
        return None
    if kind == "cpu":
        return devices[0]
    return next((device for device in devices if device.local_hardware_id in (index, None)), None)


def _dtypes_text() -> str:
    return "these can: " + ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


with warnings.catch_warnings():  # torch warns once of read-only arrays, as JAX's are: let it do so now, unseen
    warnings.simplefilter("ignore")
    torch.from_numpy(np.broadcast_to(0.0, 1))
