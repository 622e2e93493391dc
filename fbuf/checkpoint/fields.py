"""Errors of checkpoints, and reading of descriptions: each entry is checked before it is used."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from fbuf.keywords import checked

_T = TypeVar("_T")
_WIDEST = 2**63 - 1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The target of the load is unchanged."""


class CheckpointCorrupt(CheckpointError):  # noqa: N818  # reads as what it is
    """Files of a checkpoint are missing, damaged or not of this format; the message names the file."""


class CheckpointMismatch(CheckpointError):  # noqa: N818
    """A checkpoint is complete, but the target of the load is of another kind; the message lists the differences."""


@checked
class Fields:
    """The entries of a described dict. Each method returns one, or raises `corrupt` with its place and content.

    Args:
        saved: the dict; anything else is corrupt.
        where: its place in the checkpoint, for messages.
    """

    corrupt: ClassVar[type[Exception]] = CheckpointCorrupt

    def __init__(self, saved: Any, where: str) -> None:
        if not isinstance(saved, Mapping):
            raise self.corrupt(f"{where}: expected named entries, found {_shown(saved)}")
        self._saved, self.where = saved, where

    def __contains__(self, name: str) -> bool:
        return name in self._saved

    def __iter__(self) -> Iterator[str]:
        """The names. CheckpointCorrupt for one that is no text."""
        for name in self._saved:
            if not isinstance(name, str):
                raise self.corrupt(f"{self.where}: an entry is named {_shown(name)}, which is no text")
            yield name

    def any(self, name: str) -> Any:
        """An entry of any type."""
        if name not in self._saved:
            raise self.corrupt(f"{self.where}: the entry {name!r} is missing")
        return self._saved[name]

    def whole(self, name: str, least: int = 0, most: int = _WIDEST) -> int:
        """An integer of [least, most]."""
        value = self.any(name)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"an integer from {least} to {most}", value)
        return value

    def number(self, name: str, least: float = -math.inf) -> float:
        """A finite number of at least `least`."""
        value = self.any(name)
        if type(value) not in (int, float) or not abs(value) < 1e308 or value < least:
            raise self.wrong(name, f"a finite number of at least {least}", value)
        return float(value)

    def flag(self, name: str) -> bool:
        return self._of_type(name, bool, "True or False")

    def text(self, name: str) -> str:
        return self._of_type(name, str, "a text")

    def items(self, name: str, count: int | None = None) -> list[Any]:
        """A list, of `count` items if that is given."""
        value = self.any(name)
        if not isinstance(value, list | tuple) or (count is not None and len(value) != count):
            raise self.wrong(name, "a list" if count is None else f"a list of {count} items", value)
        return list(value)

    def wholes(self, name: str, least: int = 0) -> tuple[int, ...]:
        """A list of integers, such as a shape."""
        values = self.items(name)
        if not all(type(value) is int and least <= value <= _WIDEST for value in values):
            raise self.wrong(name, f"a list of integers of at least {least}", values)
        return tuple(values)

    def fields(self, name: str) -> Self:
        """A dict inside this one."""
        return type(self)(self.any(name), f"{self.where}, {name}")

    def array(self, name: str, dtype: Any = None, shape: tuple[int | None, ...] | None = None) -> Any:
        """An array of this dtype and shape, where None stands for any size; read it by `np.asarray`."""
        value = self.any(name)
        if not hasattr(value, "dtype") or not hasattr(value, "shape"):
            raise self.wrong(name, "an array", value)
        fits = dtype is None or value.dtype == np.dtype(dtype)
        if shape is not None:
            sizes = zip(shape, value.shape, strict=False)
            fits &= len(value.shape) == len(shape) and all(wanted in (None, size) for wanted, size in sizes)
        if not fits:
            wanted = f"an array of {'any dtype' if dtype is None else np.dtype(dtype)} and shape {shape or 'any'}"
            raise self.corrupt(f"{self.where}: {name!r} should be {wanted}, found {value.dtype} of {value.shape}")
        return value

    def wrong(self, name: str, wanted: str, value: Any) -> Exception:
        """The error of an entry that is not as it should be."""
        return self.corrupt(f"{self.where}: {name!r} should be {wanted}, found {_shown(value)}")

    def _of_type(self, name: str, kind: type[_T], wanted: str) -> _T:
        value = self.any(name)
        if not isinstance(value, kind):
            raise self.wrong(name, wanted, value)
        return value


def _shown(value: Any) -> str:
    shown = repr(value)[:40] if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return shown if len(shown) < 40 else shown + "..."
