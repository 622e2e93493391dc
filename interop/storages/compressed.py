"""Items in a Python list, each tensor of them compressed."""

import builtins
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
)
from torch import Tensor

from fbuf.memory_plan import Share
from interop.checkpoint import list_states
from interop.checkpoint.list_checkpointers import CompressedListStorageCheckpointer
from interop.checkpoint.plain_values import plain
from interop.data.layout import unchecked
from interop.data.pytrees import each_leaf
from interop.storages.compressed_states import Check
from interop.storages.lists import ListStorage
from interop.storages.zstd import Zstd

_NON_TENSORS = (NonTensorData, NonTensorStack)


class CompressedListStorage(ListStorage):
    """A list whose tensors, alone or in tensordicts, are compressed when written and decompressed when read.

    Nothing is lost. Each tensor is compressed by itself: large ones, as images are, gain most. Other objects are kept as
    they are. What is read is always a copy. O(bytes written or read), under the lock of the storage.

    Args:
        max_size: capacity.
        compression_fn: makes the tensor that is kept of a tensor. With `decompression_fn` in the place of Zstandard.
        decompression_fn: makes the tensor of the one that is kept and a dict with its "shape", "dtype" and "device".
        compression_level: of Zstandard, up to 22; higher is smaller and slower.
        device: where tensors are moved before they are compressed, and come back; None for where they are. What
            Zstandard makes of them is always on the CPU.
        compilable: accepted for compatibility; a list is never shared.
    """

    _default_checkpointer = CompressedListStorageCheckpointer
    _AROUND = 1

    def __init__(
        self,
        max_size: int,
        *,
        compression_fn: Callable[[Tensor], Tensor] | None = None,
        decompression_fn: Callable[[Tensor, dict[str, Any]], Tensor] | None = None,
        compression_level: int = 3,
        device: torch.device | str | None = "cpu",
        compilable: bool = False,
    ) -> None:
        super().__init__(max_size, compilable=compilable, device=device)
        for name, given in (("compression_fn", compression_fn), ("decompression_fn", decompression_fn)):
            if given is not None and not callable(given):
                raise TypeError(f"{name} must be callable, got {type(given).__name__}")
        if (compression_fn is None) != (decompression_fn is None):
            raise ValueError("compression_fn and decompression_fn undo each other: give both or none")
        self._compression_fn, self._decompression_fn = compression_fn, decompression_fn
        self.compression_level = compression_level
        self._zstd = Zstd(compression_level) if compression_fn is None else None
        self._metadata: list[dict[str, Any]] = []  # what it takes to decompress each item of `_storage`

    def bytes(self) -> int:
        """The size of all that is compressed. 0 and a warning where nothing is stored."""
        if not self._storage:
            warnings.warn("bytes() of an empty storage is 0", UserWarning, stacklevel=2)
        return sum(map(_size, self._storage, self._metadata))

    def to_bytestream(self, data_to_bytestream: Any) -> builtins.bytes:
        """The bytes of a tensor or array, in the order of the machine. TypeError for what has none."""
        if isinstance(data_to_bytestream, Tensor):
            return _raw(data_to_bytestream).tobytes()
        if isinstance(data_to_bytestream, np.ndarray) and data_to_bytestream.dtype != object:
            return data_to_bytestream.tobytes()
        if isinstance(data_to_bytestream, bytes | bytearray | memoryview):
            return bytes(data_to_bytestream)
        raise TypeError(f"only a tensor or an array has bytes, got {type(data_to_bytestream).__name__}")

    def is_live(self, index: Any) -> bool:
        return False

    # ------------------------------------------------------------------ how a list is written and read

    def _tensors_of(self, data: Any) -> list[Share]:
        return [Share("items", "compressed tensors", "cpu", None)]

    def _put(self, place: int, item: Any) -> None:
        packed, metadata = item
        if place == len(self._storage):
            self._metadata.append(metadata)
        else:
            self._metadata[place] = metadata
        super()._put(place, packed)

    def _set_slice(self, cursor: slice, items: list[Any], may_resize: bool) -> None:
        metadata = list(self._metadata)
        super()._set_slice(cursor, [packed for packed, _ in items], may_resize)
        metadata[cursor] = [of for _, of in items]
        self._metadata = metadata

    def _taken(self, places: Iterable[int]) -> list[Any]:
        return [self._unpacked(self._storage[place], self._metadata[place]) for place in places]

    def _empty(self) -> None:
        super()._empty()
        self._metadata = []

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Copies of the compressed items, "_storage", and of what it takes to restore them, "_metadata"."""
        with self._still():
            metadata = [plain(each, f"item {n}, metadata") for n, each in enumerate(self._metadata)]
            return {**list_states.state_of(self), "_metadata": metadata}

    def _setting(self) -> dict[str, Any]:
        return {"storage": "compressed list", "compression": "zstd" if self._zstd is not None else "of the user"}

    def _home(self) -> torch.device | None:
        return None if self.device is None or self._zstd is None else torch.device("cpu")

    def _held(self) -> list[Any]:
        return list(zip(self._storage, self._metadata, strict=True))

    def _checked(self, held: list[Any], where: str) -> list[Any]:
        check = Check(self._zstd, self.device, where)
        checked = [check.checked(item) for item in held]
        return [(self._moved(packed) if of["type"] == "other" else packed, of) for packed, of in checked]

    def _hold(self, held: list[Any]) -> None:
        self._storage, self._metadata = [packed for packed, _ in held], [of for _, of in held]

    # ------------------------------------------------------------------ compression

    def _to_keep(self, item: Any) -> tuple[Any, dict[str, Any]]:
        """What is kept of an item, and the metadata with which it is restored."""
        if isinstance(item, Tensor):
            tensor = item.detach() if self.device is None else item.detach().to(self.device)
            metadata = {"type": "tensor", "shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}
            return self._compressed(tensor), metadata
        if not is_tensor_collection(item) or isinstance(item, _NON_TENSORS):
            return self._moved(item), {"type": "other"}
        if isinstance(item, LazyStackedTensorDict):
            below = [self._to_keep(each) for each in item.tensordicts]
            metadata = {"type": "lazy_stack", "stack_dim": item.stack_dim, "items": [of for _, of in below]}
            return [packed for packed, _ in below], metadata
        held = item._tensordict if is_tensorclass(item) else item
        packed, fields = {}, {}
        for key, value in held.items():
            if isinstance(value, _NON_TENSORS):
                fields[key] = {"type": "non_tensor", "value": value.clone()}
            else:
                packed[key], fields[key] = self._to_keep(value)
        metadata = {"type": "tensordict", "fields": fields, "batch_size": held.batch_size}
        metadata["device"] = None if held.device is None else self.device or held.device
        if any(held.names):
            metadata["names"] = held.names
        if is_tensorclass(item):
            metadata |= {"class": type(item), "attributes": dict(item._non_tensordict)}
        return packed, metadata

    def _unpacked(self, packed: Any, metadata: dict[str, Any]) -> Any:
        kind = metadata["type"]
        if kind == "tensor":
            return self._decompressed(packed, metadata)
        if kind == "other":
            return each_leaf(packed, _copied)
        if kind == "lazy_stack":
            items = [self._unpacked(*each) for each in zip(packed, metadata["items"], strict=True)]
            return lazy_stack(items, metadata["stack_dim"])
        entries = {
            key: of["value"].clone() if of["type"] == "non_tensor" else self._unpacked(packed[key], of)
            for key, of in metadata["fields"].items()
        }
        item = unchecked(entries, metadata["batch_size"], metadata["device"], metadata.get("names"))
        return metadata["class"].from_tensordict(item, dict(metadata["attributes"])) if "class" in metadata else item

    def _compressed(self, tensor: Tensor) -> Tensor:
        if self._zstd is not None:
            return torch.frombuffer(bytearray(self._zstd.compress(_raw(tensor))), dtype=torch.uint8)
        assert self._compression_fn is not None
        return _apart(self._compression_fn(tensor), tensor, "compression_fn")

    def _decompressed(self, packed: Tensor, metadata: dict[str, Any]) -> Tensor:
        if self._zstd is None:
            assert self._decompression_fn is not None
            return _apart(self._decompression_fn(packed, metadata), packed, "decompression_fn")
        dtype, shape, device = metadata["dtype"], metadata["shape"], metadata["device"]
        raw = bytearray(self._zstd.decompress(packed.numpy()))
        if not raw:
            return torch.empty(shape, dtype=dtype, device=device)
        tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape)
        return tensor if device.type == "cpu" else tensor.to(device)


def _raw(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor. TypeError for one that is not dense."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_quantized:
        what = "without memory" if tensor.is_meta else f"of layout {tensor.layout} and dtype {tensor.dtype}"
        raise TypeError(f"only dense tensors can be compressed, got one {what}; nothing was written")
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy()


def _apart(made: Any, source: Tensor, name: str) -> Tensor:
    """What a function of the user made, in memory of its own."""
    if not isinstance(made, Tensor):
        raise TypeError(f"{name} must return a tensor, got {type(made).__name__}")
    if made.layout != torch.strided or source.layout != torch.strided:
        return made.clone() if made is source else made
    shared = made.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return made.detach().clone() if shared else made.detach()


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) or is_tensor_collection(leaf) else leaf


def _size(packed: Any, metadata: dict[str, Any]) -> int:
    if metadata["type"] == "tensor":
        return int(packed.nbytes)
    if metadata["type"] == "lazy_stack":
        return sum(map(_size, packed, metadata["items"]))
    fields = metadata.get("fields", {})
    return sum(_size(packed[key], fields[key]) for key in packed if key in fields) if fields else 0
