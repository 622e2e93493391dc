"""Arguments that users give: numbers, names of classes for errors, and libraries of extras."""

import functools
import importlib
import inspect
import math
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from fbuf import checks
from interop.data.keys import nearest

EMPTY = (
    "Cannot sample from an empty storage. Call extend() or add() first; a transform such as MultiStepTransform holds the "
    "first rows back until it knows what follows them."
)
"""The text of the error of a draw where nothing is stored."""


def whole(name: str, value: Any, least: int = 1) -> int:
    """A Python int for a whole number: an int of any library, a float such as 1e5, an array or tensor without dims.

    TypeError for anything else: other floats, infinite ones and NaN, bools. ValueError below `least`.
    """
    return checks.as_int(name, value, least)


def not_negative(name: str, value: Any) -> float:
    """A Python float for a number. ValueError for one that is negative or not finite, TypeError for text and None."""
    if value is None or isinstance(value, str | bytes | bool):
        raise TypeError(f"{name} must be a number that is finite and at least 0, got {value!r}")
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return number


def refuse_unknown(kind: type, arguments: Iterable[str]) -> None:
    """TypeError for names of arguments that a class does not take, with the nearest of those that it takes."""
    known = _arguments_of(kind)
    unknown = [name for name in arguments if known is not None and name not in known]
    if known is not None and unknown:
        near = nearest(unknown, known)
        takes = f". It takes {', '.join(known)}" if known else ". It takes none"
        raise TypeError(f"{kind.__name__}() got an unexpected keyword argument {unknown[0]!r}{near}{takes}")


@functools.cache
def _arguments_of(kind: type) -> tuple[str, ...] | None:
    """The names that the constructor of a class takes; None if it takes any."""
    try:
        parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]  # type: ignore[misc]
    except (TypeError, ValueError):  # of a class without a constructor in Python
        return None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    return tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))


def there(device: torch.device) -> torch.device:
    """The device. RuntimeError for a GPU that torch does not see."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(
            f"device={str(device)!r}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here. Use "
            "device='cpu', or install a build of torch for CUDA and check torch.cuda.is_available()"
        )
    return device


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
