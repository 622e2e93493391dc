"""Comparing rows bit for bit, in pieces that fit into a cache."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from interop.ted.row_values import dense, words

_PIECE = 1 << 19  # bytes


def first_apart(one: Tensor, another: Tensor, passed: np.ndarray | None = None) -> int | None:
    """The first row in which two tensors of one shape and dtype differ in any bit, but for those of `passed`, in order."""
    passed = np.array([], np.int64) if passed is None else passed
    for (start, held), (_, other) in zip(_pieces(one), _pieces(another), strict=True):
        differs = held != other
        first, last = np.searchsorted(passed, (start, start + len(held)))
        differs[passed[first:last] - start] = False
        if differs.any():
            return start + int(differs.any(1).argmax())
    return None


def first_set(rows: Tensor) -> int | None:
    """The first row with a bit that is set."""
    for start, held in _pieces(rows):
        if held.any():
            return start + int(held.any(1).argmax())
    return None


def _pieces(rows: Tensor) -> Iterator[tuple[int, np.ndarray]]:
    """The words of rows, piece by piece, with the first row of each. Nothing where rows have no bytes."""
    count, size = rows.shape[0], rows.numel() * rows.element_size()
    if not size:
        return
    step = max(1, _PIECE * count // size)
    in_place = rows.device.type == "cpu" and rows.is_contiguous()
    held = words(dense(rows), 1) if in_place else None
    for start in range(0, count, step):
        yield start, words(dense(rows[start : start + step]), 1) if held is None else held[start : start + step]
