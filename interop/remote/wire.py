"""Serialization of values between processes, with tensors in buffers outside of the pickle.

Ray writes each buffer to shared memory and maps it in the reader, so a tensor is copied once, by the sender. Values are
unpickled, so only processes of one user may exchange them.
"""

import io
import pickle
from dataclasses import dataclass
from typing import Any, Self

import cloudpickle
import numpy as np
import torch
from tensordict import MemoryMappedTensor
from torch import Tensor


@dataclass(frozen=True)
class Wire:
    """A serialized value: a pickle without its tensors and arrays, and their memory.

    Dense tensors of any dtype and device have buffers. Other tensors, and those with autograd graphs, are pickled.
    """

    rest: bytes
    buffers: list[np.ndarray]

    @classmethod
    def of(cls, value: Any) -> Self:
        """Serialize a value. Contiguous CPU tensors are not copied. TypeError or PicklingError if pickle fails."""
        out, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        _Packer(out, protocol=5, buffer_callback=buffers.append).dump(value)
        return cls(out.getvalue(), [np.asarray(each.raw()) for each in buffers])

    def value(self, copy: bool = False) -> Any:
        """Deserialize the value. Without `copy`, tensors share the buffers' memory and must not be written to."""
        return pickle.loads(self.rest, buffers=map(bytearray, self.buffers) if copy else self.buffers)


class _Packer(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (Tensor, MemoryMappedTensor) or not _is_dense(value) or value.requires_grad:
            return super().reducer_override(value)
        content = value.as_subclass(Tensor).cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        # Send raw bytes, as NumPy lacks some dtypes of torch. Empty tensors have no such view.
        bits = content.view(torch.uint8).numpy() if len(content) else np.empty(0, np.uint8)
        return _tensor, (bits, value.dtype, tuple(value.shape), None if value.is_cpu else str(value.device))


def _tensor(bits: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], device: str | None) -> Tensor:
    content = torch.from_numpy(bits).view(dtype) if bits.size else torch.empty(0, dtype=dtype)
    return content.reshape(shape).to(device)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)
