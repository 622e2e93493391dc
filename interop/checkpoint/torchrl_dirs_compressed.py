"""What torchrl's storage of compressed items wrote: the items, decompressed."""

import zlib
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Fields
from fbuf.checkpoint.arrays import row_bytes
from interop.checkpoint.torchrl_dirs_entries import Held, Stack, read_entries
from interop.checkpoint.torchrl_dirs_files import Folder, Tensor, dtype_of, shape_of
from interop.storages.zstd import _library as zstd_library

_METADATA, _INDICES, _DATA = "metadata.json", "data_indices.json", "compressed_data"
_ZSTD = b"\x28\xb5\x2f\xfd"  # begins what it compressed
_DEPTH = 32


def read_items(folder: Folder, storage: Any) -> list[Any]:
    """The items by slot. CheckpointMismatch for a slot that was skipped, and for what pickle alone can read."""
    where = folder.where(_METADATA)
    if not folder.kind(_METADATA) and folder.kind("storage_metadata.json"):
        raise CheckpointMismatch(
            f"{folder.where()}: was saved from a storage of tensors, here is a CompressedListStorage"
        )
    described, places = folder.json(_METADATA), folder.json(_INDICES)
    if not isinstance(described, list) or not isinstance(places, list) or len(described) != len(places):
        raise CheckpointCorrupt(f"{where}: there should be one entry for each of {_INDICES}")
    stack = None
    if folder.kind(_DATA):
        with folder.folder(_DATA) as inner:
            stack = read_entries(inner)
    held = stack.items if isinstance(stack, Stack) else []
    if None in places:
        raise CheckpointMismatch(
            f"{folder.where(_INDICES)}: slot {places.index(None)} was never written, later ones were"
        )
    if not all(type(place) is int and 0 <= place < len(held) for place in places) or len({*places}) < len(places):
        raise CheckpointCorrupt(f"{folder.where(_INDICES)}: it does not name one of {len(held)} items for each slot")
    return [
        _item(held[place], Fields(each, f"{where}, item {slot}"), storage)
        for slot, (place, each) in enumerate(zip(places, described, strict=True))
    ]


def _item(entry: Any, fields: Fields, storage: Any) -> Any:
    kind = fields.text("type")
    if kind == "other":
        return _value(fields.any("value"), fields, 0)
    if not isinstance(entry, Held):
        raise fields.wrong("type", "that of what was compressed", kind)
    if kind == "tensor":
        return _tensor(entry, "data", fields, storage)
    if kind != "tensordict":
        raise fields.wrong("type", "a tensor, a tensordict or another value", kind)
    described = fields.any("fields")
    below = fields.fields("fields")
    found: dict[str, Any] = {}
    for key in described:
        field = below.fields(key)
        if field.text("type") == "tensor":
            found[key] = _tensor(entry, key, field, storage)
        else:
            value = _value(field.any("value"), field, 0)
            found[key] = value if isinstance(value, torch.Tensor | NonTensorData) else NonTensorData(value)
    return TensorDict(found, batch_size=[], device="cpu")


def _tensor(entry: Held, key: str, fields: Fields, storage: Any) -> torch.Tensor:
    """A tensor that was compressed, as the storage or as torchrl does it."""
    where = entry.where
    file = entry.entries.get(key)
    if not isinstance(file, Tensor):
        raise CheckpointCorrupt(f"{where}: the tensor {key[:60]!r} is missing")
    dtype, shape = (
        _typed(fields.any(name), f"torch.{kind}", fields) for name, kind in (("dtype", "dtype"), ("shape", "Size"))
    )
    held, sizes = dtype_of(dtype, file.where), shape_of(shape, file.where)
    exact = getattr(torch, dtype.removeprefix("torch."))
    packed = file.read()
    if storage._zstd is None:
        metadata = {"type": "tensor", "shape": torch.Size(sizes), "dtype": exact, "device": torch.device("cpu")}
        made = storage._decompression_fn(torch.from_numpy(packed), metadata)
        if not isinstance(made, torch.Tensor) or made.dtype != exact or tuple(made.shape) != sizes:
            raise CheckpointMismatch(
                f"{file.where}: decompression_fn does not give the {dtype} of {list(sizes)} that was saved"
            )
        return made
    raw = _decompressed(packed.tobytes(), row_bytes(held, sizes), file.where)
    flat = torch.frombuffer(bytearray(raw), dtype=exact) if raw else torch.empty(0, dtype=exact, device="cpu")
    return flat.reshape(sizes)


def _decompressed(packed: bytes, size: int, where: str) -> bytes:
    """The bytes that were compressed, which must be as many: not more are made."""
    library = zstd_library() if packed[:4] == _ZSTD else None
    damage = zlib.error if library is None else library.ZstdError
    try:
        if library is None:
            raw = zlib.decompressobj().decompress(packed, size + 1)
        elif library.__name__ == "zstandard":
            raw = library.ZstdDecompressor().stream_reader(packed).read(size + 1)
        else:
            raw = library.ZstdDecompressor().decompress(packed, size + 1)
    except (damage, EOFError) as error:
        raise CheckpointCorrupt(f"{where}: damaged, it cannot be decompressed ({error})") from error
    if len(raw) != size:
        raise CheckpointCorrupt(f"{where}: damaged, it does not decompress to the size of its tensor")
    return bytes(raw)


def _typed(value: Any, kind: str, fields: Fields) -> Any:
    """The value of one that is described by its type."""
    if not isinstance(value, dict) or value.get("__type__") != kind or "value" not in value:
        raise fields.wrong("dtype", f"a {kind}", value)
    return value["value"]


def _value(value: Any, fields: Fields, depth: int) -> Any:
    """A plain value, in which those that JSON does not have are described by their type."""
    if depth > _DEPTH:
        raise fields.wrong("value", f"nested at most {_DEPTH} deep", value)
    if isinstance(value, list):
        return [_value(each, fields, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    if "__type__" not in value:
        return {key: _value(each, fields, depth + 1) for key, each in value.items()}
    kind = value["__type__"]
    inner: Any = value.get("value")
    try:
        if kind == "torch.Size":
            return torch.Size(shape_of(inner, "a size"))
        if kind == "torch.dtype":
            dtype_of(inner, "a dtype")
            return getattr(torch, inner.removeprefix("torch."))
        if kind == "torch.device":
            return torch.device(inner)
        if kind == "torch.Tensor":
            return torch.tensor(inner, device="cpu")
        if kind == "NonTensorData":
            return NonTensorData(_value(inner, fields, depth + 1))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise fields.wrong("value", f"a {str(kind)[:40]}", inner) from error
    raise fields.wrong("value", "of a type that is known", kind)
