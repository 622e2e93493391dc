"""Numbers that users give."""

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
