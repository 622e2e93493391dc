"""Items in a Python list, each tensor of them compressed."""

import builtins
import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, Fields
from fbuf.memory_plan import Share
from interop.checkpoint.layouts import check_values, node_of, saved_node
from interop.checkpoint.leaves import Reading, leaf_of, saved_leaf
from interop.checkpoint.list_checkpointers import CompressedListStorageCheckpointer
from interop.checkpoint.values import reading_errors
from interop.data.values import Node, NotKept, Value, build, flatten, is_container, leaves_of, not_dense, value_of
from interop.storages.lists import ListStorage
from interop.storages.zstd import Zstd

_OBJECT = value_of("object")  # any leaf that is no tensor


class Packed(NamedTuple):
    """What is kept of an item: its leaves, those that are tensors compressed, and what it takes to restore them."""

    leaves: list[Any]
    node: Node  # its structure
    tensors: list[dict[str, Any] | None]  # of each leaf that is a tensor, what it was


class CompressedListStorage(ListStorage):
    """A list whose tensors, alone or in tensordicts, dicts, tuples and lists, are compressed.

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

    default_checkpointer = CompressedListStorageCheckpointer
    _AROUND = 2

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

    def bytes(self) -> int:
        """The size of all that is compressed. 0 and a warning where nothing is stored."""
        if not self._storage:
            warnings.warn("bytes() of an empty storage is 0", UserWarning, stacklevel=2)
        return sum(
            leaf.nbytes
            for packed in self._storage
            for leaf, of in zip(packed.leaves, packed.tensors, strict=True)
            if of
        )

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

    def _taken(self, places: Iterable[int]) -> list[Any]:
        return [self._unpacked(self._storage[place]) for place in places]

    # ------------------------------------------------------------------ compression

    def _to_keep(self, item: Any) -> Packed:
        try:
            node, found = flatten(item, _kept_as_it_is)
        except NotKept as error:
            raise error.named("an item") from None
        leaves: list[Any] = []
        tensors: list[dict[str, Any] | None] = []
        for leaf, value in zip(leaves_of(node), found, strict=True):
            if leaf.kind == "tensor":
                tensor = value.detach() if self.device is None else value.detach().to(self.device)
                of = {"type": "tensor", "shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}
                tensors.append(of)
                leaves.append(self._compressed(tensor))
            else:
                tensors.append(None)
                leaves.append(_copied(value))
        return Packed(leaves, node, tensors)

    def _unpacked(self, packed: Packed) -> Any:
        made = [
            self._decompressed(value, of) if of else _copied(value)
            for value, of in zip(packed.leaves, packed.tensors, strict=True)
        ]
        return build(packed.node, iter(made), self.device)

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

    # ------------------------------------------------------------------ checkpoints

    def _setting(self) -> dict[str, Any]:
        return {"storage": "compressed list", "compression": "zstd" if self._zstd is not None else "of the user"}

    def _home(self) -> torch.device | None:
        return None if self.device is None or self._zstd is None else torch.device("cpu")

    def _held(self) -> list[Any]:
        return [(packed.leaves, _described(packed)) for packed in self._storage]

    def _checked(self, held: list[Any], where: str) -> list[Any]:
        with reading_errors(where):
            return [self._restored(item, where) for item in held]

    def _restored(self, item: Any, where: str) -> Packed:
        """A loaded item, on the devices of here. CheckpointCorrupt where its leaves are not those of its structure."""
        leaves, described = item
        fields, reading = Fields(described, where), Reading(where)
        node = node_of(fields.any("layout"), lambda saved, where: _leaf(saved, where, reading), where, is_container)
        check_values(node, where)
        shapes = fields.items("shapes", len(leaves))
        tensors, stand_ins = [], []
        for leaf, value, shape in zip(leaves_of(node), leaves, shapes, strict=True):
            of = None
            if leaf is not _OBJECT:
                size = torch.Size(Fields({"shape": shape}, where).wholes("shape"))
                dtype, device = getattr(torch, leaf.dtype), self.device or torch.device(leaf.device or "cpu")
                of = {"type": "tensor", "shape": size, "dtype": dtype, "device": device}
                if self._zstd is not None:
                    frame = (
                        isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim == 1 and value.is_cpu
                    )
                    if not frame or not self._zstd.makes(value.numpy(), size.numel() * dtype.itemsize):
                        raise CheckpointCorrupt(
                            f"{where}: the bytes of a tensor are not those of {dtype} of shape {shape}"
                        )
            tensors.append(of)
            stand_ins.append(value if of is None else torch.empty(of["shape"], dtype=of["dtype"], device="meta"))
        build(node, iter(stand_ins))  # an error where they do not fit together
        return Packed(leaves, node, tensors)


def _kept_as_it_is(value: Any, why: str) -> tuple[Value, Any]:
    """The leaf for an object of no known kind, or a tensor of a class of the user's."""
    if not isinstance(value, Tensor):
        return _OBJECT, value
    if not_dense(value):
        raise TypeError(f"a tensor cannot be compressed{not_dense(value)}; nothing was written")
    leaf, (plain,) = flatten(value.detach().as_subclass(Tensor), _kept_as_it_is)
    assert isinstance(leaf, Value)
    return leaf, plain


def _described(packed: Packed) -> dict[str, Any]:
    """What restores an item, as a saved tree."""
    leaves = (saved_leaf(leaf) if leaf.kind == "tensor" else None for leaf in leaves_of(packed.node))
    shapes = [list(of["shape"]) if of else None for of in packed.tensors]
    return {"layout": saved_node(packed.node, leaves), "shapes": shapes}


def _leaf(saved: Any, where: str, reading: Reading) -> Value | None:
    if saved is None:
        return _OBJECT
    fields = Fields(saved, where)
    return None if "children" in fields else leaf_of(fields, reading, frozenset(("tensor",)))


def _copied(value: Any) -> Any:
    return copy.deepcopy(value) if type(value) in (list, dict, np.ndarray) else value


def _raw(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor."""
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
