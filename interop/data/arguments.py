"""Arguments that users give: numbers, names of classes for errors, and libraries of extras."""

import importlib
import math
import sys
from types import ModuleType
from typing import Any

from fbuf import checks


def whole(name: str, value: Any, least: int = 1) -> int:
    """A Python int for a whole number: an int of any library, a float such as 1e5, an array or tensor without dims.

    TypeError for anything else: other floats, infinite ones and NaN, bools. ValueError below `least`.
    """
    return checks.as_int(name, value, least)


def not_negative(name: str, value: Any) -> float:
    """A Python float for a number. ValueError for one that is negative or not finite."""
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return number


def class_of(value: object) -> str:
    """The full name of an object's class, and the class of this package to use where one has the same name."""
    kind = value if isinstance(value, type) else type(value)
    interop = sys.modules["interop"]
    module = "interop" if getattr(interop, kind.__name__, None) is kind else kind.__module__
    named = f"{module}.{kind.__qualname__}".removeprefix("builtins.")
    for base in kind.__mro__:
        ours = getattr(interop, base.__name__, base)
        if ours is not base and isinstance(ours, type):
            return f"{named}; use interop.{base.__name__}{'' if base is kind else ' as its base'}"
    return named


def required(name: str, extra: str) -> ModuleType:
    """The module of an optional library. ImportError that names the extra where it is not installed."""
    library = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise ImportError(f"{library} is not installed: pip install 'fbuf[{extra}]'", name=library) from error
