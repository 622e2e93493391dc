"""Fewer values that look the same: bins, curves of extremes, histograms."""

import dataclasses

import numpy as np

BARS = 48  # of a histogram


@dataclasses.dataclass(frozen=True)
class Summary:
    """Numbers of an entry, and the histogram of those that are finite.

    Attributes:
        counts: int [bars], how many are in each of the equal parts from `low` to `high`.
    """

    count: int
    low: float
    mean: float
    high: float
    deviation: float
    nan: int
    infinite: int
    counts: list[int]


def summary(values: np.ndarray) -> Summary:
    """Of any real numbers. Infinite and NaN where none is finite."""
    flat = values.reshape(-1).astype(np.float64)
    finite = flat[np.isfinite(flat)]
    nan = int(np.isnan(flat).sum())
    if not finite.size:
        return Summary(flat.size, np.nan, np.nan, np.nan, np.nan, nan, flat.size - nan, [])
    low, high = float(finite.min()), float(finite.max())
    bars = BARS
    if values.dtype.kind in "iub" and high - low < BARS:
        bars = int(high - low) + 1  # one for each whole number
        counts = np.bincount((finite - low).astype(np.int64), minlength=bars)
    elif high > low:
        counts = np.bincount(
            np.minimum((finite - low) / (high - low) * bars, bars - 1).astype(np.int64), minlength=bars
        )
    else:
        counts = np.array([finite.size])
    with np.errstate(over="ignore"):
        mean, deviation = float(finite.mean()), float(finite.std())
    return Summary(flat.size, low, mean, high, deviation, nan, flat.size - nan - finite.size, counts.tolist())


def evenly(count: int, most: int) -> np.ndarray:
    """At most `most` of the numbers below `count`, evenly spaced, with the first and the last one."""
    if count <= most:
        return np.arange(count)
    return np.linspace(0, count - 1, most).round().astype(np.int64)


def extremes(curves: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Curves [n, steps] as at most `most` points each: the lowest and the highest value of each of equal parts.

    Returns the steps of the points, [points], and the points, [n, points]. Narrow peaks stay.
    """
    steps = curves.shape[1]
    if steps <= most:
        return np.arange(steps), curves
    edges = np.linspace(0, steps, most // 2 + 1).astype(np.int64)
    starts = edges[:-1]
    low, high = (np.asarray(of.reduceat(curves, starts, axis=1)) for of in (np.fmin, np.fmax))
    falls = curves[:, starts] > curves[:, edges[1:] - 1]  # the highest value comes first
    points = np.stack([np.where(falls, high, low), np.where(falls, low, high)], -1).reshape(len(curves), -1)
    return np.stack([starts, (starts + edges[1:]) // 2], -1).reshape(-1), points


def binned(values: np.ndarray, bins: np.ndarray, count: int) -> np.ndarray:
    """The mean of values in each of `count` bins, float32; NaN for an empty one and where all are NaN."""
    known = ~np.isnan(values)
    sums = np.bincount(bins[known], values[known], minlength=count)
    counts = np.bincount(bins[known], minlength=count)
    with np.errstate(invalid="ignore", divide="ignore"):
        means: np.ndarray = (sums / counts).astype(np.float32)
    return means
