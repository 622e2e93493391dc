"""Validated reading of a description: each entry is checked before it is used."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fbuf.checkpoint.errors import CheckpointCorrupt

_WIDEST = 2**63 - 1


class Fields:
    """The entries of a described dict. Each method gives one, or raises CheckpointCorrupt saying where and what it is.

    Args:
        saved: what should be a dict.
        where: what it describes, for messages.
    """

    def __init__(self, saved: Any, where: str) -> None:
        if not isinstance(saved, Mapping):
            raise CheckpointCorrupt(f"{where}: expected named entries, found {_kind(saved)}")
        self._saved, self.where = saved, where

    def __contains__(self, name: str) -> bool:
        return name in self._saved

    def any(self, name: str) -> Any:
        """The entry, of any type."""
        if name not in self._saved:
            raise CheckpointCorrupt(f"{self.where}: the entry {name!r} is missing")
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
        fits = type(value) in (int, float) and abs(value) < 1e308 and value >= least
        if not fits:
            raise self.wrong(name, f"a finite number of at least {least}", value)
        return float(value)

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self.any(name)
        if not isinstance(value, bool):
            raise self.wrong(name, "True or False", value)
        return value

    def text(self, name: str) -> str:
        """A string."""
        value = self.any(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a text", value)
        return value

    def items(self, name: str, count: int | None = None) -> list[Any]:
        """A list, of `count` items where that is given."""
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

    def fields(self, name: str) -> "Fields":
        """A dict below this one."""
        return Fields(self.any(name), f"{self.where}, {name}")

    def array(self, name: str, dtype: Any = None, shape: tuple[int | None, ...] | None = None) -> Any:
        """An array of this dtype and shape, where None stands for any size; read it by `np.asarray`."""
        value = self.any(name)
        found = getattr(value, "dtype", None), getattr(value, "shape", None)
        if found[0] is None or found[1] is None:
            raise self.wrong(name, "an array", value)
        fits = dtype is None or found[0] == np.dtype(dtype)
        if shape is not None:
            fits &= len(found[1]) == len(shape)
            fits = fits and all(wanted in (None, size) for wanted, size in zip(shape, found[1], strict=True))
        if not fits:
            what = f"an array of {'any dtype' if dtype is None else np.dtype(dtype)} and shape {shape or 'any'}"
            raise CheckpointCorrupt(f"{self.where}: {name!r} should be {what}, found {found[0]} of {found[1]}")
        return value

    def wrong(self, name: str, wanted: str, value: Any) -> CheckpointCorrupt:
        """The error of an entry that is not what it should be."""
        return CheckpointCorrupt(f"{self.where}: {name!r} should be {wanted}, found {_kind(value)}")


def _kind(value: Any) -> str:
    shown = repr(value)[:40] if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return shown if len(shown) < 40 else shown + "..."
