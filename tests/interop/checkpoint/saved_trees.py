"""Saved trees as they come back from a file, and with things wrong in them."""

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from fbuf.checkpoint.manifest import lift, lower


def through_json(tree: Any) -> Any:
    """The tree after its way through a file: JSON, and copies of its arrays that cannot be written to."""
    arrays: list[np.ndarray] = []

    def place(value: Any) -> dict[str, Any]:
        arrays.append(np.array(value))
        arrays[-1].setflags(write=False)
        return {"$array": len(arrays) - 1}

    described = json.loads(json.dumps(lower(tree, place), allow_nan=False))
    return lift(described, lambda _, number: arrays[number])


WRONG = [
    None,
    True,
    "x",
    -1,
    0,
    1,
    2**40,
    2**63 - 1,
    -(2**62),
    1.5,
    math.nan,
    math.inf,
    -0.5,
    1e300,
    [],
    {},
    [1],
    ["a"],
]


def wrong_arrays(array: np.ndarray) -> Iterator[np.ndarray]:
    """Others than this one: of another dtype, shape, size, or with values that it cannot have."""
    for dtype in (np.float64, np.float32, np.int64, np.int32, np.uint8, np.bool_, np.uint32):
        if array.dtype != dtype:
            yield array.astype(dtype)
    yield array[..., None]
    yield array.reshape(-1)[:-1]
    yield np.concatenate((array.reshape(-1), array.reshape(-1)[:1], array.reshape(-1)[:1]))
    yield np.zeros(0, array.dtype)
    yield np.array(array.reshape(-1)[:1].sum())
    if array.size:
        for value in (-1, -7, 2**31 - 1, math.nan, math.inf, 0):
            can_be = array.dtype.kind == "f" or (math.isfinite(value) and (value >= 0 or array.dtype.kind == "i"))
            if can_be:
                changed = array.copy()
                changed.reshape(-1)[-1] = value
                yield changed


def damaged(tree: Any) -> Iterator[tuple[str, Any]]:
    """Where, and the tree with one entry that is missing, or other than it should be."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield f"no {key}", {name: each for name, each in tree.items() if name != key}
            for where, changed in _others(value):
                yield f"{key} {where}", {**tree, key: changed}
        yield "unknown", {**tree, "unknown": 1}
    elif isinstance(tree, list):
        for place, value in enumerate(tree[:3]):
            yield f"without {place}", tree[:place] + tree[place + 1 :]
            for where, changed in _others(value):
                yield f"{place} {where}", [*tree[:place], changed, *tree[place + 1 :]]


def _others(value: Any) -> Iterator[tuple[str, Any]]:
    yield from (("is " + repr(each), each) for each in WRONG if type(each) is not type(value) or each != value)
    yield "is an array", np.arange(3)
    yield "is a float array", np.array(math.nan)
    if isinstance(value, np.ndarray):
        yield from ((f"is {other.dtype}{other.shape}", other) for other in wrong_arrays(value))
    yield from damaged(value)


def put_into(target: Any, saved: Any) -> None:
    """Load a sampler or a writer."""
    target.with_state(through_json(saved))()
