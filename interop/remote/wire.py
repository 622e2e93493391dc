"""Python values as they travel between processes: tensors as NumPy arrays, which Ray keeps outside of the pickle.

Ray writes the buffer of each array into shared memory and maps it where it is read, so that a tensor is copied once, by
the sender. Only processes of the same user exchange such values: they are unpickled.
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

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # by bytes of an element
_NUMPY = {
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}


@dataclass(frozen=True)
class Wire:
    """A value taken apart: a pickle of everything but the tensors and arrays, and these as NumPy arrays.

    Tensors are dense ones on any device; those of dtypes that NumPy lacks travel as integers of the same bits. Tensors of
    other kinds and of graphs are part of the pickle.
    """

    rest: bytes
    arrays: list[np.ndarray]

    @classmethod
    def of(cls, value: Any) -> Self:
        """Take a value apart. No copy of contiguous CPU tensors. TypeError or PicklingError for what pickle refuses."""
        out = io.BytesIO()
        packer = _Packer(out)
        packer.dump(value)
        return cls(out.getvalue(), packer.arrays)

    def value(self, copy: bool = False) -> Any:
        """The value. Its tensors share the memory of the arrays, which is read-only by contract, unless `copy`."""
        return _Unpacker(io.BytesIO(self.rest), self.arrays, copy).load()


class _Packer(cloudpickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=5)
        self.arrays: list[np.ndarray] = []

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray and not value.dtype.hasobject:
            self.arrays.append(value)
            return "array", None, None
        if kind not in (Tensor, MemoryMappedTensor) or not _is_plain(value):
            return None
        device = None if value.is_cpu else str(value.device)
        value = value.as_subclass(Tensor).cpu().resolve_conj().resolve_neg().contiguous()
        name = None
        if value.dtype not in _NUMPY:
            name, value = str(value.dtype).removeprefix("torch."), value.view(_BITS[value.element_size()])
        self.arrays.append(value.numpy())
        return "tensor", name, device


class _Unpacker(pickle.Unpickler):
    def __init__(self, content: io.BytesIO, arrays: list[np.ndarray], copy: bool) -> None:
        super().__init__(content)
        self._arrays, self._copy = iter(arrays), copy

    def persistent_load(self, described: Any) -> Any:
        kind, name, device = described
        array = next(self._arrays)
        array = array.copy() if self._copy else array
        if kind == "array":
            return array
        tensor = torch.from_numpy(array)
        tensor = tensor if name is None else tensor.view(getattr(torch, name))
        return tensor if device is None else tensor.to(device)


def _is_plain(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)
    return dense and not tensor.requires_grad
