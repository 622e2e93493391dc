"""Pickles and arrays of objects, read without running code.

A pickle is a program. The interpreter here knows the instructions that make plain values, and functions of this file stand
for those of NumPy that make arrays: nothing that a pickle names is imported or called. The interpreters of `pickle` are no
base for it: a few damaged bytes make them take all memory, or overflow the stack.
"""

import io
import math
import pickletools
import re
import sys
import tokenize
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from interop.datasets.errors import CorruptDatasetError

_KEYS = (str, bytes, int, float, bool, type(None))
_PLAIN = (*_KEYS, bytearray, np.ndarray, np.generic)
_DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError),
    *(SyntaxError, tokenize.TokenError),  # of NumPy, where a header is damaged
)
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def load_object(file: IO[bytes], where: str = "the file") -> Any:
    """What a pickle or `.npy` file holds: NumPy arrays, numbers, text, bytes, None, and dicts, lists and tuples of these.

    Of a `.npy` file with one object that object, else the array. Arrays are read-only, and share the memory of the file.
    `CorruptDatasetError`, which begins with `where`, for anything else, and for a damaged or truncated file.
    """
    data = io.BytesIO(file.read())
    try:
        value = _array_of(data) if data.getvalue().startswith(npy.MAGIC_PREFIX) else _Pickle().run(data)
        if rest := len(data.getbuffer()) - data.tell():
            raise ValueError(f"{rest} bytes follow its end")
    except _DAMAGE as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise CorruptDatasetError(f"{where} cannot be read: {reason}") from error
    return value


def _array_of(data: io.BytesIO) -> Any:
    shape, fortran, dtype = _HEADERS[npy.read_magic(data)](data)
    if dtype.kind != "O":
        return _filled(data.read(), dtype, shape, "F" if fortran else "C")
    array = _Pickle().run(data)
    if not isinstance(array, np.ndarray) or array.dtype.kind != "O" or array.shape != shape:
        raise ValueError(f"its header has objects of shape {shape}, its pickle other things")
    return array if shape else array.item()


# ------------------------------------------------------------------ what the functions of NumPy make


class _Unbuilt:
    """A dtype or an array between the instruction that makes it and the one that gives its state."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.build = build
        self.memoized: list[int] = []


def _dtype(kind: str, align: int = 0, copied: int = 1) -> _Unbuilt:
    if not re.fullmatch(r"[biufc][0-9]{1,2}|[SU][0-9]{1,9}|O8?", kind):
        raise ValueError(f"it holds an array of dtype {kind!r}")

    def build(state: Any) -> np.dtype:
        version, order, *fields = state
        if version != 3 or fields[:3] != [None, None, None] or len(fields) != 6:
            raise ValueError("it holds a dtype with fields, a shape or metadata")
        return np.dtype(kind).newbyteorder(order)

    return _Unbuilt(build)


def _array(kind: Any, shape: Any, code: Any) -> _Unbuilt:
    if kind is not np.ndarray:
        raise ValueError("it holds an array of another type than ndarray")

    def build(state: Any) -> np.ndarray:
        version, shape, dtype, fortran, content = state
        if version != 1:
            raise ValueError(f"it holds an array of version {version}")
        return _filled(content, dtype, shape, "F" if fortran else "C")

    return _Unbuilt(build)


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


# ------------------------------------------------------------------ the interpreter


class _Pickle:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.finished = set[int]()  # ids of lists and dicts that were read from the memo

    def run(self, data: IO[bytes]) -> Any:
        name = ""
        while name != "STOP":
            code = data.read(1)
            if code not in _INSTRUCTIONS:
                raise ValueError(f"{code!r} at byte {data.tell() - 1} is no instruction" if code else "it is truncated")
            name, read = _INSTRUCTIONS[code]
            if name not in _STEPS:
                raise ValueError(f"{name} at byte {data.tell() - 1} makes no plain value, and may run code")
            _STEPS[name](self, read and read(data))
        (value,) = self.stack
        _check(value)
        return value

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def marked(self) -> list[Any]:
        """The values since the last mark, which leave the stack."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def tuple_of(self, count: int) -> None:
        if count > len(self.stack):
            raise IndexError("it takes a value that is not there")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def append(self, values: list[Any]) -> None:
        self.open(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.open(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in _KEYS:  # the hash of a deep tuple overflows the stack
                raise ValueError(f"it holds a dict with a key of type {type(key).__name__}")
            target[key] = value

    def open(self, kind: type) -> Any:
        target = self.stack[-1]
        if type(target) is not kind or id(target) in self.finished:
            raise ValueError(f"it adds items to {type(target).__name__}, or to itself")
        return target

    def put(self, place: int) -> None:
        value = self.memo[place] = self.stack[-1]
        if isinstance(value, _Unbuilt):
            value.memoized.append(place)

    def get(self, place: int) -> None:
        value = self.memo[place]
        if isinstance(value, list | dict):
            self.finished.add(id(value))
        self.push(value)

    def named(self, name: str) -> None:
        if name not in _KNOWN:
            raise ValueError(f"it holds {name.replace(' ', '.')}, which would run code")
        self.push(_KNOWN[name])

    def stack_named(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.named(f"{module} {name}")

    def reduce(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, FunctionType):
            raise ValueError(f"it calls a {type(function).__name__}")
        self.push(function(*arguments))

    def build(self, _: Any) -> None:
        state, value = self.stack.pop(), self.stack.pop()
        if not isinstance(value, _Unbuilt):
            raise ValueError(f"it sets the state of a {type(value).__name__}, which would run code")
        built = value.build(state)
        self.memo.update(dict.fromkeys(value.memoized, built))
        self.push(built)


def _check(value: Any) -> None:
    """ValueError for what is no plain value: functions that were named and not called, arrays that were not built."""
    seen, rest = set[int](), [value]
    while rest:
        value = rest.pop()
        inner: Iterable[Any] = ()
        if isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        elif isinstance(value, np.ndarray) and value.dtype.kind == "O":
            inner = value.reshape(-1).tolist()
        elif not isinstance(value, _PLAIN):
            raise ValueError(f"it holds a {type(value).__name__}, which is no plain value")
        if inner and id(value) not in seen:
            seen.add(id(value))
            rest.extend(inner)


_INSTRUCTIONS = {each.code.encode("latin-1"): (each.name, each.arg and each.arg.reader) for each in pickletools.opcodes}
_INSTRUCTIONS[b"c"] = "GLOBAL", lambda data: f"{data.readline()[:-1].decode()} {data.readline()[:-1].decode()}"
_STEPS: dict[str, Callable[[_Pickle, Any], None]] = {
    "PROTO": lambda run, _: None,
    "FRAME": lambda run, _: None,
    "STOP": lambda run, _: None,
    "MARK": _Pickle.mark,
    "NEWTRUE": lambda run, _: run.push(True),
    "NEWFALSE": lambda run, _: run.push(False),
    "EMPTY_TUPLE": lambda run, _: run.push(()),
    "EMPTY_LIST": lambda run, _: run.push([]),
    "EMPTY_DICT": lambda run, _: run.push({}),
    "TUPLE1": lambda run, _: run.tuple_of(1),
    "TUPLE2": lambda run, _: run.tuple_of(2),
    "TUPLE3": lambda run, _: run.tuple_of(3),
    "TUPLE": lambda run, _: run.push(tuple(run.marked())),
    "APPEND": lambda run, _: run.append([run.stack.pop()]),
    "APPENDS": lambda run, _: run.append(run.marked()),
    "SETITEM": lambda run, _: run.set_items([run.stack.pop(-2), run.stack.pop()]),
    "SETITEMS": lambda run, _: run.set_items(run.marked()),
    "MEMOIZE": lambda run, _: run.put(len(run.memo)),
    "BINPUT": _Pickle.put,
    "LONG_BINPUT": _Pickle.put,
    "BINGET": _Pickle.get,
    "LONG_BINGET": _Pickle.get,
    "GLOBAL": _Pickle.named,
    "STACK_GLOBAL": _Pickle.stack_named,
    "REDUCE": _Pickle.reduce,
    "BUILD": _Pickle.build,
}
_CONSTANTS = (
    "NONE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 "
    "SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8"
)
_STEPS.update(dict.fromkeys(_CONSTANTS.split(), _Pickle.push))
