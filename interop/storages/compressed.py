"""Items in a Python list, each tensor of them compressed."""

import builtins
import copy
import functools
import importlib
import io
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields
from fbuf.memory_plan import Share
from interop.checkpoint.layouts import check_values, node_of, saved_node
from interop.checkpoint.state import Apply
from interop.checkpoint.values import leaf_of, reading_errors, saved_leaf
from interop.data.arguments import whole
from interop.data.values import Node, NotKept, Value, build, flatten, is_container, leaves_of, not_dense
from interop.storages.checkpointers import CompressedListStorageCheckpointer
from interop.storages.contents import Contents
from interop.storages.lists import ListContents, ListStorage

_OBJECT = Value("object")  # any leaf that is no tensor
_LIBRARIES = ("compression.zstd", "zstandard") if sys.version_info >= (3, 14) else ("zstandard",)
_HIGHEST = 22
_PLAIN = (type(None), bool, int, float, str)  # what may be beside the data in the result of a `compression_fn`
_WINDOW = 1 << 27  # bytes of memory that decompression takes at most: what the highest level uses
_BLOCK = 1 << 20


class Zstd:
    """Zstandard, of Python's own library or of the extra `compression`; for one thread at a time.

    ImportError where no library is installed, ValueError for a level above 22.
    """

    def __init__(self, level: int) -> None:
        self.level = whole("compression_level", level, least=-(1 << 17))
        if self.level > _HIGHEST:
            raise ValueError(f"compression_level must be at most {_HIGHEST}, got {level}")
        library = _library()
        if library.__name__ == "zstandard":
            self.compress = library.ZstdCompressor(level=self.level).compress
            self.decompress = library.ZstdDecompressor().decompress
        else:
            self.compress, self.decompress = functools.partial(library.compress, level=self.level), library.decompress

    def makes(self, data: np.ndarray, size: int) -> bool:
        """Whether bytes decompress to `size` bytes. Memory: a block and the window of the compression, whatever they say."""
        try:
            with _reader(data) as reader:
                left = size
                while left >= 0 and (block := reader.read(min(_BLOCK, left + 1))):
                    left -= len(block)
            return left == 0
        except Exception:  # each library has its own error for damaged frames
            return False

    def __reduce__(self) -> Any:
        return type(self), (self.level,)


def _reader(data: np.ndarray) -> Any:
    """A file of the decompressed bytes."""
    library = _library()
    if library.__name__ == "zstandard":
        return library.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(data)
    options = {library.DecompressionParameter.window_log_max: _WINDOW.bit_length() - 1}
    return library.ZstdFile(io.BytesIO(data.tobytes()), options=options)


def _library() -> Any:
    for name in _LIBRARIES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError(
        "compression needs the package zstandard: install it with `pip install 'fbuf[compression]'`, or give a "
        "compression_fn and a decompression_fn"
    )


class Packed(NamedTuple):
    """A stored item: its structure, its leaves, of which tensors are compressed, and the shapes of the tensors."""

    node: Node
    leaves: list[Any]
    shapes: list[torch.Size | None]


class CompressedListStorage(ListStorage):
    """A list that compresses tensors, alone or in tensordicts, dicts, tuples and lists, without loss.

    Each tensor is compressed by itself: large tensors, such as images, gain most. Other objects are stored as they are.
    Reads are copies. O(bytes written or read), under the lock of the storage.

    Args:
        max_size: capacity.
        compression_fn: compresses a tensor into bytes, a tensor or a NumPy array, or tuples, lists and dicts of these and of
            plain values. Replaces Zstandard, together with `decompression_fn`.
        decompression_fn: restores a tensor from what `compression_fn` returned and a dict with the "shape", "dtype" and
            "device" of the tensor. It may return a NumPy array, or the bytes of the tensor in native order.
        compression_level: of Zstandard, up to 22; higher is smaller and slower.
        device: where tensors are moved before compression, and where reads put them; None for where they are.
            The bytes of Zstandard are always on the CPU.
        compilable: accepted for compatibility; a list is never shared.
    """

    default_checkpointer = CompressedListStorageCheckpointer
    _kind = "compressed list"

    def __init__(
        self,
        max_size: int,
        *,
        compression_fn: Callable[[Tensor], Any] | None = None,
        decompression_fn: Callable[[Any, dict[str, Any]], Any] | None = None,
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
        self.compression_level = whole("compression_level", compression_level, least=-(1 << 17))
        self._zstd = Zstd(self.compression_level) if compression_fn is None else None

    def bytes(self) -> int:
        """The size of all compressed tensors. 0 and a warning for an empty storage."""
        if not self._storage:
            warnings.warn("bytes() of an empty storage is 0", UserWarning, stacklevel=2)
        kept = (pair for packed in self._storage for pair in zip(packed.leaves, packed.shapes, strict=True))
        return sum(_size_of(leaf) for leaf, shape in kept if shape is not None)

    def _new_contents(self) -> Contents:
        return _CompressedContents(self, super()._new_contents().tracks_writes)

    def to_bytestream(self, data_to_bytestream: Any) -> builtins.bytes:
        """The bytes of a tensor or array in native order. TypeError for other data."""
        if isinstance(data_to_bytestream, Tensor):
            return _raw(data_to_bytestream).tobytes()
        if isinstance(data_to_bytestream, np.ndarray) and data_to_bytestream.dtype != object:
            return data_to_bytestream.tobytes()
        raise TypeError(f"only a tensor or an array has bytes, got {type(data_to_bytestream).__name__}")

    def is_live(self, index: Any) -> bool:
        return False

    # ------------------------------------------------------------------ hooks of ListStorage

    def _tensors_of(self, data: Any) -> list[Share]:
        return [Share("items", "compressed tensors", "cpu", None)]

    def _taken(self, places: Iterable[int]) -> list[Any]:
        return [self._unpacked(self._storage[place]) for place in places]

    # ------------------------------------------------------------------ compression

    def _to_keep(self, item: Any) -> Packed:
        try:
            node, leaves = flatten(item, _kept_as_it_is)
        except NotKept as error:
            raise error.named("an item") from None
        shapes: list[torch.Size | None] = []
        for place, (leaf, value) in enumerate(zip(leaves_of(node), leaves, strict=True)):
            if leaf.kind == "tensor":
                tensor = value.detach() if self.device is None else value.detach().to(self.device)
                leaves[place] = self._compressed(tensor)
            else:
                leaves[place] = _copied(value)
            shapes.append(value.shape if leaf.kind == "tensor" else None)
        return Packed(node, leaves, shapes)

    def _unpacked(self, packed: Packed) -> Any:
        made = [
            _copied(value) if shape is None else self._decompressed(value, self._metadata(leaf, shape))
            for leaf, value, shape in zip(leaves_of(packed.node), packed.leaves, packed.shapes, strict=True)
        ]
        return build(packed.node, iter(made), self.device)

    def _metadata(self, leaf: Value, shape: torch.Size) -> dict[str, Any]:
        """The argument of `decompression_fn` about the original tensor."""
        device = self.device or torch.device(leaf.device or "cpu")
        return {"type": "tensor", "shape": shape, "dtype": getattr(torch, leaf.dtype), "device": device}

    def _compressed(self, tensor: Tensor) -> Any:
        if self._zstd is not None:
            return torch.frombuffer(bytearray(self._zstd.compress(_raw(tensor))), dtype=torch.uint8)
        assert self._compression_fn is not None
        return _owned(self._compression_fn(tensor))

    def _decompressed(self, packed: Any, metadata: dict[str, Any]) -> Tensor:
        if self._zstd is None:
            assert self._decompression_fn is not None
            return _as_tensor(self._decompression_fn(packed, metadata), metadata)
        dtype, shape, device = metadata["dtype"], metadata["shape"], metadata["device"]
        raw = bytearray(self._zstd.decompress(packed.numpy()))
        if not raw:
            return torch.empty(shape, dtype=dtype, device=device)
        tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape)
        return tensor if device.type == "cpu" else tensor.to(device)

    # ------------------------------------------------------------------ checkpoints

    def _setting(self) -> dict[str, Any]:
        return {"compression": "zstd" if self._zstd is not None else "of the user"}

    def _home(self) -> torch.device | None:
        return None if self._zstd is None else torch.device("cpu")

    def _held(self) -> list[Any]:
        return [(packed.leaves, _described(packed)) for packed in self._storage]

    def _loaded(self, held: list[Any], where: str) -> list[Any]:
        if len(held) > self.max_size:
            raise CheckpointMismatch(f"{where} has {len(held)} items, the storage a capacity of {self.max_size}")
        with reading_errors(where):
            return [self._restored(leaves, described, where) for leaves, described in held]

    def _restored(self, leaves: list[Any], described: Any, where: str) -> Packed:
        """A loaded item. CheckpointCorrupt if its leaves do not fit its structure."""
        fields = Fields(described, where)
        node = node_of(fields.any("layout"), _leaf, where, is_container)
        check_values(node, where)
        shapes, stand_ins = list[torch.Size | None](), []
        for leaf, value, saved in zip(leaves_of(node), leaves, fields.items("shapes", len(leaves)), strict=True):
            shape = None if leaf == _OBJECT else torch.Size(Fields({"shape": saved}, where).wholes("shape"))
            stand_ins.append(value)
            shapes.append(shape)
            if shape is not None:
                stand_ins[-1] = torch.empty(shape, dtype=getattr(torch, leaf.dtype), device="meta")
                if self._zstd is not None and not _makes(self._zstd, value, stand_ins[-1].nbytes):
                    raise CheckpointCorrupt(f"{where}: the bytes of a tensor are not those of {leaf.dtype} {saved}")
        build(node, iter(stand_ins))  # an error where they do not fit together
        return Packed(node, leaves, shapes)

    def state_dict(self) -> dict[str, Any]:
        """As of a list, with the compressed leaves of each item; "_metadata" describes the items."""
        state = super().state_dict()
        held = state["_storage"]
        return {**state, "_storage": [each[0] for each in held], "_metadata": [each[1] for each in held]}

    def _with_state_dict(self, given: dict[str, Any]) -> Apply:
        where = f"the state_dict of a {type(self).__name__}"
        fields = Fields(given, where)
        if "_metadata" not in fields:
            raise CheckpointMismatch(f"{where}: it is the state of something else, it has no '_metadata'")
        leaves = fields.items("_storage")
        held = zip(leaves, fields.items("_metadata", len(leaves)), strict=True)
        rest = {name: value for name, value in given.items() if name != "_metadata"}
        return super()._with_state_dict({**rest, "_storage": list(held)})


class _CompressedContents(ListContents):
    """The items of a compressed list."""

    @property
    def compressed_bytes(self) -> int:
        storage = self._storage
        assert isinstance(storage, CompressedListStorage)
        return storage.bytes() if len(storage) else 0


def _makes(zstd: Zstd, value: Any, size: int) -> bool:
    """Whether a loaded leaf is compressed bytes that decompress to `size` bytes."""
    is_bytes = isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim == 1 and value.is_cpu
    return is_bytes and zstd.makes(value.numpy(), size)


def _kept_as_it_is(value: Any, why: str) -> tuple[Value, Any]:
    """The leaf for an object of unknown kind, or for a tensor of a user's subclass."""
    if not isinstance(value, Tensor):
        return _OBJECT, value
    if not_dense(value):
        raise TypeError(f"a tensor cannot be compressed{not_dense(value)}; nothing was written")
    leaf, (plain,) = flatten(value.detach().as_subclass(Tensor), _kept_as_it_is)
    assert isinstance(leaf, Value)
    return leaf, plain


def _described(packed: Packed) -> dict[str, Any]:
    """The structure and shapes of an item as a saved tree."""
    leaves = (saved_leaf(leaf) if leaf.kind == "tensor" else None for leaf in leaves_of(packed.node))
    shapes = [None if shape is None else list(shape) for shape in packed.shapes]
    return {"layout": saved_node(packed.node, leaves), "shapes": shapes}


def _leaf(saved: Any, where: str) -> Value | None:
    if saved is None:
        return _OBJECT
    fields = Fields(saved, where)
    if "children" in fields:
        return None
    if fields.text("kind") != "tensor":
        raise fields.wrong("kind", "'tensor'", fields.any("kind"))
    return leaf_of(fields)


def _copied(value: Any) -> Any:
    return copy.deepcopy(value) if type(value) in (list, dict, np.ndarray) else value


def _raw(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy()


def _owned(made: Any) -> Any:
    """A copy of the result of `compression_fn`, which may share memory with its argument. TypeError for other kinds."""
    if isinstance(made, Tensor):
        return made.detach().clone()
    if isinstance(made, np.ndarray | np.generic) and made.dtype != object:
        return made.copy()
    if isinstance(made, builtins.bytes | bytearray | memoryview):
        return builtins.bytes(made)
    if type(made) in (tuple, list):
        return type(made)(_owned(each) for each in made)
    if type(made) is dict:
        return {key: _owned(each) for key, each in made.items()}
    if type(made) in _PLAIN:
        return made
    raise TypeError(
        f"compression_fn must return bytes, a tensor or an array, or tuples, lists and dicts of these, got "
        f"{type(made).__name__}"
    )


def _as_tensor(made: object, metadata: dict[str, Any]) -> Tensor:
    """A copy of the result of `decompression_fn` as a tensor. TypeError or ValueError where it is none."""
    if isinstance(made, Tensor):
        return made.detach().clone()
    if isinstance(made, np.ndarray | np.generic) and made.dtype != object:
        return torch.from_numpy(np.array(made)).to(metadata["device"])
    if not isinstance(made, builtins.bytes | bytearray | memoryview):
        raise TypeError(f"decompression_fn must return a tensor, an array or bytes, got {type(made).__name__}")
    raw, dtype, shape = bytearray(made), metadata["dtype"], metadata["shape"]
    if len(raw) != shape.numel() * dtype.itemsize:
        raise ValueError(
            f"decompression_fn returned {len(raw)} bytes, a tensor of {dtype} {list(shape)} has "
            f"{shape.numel() * dtype.itemsize}"
        )
    tensor = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu")
    return tensor.view(dtype).reshape(shape).to(metadata["device"])


def _size_of(packed: object) -> int:
    """The bytes of compressed data."""
    if isinstance(packed, tuple | list):
        return sum(map(_size_of, packed))
    if isinstance(packed, dict):
        return sum(map(_size_of, packed.values()))
    size: int = len(packed) if isinstance(packed, builtins.bytes | str) else getattr(packed, "nbytes", 0)
    return size
