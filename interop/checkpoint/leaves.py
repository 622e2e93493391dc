"""Leaves of many values as columns of a saved tree, and back.

A column of tensors or arrays is their bytes one behind the other with their shapes; of plain values it is JSON.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, Fields
from interop.checkpoint import pickled
from interop.checkpoint.torch_names import device_named, dtype_named, optional_device, refuse_absent
from interop.data.values import Value, numpy_dtype, value_of

KINDS = frozenset(("tensor", "array", "scalar", "complex", "bytes", "plain", "pickled"))
_SHORT = 1 << 12  # characters of a text that is written into the manifest
_PIECE = 1 << 18  # bytes of memory that items share: no item that is kept holds on to more
_MOST_DIMS = 64
_NATIVE = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
}  # dtypes whose tensors torch joins; those of others are joined by their bits
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Reading:
    """How columns are read.

    Args:
        where: what they are of, for messages.
        allow_pickle: whether pickles may be read.
        device: where tensors go; None for where they were.
    """

    where: str
    allow_pickle: bool = False
    device: torch.device | None = None


def saved_leaf(leaf: Value) -> dict[str, Any]:
    """A leaf as a saved tree."""
    described: dict[str, Any] = {"kind": leaf.kind}
    if leaf.dtype:
        described |= {"dtype": leaf.dtype, "dims": leaf.dims}
    return described if leaf.device is None else {**described, "device": leaf.device}


def leaf_of(fields: Fields, reading: Reading, kinds: frozenset[str] = KINDS) -> Value:
    """The leaf that a saved tree describes. CheckpointCorrupt where it describes none of these kinds."""
    kind, where = fields.text("kind"), reading.where
    if kind not in kinds:
        raise CheckpointCorrupt(f"{where}: {kind[:40]!r} is no kind of value")
    if kind == "pickled":
        pickled.refuse(reading.allow_pickle, where)
    if kind not in ("tensor", "array", "scalar"):
        return value_of(kind)
    dtype, dims = fields.text("dtype"), fields.whole("dims", most=0 if kind == "scalar" else _MOST_DIMS)
    if kind != "tensor" and numpy_dtype(dtype) is None:
        raise CheckpointCorrupt(f"{where}: {dtype[:40]!r} is no dtype")
    if kind == "tensor":
        dtype_named(dtype, where)
    device = device_named(fields.text("device"), where) if "device" in fields else None
    return value_of(kind, dtype, dims, None if device is None else str(device))


# ------------------------------------------------------------------ writing


def put(leaf: Value, values: list[Any]) -> dict[str, Any]:
    """The column of these values, as a saved tree. It may hold a view of a tensor or array that is the only one."""
    if leaf.kind == "plain":
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        short = len(text) <= _SHORT and text.isascii()
        return {"json": text if short else np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)}
    if leaf.kind in ("bytes", "pickled"):
        values = [np.frombuffer(each, np.uint8) for each in values]
    shapes = [() if leaf.kind == "complex" else tuple(each.shape) for each in values]
    alike = shapes.count(shapes[0]) == len(shapes)
    raw = _raw_tensors(values, alike) if leaf.kind == "tensor" else _raw_arrays(values)
    return {"shapes": np.array(shapes[:1] if alike else shapes, np.int64), "raw": raw}


def _raw_tensors(values: list[Tensor], alike: bool) -> np.ndarray:
    dtype = values[0].dtype
    with torch.no_grad():
        if dtype not in _NATIVE:
            bits = _BITS[dtype.itemsize]
            values = [each.detach().resolve_conj().resolve_neg().view(bits) for each in values]
        if len(values) == 1:
            joined = values[0].detach()
        else:
            joined = torch.stack(values) if alike else torch.cat([each.reshape(-1) for each in values])
        dense = joined.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    found: np.ndarray = dense.view(torch.uint8).numpy()
    return found


def _raw_arrays(values: list[Any]) -> np.ndarray:
    return np.concatenate([np.asarray(each).reshape(-1) for each in values]).view(np.uint8)


# ------------------------------------------------------------------ reading


def take(leaf: Value, column: Fields, count: int, reading: Reading) -> list[Any]:
    """The values of a column, in memory of their own. CheckpointCorrupt where these are not `count` of that kind."""
    where = reading.where
    if leaf.kind == "plain":
        return _plain(column, count, where)
    if leaf.kind == "tensor":
        return _tensors(leaf, column, count, reading)
    if leaf.kind in ("bytes", "pickled"):
        found = [each.tobytes() for each in _arrays(np.dtype(np.uint8), 1, column, count)]
        if leaf.kind == "bytes":
            return found
        return [pickled.from_bytes(each, reading.allow_pickle, where) for each in found]
    if leaf.kind == "complex":
        return [complex(each) for each in _arrays(np.dtype(np.complex128), 0, column, count)]
    dtype = numpy_dtype(leaf.dtype)
    assert dtype is not None
    arrays = _arrays(dtype, leaf.dims, column, count)
    return arrays if leaf.kind == "scalar" else [np.asarray(each, dtype) for each in arrays]


def _plain(column: Fields, count: int, where: str) -> list[Any]:
    text = column.any("json")
    if not isinstance(text, str):
        text = np.asarray(column.array("json", np.uint8, (None,))).tobytes().decode("utf-8", "surrogatepass")
    found = json.loads(text)
    if not isinstance(found, list) or len(found) != count:
        raise CheckpointCorrupt(f"{where}: a list of {count} values was expected")
    return found


def _tensors(leaf: Value, column: Fields, count: int, reading: Reading) -> list[Tensor]:
    dtype = dtype_named(leaf.dtype, reading.where)
    device = reading.device or optional_device(leaf.device, reading.where) or torch.device("cpu")
    if device.type != "cpu":
        refuse_absent(device, reading.where)
    found: list[Tensor] = []
    for piece, shapes, several in _pieces(column, dtype == torch.bool, dtype.itemsize, leaf.dims, count):
        flat = (torch.from_numpy(piece).view(dtype) if piece.size else torch.empty(0, dtype=dtype, device="cpu")).to(
            device
        )
        if several:
            found.extend(flat.reshape(several, *shapes[0]).unbind(0))
        else:
            parts = flat.split([math.prod(shape) for shape in shapes])
            found += (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    return found


def _arrays(dtype: np.dtype, dims: int, column: Fields, count: int) -> list[Any]:
    found: list[Any] = []
    for piece, shapes, several in _pieces(column, dtype == np.bool_, dtype.itemsize, dims, count):
        flat = piece.view(dtype)
        if dtype.kind == "U" and flat.size and flat.view(np.uint32).max() > 0x10FFFF:
            raise column.wrong("raw", "texts of characters that exist", piece)
        if several:
            found.extend(flat.reshape(several, *shapes[0]))
        else:
            stops = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
            found += (part.reshape(shape) for part, shape in zip(np.split(flat, stops), shapes, strict=True))
    return found


def _pieces(
    column: Fields, flags: bool, size: int, dims: int, count: int
) -> Iterator[tuple[np.ndarray, list[tuple[int, ...]], int]]:
    """Copies of the bytes of some values at a time, with the shape of each; or with the one of that many."""
    shapes = np.asarray(column.array("shapes", np.int64, (None, dims)))
    raw = np.asarray(column.array("raw", np.uint8, (None,)))
    alike = len(shapes) == 1
    with np.errstate(over="ignore", invalid="ignore"):
        fits = len(shapes) in (1, count) and (shapes.size == 0 or (shapes.min() >= 0 and shapes.max() < 2**40))
        fits = fits and np.prod(shapes.astype(np.float64), 1).sum() * (count if alike else 1) * size == raw.size
    if not fits:
        raise column.wrong("shapes", f"shapes of {count} values in {raw.size} bytes", shapes)
    if flags and raw.size and raw.max() > 1:
        raise column.wrong("raw", "flags of one byte", raw)
    stops = np.cumsum(np.broadcast_to(np.prod(shapes, 1) * size, count))
    first = begin = 0
    while first < count:
        last = max(first + 1, int(np.searchsorted(stops, begin + _PIECE, side="right")))
        some = shapes if alike else shapes[first:last]
        yield raw[begin : stops[last - 1]].copy(), list(map(tuple, some.tolist())), (last - first) * alike
        first, begin = last, int(stops[last - 1])
