"""A safe reader of pickles and object arrays, which never runs their code.

A pickle is a program that names functions and calls them. Here each name maps to a stand-in, or the pickle is rejected.
NumPy's own functions are never called, as a crafted dtype could make them treat bytes as addresses.
"""

import copyreg
import io
import math
import pickle
import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy

from interop.datasets import pickle_sizes
from interop.datasets.compressed import Readable
from interop.datasets.errors import CorruptDatasetError

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_LONGEST_HEADER = 10_000  # bytes, as in NumPy
_PLAIN = {str, bytes, int, float, bool, type(None)}
_LARGEST = {"b": ("u1", 1), "U": ("u4", sys.maxunicode)}  # the largest code of a bool, of a character


def load_object(file: Readable, where: str = "the file") -> Any:
    """Read a pickle or `.npy` file of NumPy arrays, numbers, text, bytes, None, and dicts, lists and tuples of these.

    A `.npy` file with a single object gives that object, otherwise the array. Arrays may be read-only.
    `CorruptDatasetError`, prefixed by `where`, for other content, and for a damaged or truncated file. Memory: up to
    `allowance.held` of its bytes.
    """
    data = file.read()
    stream = io.BytesIO(data)
    try:
        value = _array_of(stream) if data.startswith(npy.MAGIC_PREFIX) else _unpickled(stream)
        if rest := len(data) - stream.tell():
            raise ValueError(f"{rest} bytes follow its end")
    except Exception as error:  # damaged pickles raise anything, also MemoryError and RecursionError
        raise CorruptDatasetError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
    return value


def array_header(
    file: Readable, where: str = "the file", any_order: bool = False
) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read shape, whether the order is that of Fortran, and dtype from an `.npy` header, up to the first row.

    `CorruptDatasetError` for a damaged header and, unless `any_order`, for several dims in Fortran order.
    """
    try:
        shape, fortran, dtype = _header(file)
    except CorruptDatasetError:
        raise
    except Exception as error:  # damaged headers raise anything
        raise CorruptDatasetError(f"{where} is no .npy file: {error}") from error
    if fortran and len(shape) > 1 and not any_order:
        raise CorruptDatasetError(f"{where} has an array in the order of Fortran, which cannot be read row by row")
    return shape, fortran, dtype


def _header(file: Readable) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype of an `.npy` header. Its length is compared before it is read."""
    magic = file.read(npy.MAGIC_LEN)
    read = _HEADERS[npy.read_magic(io.BytesIO(magic))]
    count = file.read(2 if magic[6] == 1 else 4)
    if (length := int.from_bytes(count, "little")) > _LONGEST_HEADER:
        raise ValueError(f"it has a header of {length} bytes")
    shape, fortran, dtype = read(io.BytesIO(count + file.read(length)))
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) * max(dtype.itemsize, 1) >= 2**62:
        raise ValueError(f"it has the shape {shape!r:.80}")
    return shape, fortran, dtype


def _array_of(stream: io.BytesIO) -> Any:
    shape, fortran, dtype = _header(stream)
    if dtype.kind != "O":
        return _filled(stream.read(), dtype, shape, "F" if fortran else "C")
    value = _unpickled(stream)
    if not isinstance(value, np.ndarray) or value.shape != shape:
        raise ValueError(f"its header announces objects of shape {shape}, there is a {type(value).__name__}")
    return value if shape else value.item()


def _filled(content: Any, dtype: np.dtype, shape: Any, order: Any) -> np.ndarray:
    """Build an array whose size is bounded by the given bytes or objects."""
    if dtype.kind == "O" and type(content) is list:
        array = np.empty(len(content), object)
        for place, item in enumerate(content):
            array[place] = item
        return array.reshape(shape, order=order)
    if dtype.kind not in "biufcSU":
        raise ValueError(f"it holds an array of {dtype} whose content is {type(content).__name__}")
    unit, largest = _LARGEST.get(dtype.kind, ("", 0))
    if unit and (np.frombuffer(content, dtype.byteorder + unit) > largest).any():
        raise ValueError(f"it holds an array of {dtype} with values that {dtype} has not")
    return np.frombuffer(content, dtype).reshape(shape, order=order)


@dataclass(slots=True, eq=False)
class _StandIn:
    """Stands for a name in a pickle (`call`), or for its result (`build` makes `built` from a state)."""

    call: Any = None
    build: Any = None
    built: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.built = self.build(*state)


def _dtype(kind: str, align: int = 0, copied: int = 1) -> _StandIn:
    def build(version: int, order: Any, base: None, names: None, fields: None, *_: Any) -> np.dtype:
        if not re.fullmatch(r"[biufc]\d\d?|[SU]\d+|O8?", kind) or (base, names, fields) != (None, None, None):
            raise ValueError(f"it holds an array of dtype {kind!r}, with fields {fields}")
        return np.dtype(kind).newbyteorder(order)

    return _StandIn(build=build)


def _of_state(version: int, shape: Any, dtype: _StandIn, fortran: bool, data: Any) -> np.ndarray:
    return _filled(data, dtype.built, shape, "F" if fortran else "C")


_NAMES = {
    ("numpy", "ndarray"): _StandIn(),
    ("numpy", "dtype"): _StandIn(_dtype),
    ("_codecs", "encode"): _StandIn(lambda text, encoding: text.encode({"latin1": "latin-1"}[encoding])),  # protocol 2
    ("__builtin__", "bytes"): _StandIn(lambda: b""),
}
for _core in ("numpy.core", "numpy._core"):
    _NAMES[f"{_core}.multiarray", "_reconstruct"] = _StandIn(lambda *_: _StandIn(build=_of_state))
    _NAMES[f"{_core}.multiarray", "scalar"] = _StandIn(lambda dtype, data: _filled(data, dtype.built, (), "C")[()])
    _NAMES[f"{_core}.numeric", "_frombuffer"] = _StandIn(
        lambda data, dtype, shape, order: _StandIn(built=_filled(data, dtype.built, shape, order))
    )


class _Unpickler(pickle.Unpickler):
    """Resolves names to stand-ins."""

    def find_class(self, module: str, name: str) -> _StandIn:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which would run code")
        return _NAMES[module, name]


def _unpickled(stream: io.BytesIO) -> Any:
    pickle_sizes.check(stream.getvalue(), stream.tell())
    copyreg.clear_extension_cache()  # else a code could resolve to an import of another unpickler
    return _plain(_Unpickler(stream).load(), {})


def _plain(value: Any, done: dict[int, Any]) -> Any:
    """Replace stand-ins in a value by their arrays. `done` maps ids of containers to their results."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, np.generic | bytearray):
        return value
    if kind is _StandIn and value.built.dtype.kind != "O":
        return value.built
    if id(value) not in done:
        if kind is _StandIn:
            items = [_plain(child, done) for child in value.built.flat]
            done[id(value)] = _filled(items, value.built.dtype, value.built.shape, "C")
        elif kind is dict and _PLAIN.issuperset(map(type, value)):
            done[id(value)] = {key: _plain(child, done) for key, child in value.items()}
        elif kind in (list, tuple):
            done[id(value)] = kind([_plain(child, done) for child in value])
        else:
            raise ValueError(f"it holds a {kind.__name__} that is no plain value, or has keys that are none")
    return done[id(value)]
