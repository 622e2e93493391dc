"""A saved tree, dicts with text keys, lists, plain values and arrays, as JSON that says where its arrays are."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from fbuf.checkpoint.arrays import Columns
from fbuf.checkpoint.errors import CheckpointCorrupt

_DEPTH = 200
_MARK = "$"  # begins the keys that say what a dict stands for


def lower(value: Any, place: Callable[[Any], dict[str, Any]], depth: int = 0) -> Any:
    """The tree for JSON; `place` gives the description of an array, or of columns. TypeError for other values."""
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"an integer of more than 64 bits cannot be saved: {value}")
        return value
    if type(value) is float:
        return value if -1e308 <= value <= 1e308 else {"$float": value.hex()}
    if depth > _DEPTH:
        raise ValueError(f"what is to be saved is nested more than {_DEPTH} deep")
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"the keys of what is saved must be texts, got {[*value][:5]}")
        entries = {key: lower(each, place, depth + 1) for key, each in value.items()}
        return {"$dict": entries} if any(key.startswith(_MARK) for key in entries) else entries
    if isinstance(value, list | tuple):
        return [lower(each, place, depth + 1) for each in value]
    if isinstance(value, np.ndarray | np.generic | Columns):
        return place(value)
    raise TypeError(f"{type(value).__name__} cannot be saved here")


def lift(value: Any, found: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """The tree again; `found(mark, description)` gives what stands for an array. CheckpointCorrupt for no such tree."""
    if not isinstance(value, list | dict):
        return value
    if depth > _DEPTH:
        raise CheckpointCorrupt(f"the manifest is nested more than {_DEPTH} deep")
    if isinstance(value, list):
        return [lift(each, found, depth + 1) for each in value]
    if len(value) == 1:
        (mark, described), *_ = value.items()
        if mark == "$dict" and isinstance(described, dict):
            return {key: lift(each, found, depth + 1) for key, each in described.items()}
        if mark == "$float":
            return _float(described)
        if mark.startswith(_MARK):
            return found(mark, described)
    if any(key.startswith(_MARK) for key in value):
        raise CheckpointCorrupt(f"unknown entries in the manifest: {[*value][:5]}")
    return {key: lift(each, found, depth + 1) for key, each in value.items()}


def _float(text: Any) -> float:
    try:
        return float.fromhex(text)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointCorrupt("a number in the manifest is none") from error


def dump_json(value: Any) -> bytes:
    """JSON in one line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def parse_json(text: bytes, name: str) -> Any:
    """Strict JSON: no NaN, no key twice, no endless nesting. CheckpointCorrupt naming the file for anything else."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{name}: not the JSON that was written ({error})") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
