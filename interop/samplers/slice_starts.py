"""Which items can begin a slice, where slices begin by the priority of an item."""

import numpy as np

from interop.samplers.boundaries import Boundaries


def starts_of(index: Boundaries, need: int, length: int, strict: bool, since: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots that may have begun or ceased to be starts since time `since`, and whether each is one now.

    A start has `need` stored items from it to the end of its trajectory, which, if strict, has `length`; otherwise the
    first stored item of a trajectory is one, too. O((rows since + length) * lanes); O(items) where interleaved.
    """
    if index._turns is not None:
        found = index._turns.at_least(1)
        many = found[:, 2] - found[:, 1] + 1
        behind = np.concatenate([np.arange(each, 0, -1) for each in many]) if len(many) else np.zeros(0, np.int64)
        slots = index._turns.rows[np.repeat(found[:, 2], many) + 1 - behind]
        return slots, _is_start(behind, np.repeat(many, many), need, length, strict)
    low = max(min(since - length, index.now), index.oldest)
    parts = [(low, index.now)]
    if low > index.oldest:  # where rows were written over, trajectories became shorter
        parts.append((index.oldest, min(index.oldest + length, low)))
    slots, allowed = zip(*(_starts_in(index, *part, need, length, strict) for part in parts), strict=True)
    return np.concatenate(slots), np.concatenate(allowed)


def _starts_in(
    index: Boundaries, low: int, high: int, need: int, length: int, strict: bool
) -> tuple[np.ndarray, np.ndarray]:
    wide_low, wide_high = max(low - length, index.oldest), min(high + length, index.now)
    rows = index.rows_at(np.arange(wide_low, wide_high))
    at = np.arange(len(rows))[:, None]
    ends = index.ends[rows]
    far = len(rows) + length
    if wide_high == index.now and len(rows):
        ends[-1] = True
    stop = np.minimum.accumulate(np.where(ends, at, far)[::-1])[::-1]
    begun = np.where(ends, at + 1, -far if wide_low > index.oldest else 0)
    start = np.concatenate([begun[:1] * 0 + (-far if wide_low > index.oldest else 0), begun[:-1]])
    start = np.maximum.accumulate(start)
    behind, stored = stop - at + 1, stop - start + 1
    allowed = _is_start(behind, stored, need, length, strict)
    slots = rows[:, None] * index.lanes + np.arange(index.lanes)
    inner = slice(low - wide_low, high - wide_low)
    return slots[inner].reshape(-1), allowed[inner].reshape(-1)


def _is_start(behind: np.ndarray, stored: np.ndarray, need: int, length: int, strict: bool) -> np.ndarray:
    """Whether items with `behind` stored ones from them on, of a trajectory of `stored`, begin a slice."""
    return (behind >= need) & (stored >= length) if strict else (behind >= need) | (behind == stored)
