"""Pickles and arrays of objects, read without running code."""

import io
import math
import re
import sys
import tokenize
from typing import Any

import numpy as np
from numpy.lib import format as npy

from interop.datasets.compressed import Readable
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.pickles import Unbuilt, unpickled

_DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError),
    *(SyntaxError, tokenize.TokenError),  # of NumPy, where a header is damaged
)
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def load_object(file: Readable, where: str = "the file") -> Any:
    """What a pickle or `.npy` file holds: NumPy arrays, numbers, text, bytes, None, and dicts, lists and tuples of these.

    Of a `.npy` file with one object that object, else the array. Arrays are read-only, and share the memory of the file.
    `CorruptDatasetError`, which begins with `where`, for anything else, and for a damaged or truncated file.
    """
    data = io.BytesIO(file.read())
    try:
        value = _array_of(data) if data.getvalue().startswith(npy.MAGIC_PREFIX) else unpickled(data, _KNOWN)
        if rest := len(data.getbuffer()) - data.tell():
            raise ValueError(f"{rest} bytes follow its end")
    except _DAMAGE as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise CorruptDatasetError(f"{where} cannot be read: {reason}") from error
    return value


def array_header(file: Readable, where: str = "the file") -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the array of an `.npy` file, whose rows follow. `CorruptDatasetError` for one in another order."""
    try:
        shape, fortran, dtype = _HEADERS[npy.read_magic(file)](file)
    except _DAMAGE as error:
        raise CorruptDatasetError(f"{where} is no .npy file: {error}") from error
    if fortran and len(shape) > 1:
        raise CorruptDatasetError(f"{where} has an array in the order of Fortran, which cannot be read row by row")
    return shape, dtype


def _array_of(data: io.BytesIO) -> Any:
    shape, fortran, dtype = _HEADERS[npy.read_magic(data)](data)
    if dtype.kind != "O":
        return _filled(data.read(), dtype, shape, "F" if fortran else "C")
    array = unpickled(data, _KNOWN)
    if not isinstance(array, np.ndarray) or array.dtype.kind != "O" or array.shape != shape:
        raise ValueError(f"its header has objects of shape {shape}, its pickle other things")
    return array if shape else array.item()


# ------------------------------------------------------------------ what the functions of NumPy make


def _dtype(kind: str, align: int = 0, copied: int = 1) -> Unbuilt:
    if not re.fullmatch(r"[biufc][0-9]{1,2}|[SU][0-9]{1,9}|O8?", kind):
        raise ValueError(f"it holds an array of dtype {kind!r}")

    def build(state: Any) -> np.dtype:
        version, order, *fields, _, _, _ = state
        if version != 3 or fields != [None, None, None]:
            raise ValueError("it holds a dtype with fields, a shape or metadata")
        return np.dtype(kind).newbyteorder(order)

    return Unbuilt(build)


def _array(kind: Any, shape: Any, code: Any) -> Unbuilt:
    if kind is not np.ndarray:
        raise ValueError("it holds an array of another type than ndarray")

    def build(state: Any) -> np.ndarray:
        version, shape, dtype, fortran, content = state
        if version != 1:
            raise ValueError(f"it holds an array of version {version}")
        return _filled(content, dtype, shape, "F" if fortran else "C")

    return Unbuilt(build)


def _filled(content: Any, dtype: np.dtype, shape: Any, order: Any) -> np.ndarray:
    """An array of which no more memory is taken than there are bytes."""
    if not isinstance(dtype, np.dtype) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"it holds an array of dtype {dtype} and shape {shape}")
    size = 1 if dtype.kind == "O" else dtype.itemsize
    if not isinstance(content, list if dtype.kind == "O" else bytes | bytearray):
        raise ValueError(f"it holds an array of {dtype} whose content is {type(content).__name__}")
    if len(content) != math.prod(shape) * size:
        raise ValueError(f"it holds an array of {dtype} {list(shape)} with content of length {len(content)}")
    if not isinstance(content, list):
        points = np.dtype("u4").newbyteorder(dtype.byteorder)
        if dtype.kind == "U" and (np.frombuffer(content, points) > sys.maxunicode).any():
            raise ValueError("it holds an array of text with characters that Unicode does not have")
        return np.frombuffer(content, dtype).reshape(shape, order=order)
    array = np.empty(len(content), object)
    for place, item in enumerate(content):
        array[place] = item
    return array.reshape(shape, order=order)


def _scalar(dtype: np.dtype, content: bytes) -> Any:
    if dtype.kind == "O":
        raise ValueError("it holds a NumPy scalar of an object")
    return _filled(content, dtype, (), "C")[()]


def _encode(text: str, encoding: str) -> bytes:
    """Bytes in pickles of protocol 2."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"it holds bytes in the encoding {encoding!r}")
    return text.encode("latin-1")


_KNOWN: dict[str, Any] = {
    "numpy ndarray": np.ndarray,
    "numpy dtype": _dtype,
    "_codecs encode": _encode,
    "__builtin__ bytes": lambda: b"",
}
for _core in ("numpy.core", "numpy._core"):
    _KNOWN[f"{_core}.multiarray _reconstruct"] = _array
    _KNOWN[f"{_core}.multiarray scalar"] = _scalar
    _KNOWN[f"{_core}.numeric _frombuffer"] = _filled
