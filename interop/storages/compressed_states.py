"""Whether what was loaded is what a compressed list keeps: each item, and the metadata with which it is restored."""

from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, is_tensorclass
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt
from interop.storages.zstd import Zstd

_TENSOR = {"type", "shape", "dtype", "device"}
_HELD = {"type", "fields", "batch_size", "device"}
_MOST_DEEP = 64


class Check:
    """Checks loaded items.

    Args:
        zstd: what decompresses them; None where a function of the user's does.
        device: where tensors come back; None for where they were.
        where: what the items are, for messages.
    """

    def __init__(self, zstd: Zstd | None, device: torch.device | None, where: str) -> None:
        self._zstd, self._device, self._where = zstd, device, where

    def checked(self, item: Any) -> tuple[Any, dict[str, Any]]:
        """An item and its metadata, with the devices that it has here; CheckpointCorrupt where they do not agree."""
        if not isinstance(item, tuple) or len(item) != 2:
            raise self._wrong("an item without its metadata")
        packed, metadata = item
        self._check(packed, metadata, 0)
        return packed, metadata

    def _wrong(self, what: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self._where}: {what}")

    def _check(self, packed: Any, metadata: Any, depth: int) -> tuple[int, ...]:
        """The shape of a tensor, or the batch dims of a tensordict."""
        kind = metadata.get("type") if isinstance(metadata, dict) else None
        if depth > _MOST_DEEP:
            raise self._wrong("an item is nested too deeply")
        if kind == "tensor":
            return self._tensor(packed, metadata)
        if kind == "tensordict":
            return self._tensordict(packed, metadata, depth)
        if kind == "lazy_stack":
            return self._lazy_stack(packed, metadata, depth)
        if kind != "other" or depth or len(metadata) != 1:
            raise self._wrong("the metadata of an item is not known")
        return ()

    def _tensor(self, packed: Any, metadata: dict[str, Any]) -> tuple[int, ...]:
        shape: Any = metadata.get("shape")
        dtype = metadata.get("dtype")
        fits = metadata.keys() == _TENSOR and isinstance(packed, Tensor) and self._is_shape(shape)
        if not fits or not isinstance(dtype, torch.dtype) or not isinstance(metadata["device"], torch.device):
            raise self._wrong("the metadata of a tensor is incomplete")
        if self._zstd is not None:
            if packed.dtype != torch.uint8 or packed.ndim != 1 or not packed.is_cpu:
                raise self._wrong("a compressed tensor is not made of bytes")
            if not self._zstd.makes(packed.numpy(), shape.numel() * dtype.itemsize):
                raise self._wrong(f"the bytes of a tensor are not those of {dtype} of shape {list(shape)}")
        if self._device is not None:
            metadata["device"] = self._device
        return tuple(shape)

    def _tensordict(self, packed: Any, metadata: dict[str, Any], depth: int) -> tuple[int, ...]:
        batch: Any = metadata.get("batch_size")
        fields, device = metadata.get("fields"), metadata.get("device")
        if not isinstance(packed, dict) or not isinstance(fields, dict) or not self._is_shape(batch):
            raise self._wrong("the metadata of a tensordict is incomplete")
        if device is not None and not isinstance(device, torch.device):
            raise self._wrong("the device of a tensordict is none")
        self._extras(fields, metadata, len(batch))
        kept = {key for key, of in fields.items() if not (isinstance(of, dict) and of.get("type") == "non_tensor")}
        if kept != packed.keys():
            raise self._wrong("the entries of a tensordict are not those of its metadata")
        for key, of in fields.items():
            if key in kept:
                shape = self._check(packed[key], of, depth + 1)
            elif isinstance(of.get("value"), NonTensorData | NonTensorStack):
                shape = tuple(of["value"].batch_size)
            else:
                raise self._wrong("an entry of a tensordict is no non-tensor")
            if of.get("type") == "other" or shape[: len(batch)] != tuple(batch):
                raise self._wrong(f"the entry {key!r} of a tensordict does not have its batch dims")
        if device is not None and self._device is not None:
            metadata["device"] = self._device
        return tuple(batch)

    def _extras(self, fields: dict[str, Any], metadata: dict[str, Any], dims: int) -> None:
        """Check the names of dims and the class of a tensordict, where it has them."""
        names, kind = metadata.get("names", [None] * dims), metadata.get("class")
        expected: Any = getattr(kind, "__expected_keys__", ())
        if not isinstance(names, list) or len(names) != dims or not all(isinstance(n, str | None) for n in names):
            raise self._wrong("the names of dims are none")
        if not metadata.keys() - _HELD <= {"names", "class", "attributes"} or "type" not in metadata:
            raise self._wrong("the metadata of a tensordict is not known")
        attributes = metadata.get("attributes", {})
        if kind is None and "attributes" not in metadata:
            return
        if not isinstance(kind, type) or not is_tensorclass(kind) or not isinstance(attributes, dict):
            raise self._wrong("the class of an item is no tensorclass")
        if not fields.keys() | attributes.keys() <= set(expected):
            raise self._wrong(f"the fields of {kind.__qualname__} are others")

    def _lazy_stack(self, packed: Any, metadata: dict[str, Any], depth: int) -> tuple[int, ...]:
        dim, below = metadata.get("stack_dim"), metadata.get("items")
        if not isinstance(packed, list) or not isinstance(below, list) or len(packed) != len(below) or not below:
            raise self._wrong("the metadata of a stack is incomplete")
        if any(not isinstance(of, dict) or of.get("type") not in ("tensordict", "lazy_stack") for of in below):
            raise self._wrong("a stack holds something else than tensordicts")
        shapes = {self._check(each, of, depth + 1) for each, of in zip(packed, below, strict=True)}
        shape = shapes.pop()
        if shapes or type(dim) is not int or not 0 <= dim <= len(shape):
            raise self._wrong("the tensordicts of a stack are unlike")
        return (*shape[:dim], len(below), *shape[dim:])

    @staticmethod
    def _is_shape(shape: Any) -> bool:
        return isinstance(shape, torch.Size) and all(size >= 0 for size in shape)
