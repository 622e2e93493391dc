"""Stands between the library and the functions of `os` that it changes and reads files with."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

CHANGING = (
    "mkdir",
    "open",
    "write",
    "fsync",
    "link",
    "rename",
    "replace",
    "unlink",
    "rmdir",
    "chmod",
    "ftruncate",
    "close",
)
READING = ("read", "readv", "fstat", "stat", "listdir", "scandir")
OTHERS = ((fcntl, "flock"), (np, "concatenate"))
Hook = Callable[[int, str, str, tuple[Any, ...], Any], Any]


@contextlib.contextmanager
def watched(hook: Hook, readings: bool = False) -> Iterator[list[str]]:
    """Have `hook(number, name, when, arguments, real)` called "before" and "after" each operation.

    What it returns "before", if it is not None, is called in the place of the operation. Gives the names of all operations
    so far. Opening a file for reading, and reading, count only with `readings`.
    """
    names: list[str] = []
    lock = threading.Lock()
    depth = threading.local()
    modules = [(os, name) for name in (*CHANGING, *(READING if readings else ()))]
    modules += OTHERS if readings else ()
    kept = [(module, name, getattr(module, name)) for module, name in modules]

    def watching(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            changes = name != "open" or readings or bool((args[1] if len(args) > 1 else 0) & (os.O_CREAT | os.O_TRUNC))
            if not changes or getattr(depth, "inside", False):
                return real(*args, **kwargs)
            with lock:
                number = len(names)
                names.append(name)
            depth.inside = True
            try:
                other = hook(number, name, "before", args, kwargs)
                result = (other or real)(*args, **kwargs)
                hook(number, name, "after", args, result)
                return result
            finally:
                depth.inside = False

        return call

    for module, name, real in kept:
        setattr(module, name, watching(name, real))
    try:
        yield names
    finally:
        for module, name, real in kept:
            setattr(module, name, real)


def nothing(number: int, name: str, when: str, args: tuple[Any, ...], result: Any) -> None:
    """A hook that only has operations counted."""
