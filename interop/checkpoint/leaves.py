"""Values without structure, such as tensors and numbers, of many items: a column each, and back.

A column is one array where all values are of one shape, two where they are not, and a list where they are few and short.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, Fields
from fbuf.checkpoint.dtypes import BY_NAME, name_of
from interop.checkpoint import pickled
from interop.checkpoint.torch_names import NAMES, device_named, dtype_named, optional_device, refuse_absent

_FEW, _SHORT = 16, 1 << 12  # values, and characters of a text, that are written as they are
_PIECE = 1 << 18  # bytes of memory that items share: no item that is kept holds on to more
_MOST_DIMS = 64
_PLAIN = {"int", "float", "bool", "complex", "text", "bytes", "pickled"}
_ODD = re.compile(r"(datetime64|timedelta64)(\[[0-9]{0,9}[A-Za-z]{1,2}\])?|[US][0-9]{1,9}")
_NATIVE = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}  # dtypes that NumPy has
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}  # what others are stored as


@dataclass(frozen=True)
class Leaf:
    """What the values of a column are.

    Args:
        kind: "tensor", "array" or "scalar" of NumPy, "int", "float", "bool", "complex", "text", "bytes" or "pickled".
        dtype: of a tensor or array, by name.
        dims: how many dims it has.
        device: of a tensor, None for the CPU.
    """

    kind: str
    dtype: str = ""
    dims: int = 0
    device: str | None = None

    def described(self) -> dict[str, Any]:
        """The leaf as a saved tree."""
        tree: dict[str, Any] = {"kind": self.kind}
        if self.kind not in _PLAIN:
            tree |= {"dtype": self.dtype, "dims": self.dims}
        return tree if self.device is None else {**tree, "device": self.device}

    @classmethod
    def read(cls, fields: Fields, where: str) -> "Leaf":
        """The leaf that a saved tree describes. CheckpointCorrupt where it describes none."""
        kind = fields.text("kind")
        if kind in _PLAIN:
            return cls(kind)
        if kind not in ("tensor", "array", "scalar"):
            raise CheckpointCorrupt(f"{where}: {kind[:40]!r} is no kind of value")
        dtype, dims = fields.text("dtype"), fields.whole("dims", most=_MOST_DIMS)
        if kind == "tensor":
            stored_as(dtype_named(dtype, where))
            device = device_named(fields.text("device"), where) if "device" in fields else None
            return cls(kind, dtype, dims, None if device is None else str(device))
        _numpy_dtype(dtype, where)
        if kind == "scalar" and dims:
            raise CheckpointCorrupt(f"{where}: a scalar has no dims, found {dims}")
        return cls(kind, dtype, dims)


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

    def moved(self, name: str | None) -> torch.device:
        """Where a tensor goes that was on the device of that name."""
        return self.device or optional_device(name, self.where) or torch.device("cpu")


def stored_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the bits of a tensor are stored. TypeError for one that is quantized."""
    if dtype in _NATIVE:
        return dtype
    if NAMES[dtype].startswith("q"):
        raise TypeError(f"a tensor of dtype {dtype} cannot be saved")
    return _BITS[dtype.itemsize]


def array_name(dtype: np.dtype) -> str:
    """The name of a NumPy dtype. TypeError for one that cannot be saved, such as objects and records."""
    name = f"{dtype.kind}{dtype.itemsize // (4 if dtype.kind == 'U' else 1)}" if dtype.kind in "US" else dtype.name
    return name if _ODD.fullmatch(name) else name_of(dtype)


def _numpy_dtype(name: str, where: str) -> np.dtype:
    if name in BY_NAME:
        return BY_NAME[name]
    if _ODD.fullmatch(name):
        try:
            return np.dtype(name)
        except (TypeError, ValueError) as error:
            raise CheckpointCorrupt(f"{where}: {name!r} is no dtype") from error
    raise CheckpointCorrupt(f"{where}: {name[:40]!r} is no dtype")


# ------------------------------------------------------------------ writing


def put(leaf: Leaf, values: list[Any]) -> Any:
    """The column of these values, as a saved tree. It may hold views of a tensor or array that is the only one."""
    if leaf.kind == "tensor":
        return _put_tensors(values)
    if leaf.kind in ("array", "scalar"):
        return _put_arrays(values)
    if leaf.kind in ("bytes", "pickled"):
        return _blob(leaf.kind, values)
    if leaf.kind == "complex":
        return {"stack": np.array(values, np.complex128)}
    if leaf.kind == "text":
        if len(values) <= _FEW and all(len(each) <= _SHORT and is_written(each) for each in values):
            return values
        return _blob("bytes", [each.encode("utf-8", "surrogatepass") for each in values])
    if leaf.kind == "int":
        if all(-(2**63) <= each < 2**63 for each in values):
            return values if len(values) <= _FEW else {"stack": np.array(values, np.int64)}
        return {"hex": put(Leaf("text"), [hex(each) for each in values])}
    if len(values) > _FEW:
        return {"stack": np.array(values, np.bool_ if leaf.kind == "bool" else np.float64)}
    return [each if math.isfinite(each) else repr(each) for each in values]


def _put_tensors(values: list[Tensor]) -> dict[str, Any]:
    bits = stored_as(values[0].dtype)
    with torch.no_grad():
        if bits is not values[0].dtype or values[0].is_complex():
            values = [each.detach().resolve_conj().resolve_neg().view(bits) for each in values]
        if len({each.shape for each in values}) == 1:
            return {"stack": _array(torch.stack(values) if len(values) > 1 else values[0].detach().unsqueeze(0))}
        return {
            "shapes": np.array([tuple(each.shape) for each in values], np.int64),
            "flat": _array(torch.cat([each.reshape(-1) for each in values])),
        }


def _array(tensor: Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().numpy()
    return found


def _put_arrays(values: list[np.ndarray]) -> dict[str, Any]:
    if values[0].dtype.name not in BY_NAME:
        values = [_as_bytes(each) for each in values]
    if len({each.shape for each in values}) == 1:
        return {"stack": np.stack(values) if len(values) > 1 else np.asarray(values[0], order="C")[None]}
    shapes = np.array([each.shape for each in values], np.int64)
    return {"shapes": shapes, "flat": np.concatenate([each.reshape(-1) for each in values])}


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """An array of texts or times, [...], as the bytes of its values, [..., bytes of one]."""
    size = array.dtype.itemsize
    flat = np.ascontiguousarray(array).reshape(-1)
    return (flat.view(np.uint8) if size else np.zeros(0, np.uint8)).reshape(*array.shape, size)


def _blob(kind: str, values: list[bytes]) -> dict[str, Any]:
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    return {kind: np.frombuffer(b"".join(values), np.uint8), "lengths": lengths}


def is_written(text: str) -> bool:
    """Whether a text can be written as it is: half of a pair of surrogates cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


# ------------------------------------------------------------------ reading


def take(leaf: Leaf, column: Any, count: int, reading: Reading) -> list[Any]:
    """The values of a column, in memory of their own. CheckpointCorrupt where these are not `count` of that kind."""
    where = reading.where
    if isinstance(column, list):
        if len(column) != count or leaf.kind not in _INLINE:
            raise CheckpointCorrupt(f"{where}: a list of {count} values of kind {leaf.kind!r} was expected")
        return [_INLINE[leaf.kind](each, where) for each in column]
    fields = Fields(column, where)
    if leaf.kind == "tensor":
        return _take_tensors(leaf, fields, count, reading)
    if leaf.kind in ("array", "scalar"):
        return _take_arrays(leaf, fields, count, where)
    if leaf.kind == "pickled":
        return [pickled.from_bytes(each, reading.allow_pickle, where) for each in _pieces(fields, "pickled", count)]
    if leaf.kind == "bytes":
        return list(_pieces(fields, "bytes", count))
    if leaf.kind == "text":
        return [_text(each, where) for each in _pieces(fields, "bytes", count)]
    if leaf.kind == "int" and "hex" in fields:
        return [_integer(each, where) for each in take(Leaf("text"), fields.any("hex"), count, reading)]
    dtype = {"int": np.int64, "float": np.float64, "bool": np.bool_, "complex": np.complex128}[leaf.kind]
    found: list[Any] = np.asarray(fields.array("stack", dtype, (count,))).tolist()
    return found


def _take_tensors(leaf: Leaf, fields: Fields, count: int, reading: Reading) -> list[Tensor]:
    dtype = dtype_named(leaf.dtype, reading.where)
    bits = stored_as(dtype)
    device = reading.moved(leaf.device)
    if device.type != "cpu":
        refuse_absent(device, reading.where)
    found: list[Tensor] = []
    for piece, shapes in _memory(fields, torch.empty(0, dtype=bits, device="cpu").numpy().dtype, leaf.dims, count):
        tensor = torch.from_numpy(piece).view(dtype).to(device)
        if shapes is None:
            found += tensor.unbind(0)
        else:
            parts = tensor.split([math.prod(shape) for shape in shapes])
            found += (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    return found


def _take_arrays(leaf: Leaf, fields: Fields, count: int, where: str) -> list[Any]:
    dtype = _numpy_dtype(leaf.dtype, where)
    odd = leaf.dtype not in BY_NAME
    found: list[Any] = []
    for piece, shapes in _memory(fields, np.dtype(np.uint8) if odd else dtype, leaf.dims + odd, count):
        if shapes is None:
            parts = [piece[place] for place in range(len(piece))] if not odd else list(piece)
        else:
            stops = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
            parts = [
                piece[stop - math.prod(shape) : stop].reshape(shape) for stop, shape in zip(stops, shapes, strict=True)
            ]
        if odd:
            parts = [_from_bytes(part, dtype, where) for part in parts]
        # What is got of one value by its place is a scalar, which is what is wanted or what an array is made of.
        found += parts if leaf.dims or odd else (part if leaf.kind == "scalar" else np.array(part) for part in parts)
    return [part[()] for part in found] if odd and leaf.kind == "scalar" else found


def _from_bytes(part: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """The inverse of `_as_bytes`."""
    if part.shape[-1] != dtype.itemsize:
        raise CheckpointCorrupt(f"{where}: values of {part.shape[-1]} bytes are none of dtype {dtype}")
    if not dtype.itemsize:
        return np.zeros(part.shape[:-1], dtype)
    flat = np.ascontiguousarray(part).reshape(-1).view(dtype)
    if dtype.kind == "U" and flat.size and flat.view(np.uint32).max() > 0x10FFFF:
        raise CheckpointCorrupt(f"{where}: a text has characters that do not exist")
    return flat.reshape(part.shape[:-1]).copy()


def _memory(
    fields: Fields, dtype: np.dtype, dims: int, count: int
) -> Iterator[tuple[np.ndarray, list[tuple[int, ...]] | None]]:
    """Copies of the values of a column, some at a time: [values, ...] with None, or [elements] with the shape of each."""
    if "stack" in fields:
        whole = np.asarray(fields.array("stack", dtype, (count, *[None] * dims)))
        step = max(1, _PIECE // max(1, whole[:1].nbytes))
        for start in range(0, count, step):
            yield whole[start : start + step].copy(), None
        return
    shapes = np.asarray(fields.array("shapes", np.int64, (count, dims)))
    flat = np.asarray(fields.array("flat", dtype, (None,)))
    with np.errstate(over="ignore", invalid="ignore"):
        fits = shapes.size == 0 or (shapes.min() >= 0 and shapes.max() < 2**40)
        fits = fits and np.prod(shapes.astype(np.float64), 1).sum() == flat.size
    if not fits:
        raise fields.wrong("shapes", f"shapes of {flat.size} values in all", shapes)
    stops = np.cumsum(np.prod(shapes, 1)) if dims else np.arange(1, count + 1)
    first = begin = 0
    while first < count:
        last = max(first + 1, int(np.searchsorted(stops, begin + _PIECE // dtype.itemsize, side="right")))
        yield flat[begin : stops[last - 1]].copy(), list(map(tuple, shapes[first:last].tolist()))
        first, begin = last, int(stops[last - 1])


def _pieces(fields: Fields, name: str, count: int) -> Iterator[bytes]:
    lengths = np.asarray(fields.array("lengths", np.int64, (count,)))
    content = np.asarray(fields.array(name, np.uint8, (None,)))
    least = lengths.min() if count else 0
    if least < 0 or lengths.astype(np.float64).sum() != content.size:
        raise fields.wrong("lengths", f"lengths of {content.size} bytes in all", lengths)
    start = 0
    for length in lengths.tolist():
        yield content[start : start + length].tobytes()
        start += length


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise CheckpointCorrupt(f"{where}: a text is not UTF-8") from error


def _integer(text: str, where: str) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", text):
        raise CheckpointCorrupt(f"{where}: {text[:40]!r} is no integer")
    return int(text, 16)


def _inline(kinds: tuple[type, ...], named: Sequence[str] = ()) -> Callable[[Any, str], Any]:
    def check(value: Any, where: str) -> Any:
        if type(value) is str and value in named:
            return float(value)
        if type(value) not in kinds:
            raise CheckpointCorrupt(f"{where}: found {type(value).__name__} in a list of {kinds[0].__name__}")
        return value

    return check


_INLINE = {
    "int": _inline((int,)),
    "bool": _inline((bool,)),
    "float": _inline((float,), ("nan", "inf", "-inf")),
    "text": _inline((str,)),
}
