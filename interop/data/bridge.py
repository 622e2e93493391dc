"""Tensors from torch to JAX and back over DLPack.

Values and dtypes cross exactly, also where JAX's 64-bit types are off; that setting is not changed for the caller.
`to_jax` and `to_torch` copy by default. On a GPU, DLPack orders the streams: work that was queued before the call is
finished before the data is read.
"""

import contextlib
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from interop.data import settings

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
FROM_NUMPY = {torch_dtype: dtype for dtype, torch_dtype in DTYPES.items()}
_PLATFORMS = {"cpu": "cpu", "cuda": "gpu"}  # torch's name of a kind of device, and JAX's
_HAS_ACCELERATOR = torch.cuda.is_available()
_NOTHING = contextlib.nullcontext()


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
    both = contextlib.ExitStack()
    both.enter_context(jax.enable_x64(True))
    both.enter_context(place)
    return both


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


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. From the host to a GPU without waiting for what the GPU is doing.

    CUDA copies memory that is not pinned to a buffer of its own before the call returns. Pinned memory it reads later, when
    the caller may have changed it: there the host waits.
    """
    return tensor.to(device, non_blocking=tensor.is_cpu and device.type == "cuda" and not tensor.is_pinned())


def lent(tensors: Sequence[Tensor]) -> list[jax.Array]:
    """Tensors of one device as arrays in the same memory where that is dense; else in memory of their own.

    The caller keeps them unchanged until the program that reads the arrays has begun, and passes one of its results to
    `followed`. Errors as of `to_jax`.
    """
    dense = [plain(tensor) for tensor in tensors]
    with exact():
        return [_shared(leaf) for leaf in dense]


def followed(result: jax.Array) -> None:
    """Have torch wait for the program of this result, so that it does not write to what the program reads.

    On a GPU the next work of torch's current stream waits, the host does not. The CPU has no streams: there the host waits.
    """
    if next(iter(result.devices())).platform == "cpu":
        result.block_until_ready()
    else:
        torch.from_dlpack(result)


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
