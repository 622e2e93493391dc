"""Numbers that users give."""

import math
import operator
from typing import Any

import torch


def whole(name: str, value: Any, least: int = 1) -> int:
    """A Python int for an int of any library. TypeError for anything else, bools too; ValueError below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
        raise TypeError(f"{name} must be an int, got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def not_negative(name: str, value: Any) -> float:
    """A Python float for a number. ValueError for one that is negative or not finite."""
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return number
