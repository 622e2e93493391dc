"""Pickles of plain values, run without importing or calling what they name.

A pickle is a program. The interpreter here knows the instructions that make plain values, and calls functions that the
caller gives in the place of those that a pickle names. The interpreters of `pickle` are no base for it: a few damaged
bytes make them take all memory, or overflow the stack.
"""

import io
import pickletools
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import numpy as np

_KEYS = (str, bytes, int, float, bool, type(None))
_PLAIN = (*_KEYS, bytearray, np.ndarray, np.generic)


class Unbuilt:
    """A value between the instruction that makes it and the one that gives its state."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.build = build
        self.memoized: list[int] = []


def unpickled(data: io.BytesIO, known: Mapping[str, Any]) -> Any:
    """What a pickle holds: numbers, text, bytes, None, arrays, and dicts, lists and tuples of these.

    `known` has functions by module and name, "numpy dtype", and what else a pickle may name. A function returns the value,
    or an `Unbuilt`. ValueError, TypeError, LookupError, AttributeError, OverflowError or RecursionError for anything else.
    """
    return _Pickle(known).run(data)


class _Pickle:
    """A pickle that is being run."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.finished = set[int]()  # ids of lists and dicts that were read from the memo

    def run(self, data: io.BytesIO) -> Any:
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
        if isinstance(value, Unbuilt):
            value.memoized.append(place)

    def get(self, place: int) -> None:
        value = self.memo[place]
        if isinstance(value, list | dict):
            self.finished.add(id(value))
        self.push(value)

    def named(self, name: str) -> None:
        if name not in self.known:
            raise ValueError(f"it holds {name.replace(' ', '.')}, which would run code")
        self.push(self.known[name])

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
        if not isinstance(value, Unbuilt):
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
