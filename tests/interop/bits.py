"""Values at the edges of every dtype that crosses, the bits of tensors and arrays, and the devices to try them on."""

import importlib.util
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor

from interop.data.bridge import DTYPES

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]

_GPU_PLUGIN = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
TORCH_DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() and _GPU_PLUGIN else [])]

on_each_device = pytest.mark.parametrize("device", TORCH_DEVICES)
of_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def edges(dtype: torch.dtype) -> Tensor:
    """Six values of a dtype: the extreme ones, both zeros, both infinities, values that a narrower type cannot hold."""
    if dtype == torch.bool:
        return torch.tensor([True, False, True, True, False, False])
    if dtype in INTEGERS:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        middle = 2**40 + 1 if dtype == torch.int64 else most // 2 + 1
        return torch.tensor([least, most, 0, 1, middle, most - 1], dtype=dtype)
    if dtype in FLOATS:
        kind = torch.finfo(dtype)
        return torch.tensor([kind.min, kind.smallest_normal, -0.0, 1 / 3, float("inf"), float("-inf")], dtype=dtype)
    parts = edges(torch.float32 if dtype == torch.complex64 else torch.float64)
    return torch.complex(parts, parts.flip(0))


def settled(tensor: Tensor) -> Tensor:
    """The values in plain dense memory on the CPU."""
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    return plain.cpu().clone(memory_format=torch.contiguous_format)


def bits(data: Any) -> tuple[np.dtype, tuple[int, ...], bytes]:
    """dtype, shape and bytes of a tensor or an array: equal only where every bit is."""
    if isinstance(data, jax.Array):
        held = np.asarray(data)
        return held.dtype, held.shape, held.tobytes()
    held = settled(data)
    return DTYPES[data.dtype], tuple(data.shape), held.reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(left: Any, right: Any) -> bool:
    return bits(left) == bits(right)
