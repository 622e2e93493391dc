"""Python values as they travel between processes: tensors as buffers, which Ray keeps outside of the pickle.

Ray writes each buffer into shared memory and maps it where it is read, so that a tensor is copied once, by the sender.
Only processes of the same user exchange such values: they are unpickled.
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
    """A value taken apart: a pickle of everything but the tensors and arrays, and the memory of these.

    Tensors are dense ones of any dtype and device. Tensors of other kinds and of graphs are part of the pickle.
    """

    rest: bytes
    buffers: list[np.ndarray]

    @classmethod
    def of(cls, value: Any) -> Self:
        """Take a value apart. No copy of contiguous CPU tensors. TypeError or PicklingError for what pickle refuses."""
        out, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        _Packer(out, protocol=5, buffer_callback=buffers.append).dump(value)
        return cls(out.getvalue(), [np.asarray(each.raw()) for each in buffers])

    def value(self, copy: bool = False) -> Any:
        """The value. Its tensors share the memory of the buffers, which is read-only by contract, unless `copy`."""
        return pickle.loads(self.rest, buffers=map(bytearray, self.buffers) if copy else self.buffers)


class _Packer(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (Tensor, MemoryMappedTensor) or not _is_dense(value) or value.requires_grad:
            return super().reducer_override(value)
        content = value.as_subclass(Tensor).cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        # Bits, for NumPy lacks some of the dtypes of torch. No tensor without elements can be viewed so.
        bits = content.view(torch.uint8).numpy() if len(content) else np.empty(0, np.uint8)
        return _tensor, (bits, value.dtype, tuple(value.shape), None if value.is_cpu else str(value.device))


def _tensor(bits: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], device: str | None) -> Tensor:
    content = torch.from_numpy(bits).view(dtype) if bits.size else torch.empty(0, dtype=dtype)
    return content.reshape(shape).to(device)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)
