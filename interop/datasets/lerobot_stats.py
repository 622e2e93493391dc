"""Statistics of the features of a LeRobot dataset, which its trainers normalize with: of an episode, and of several."""

from collections.abc import Mapping, Sequence

import numpy as np

Stats = dict[str, np.ndarray]
"""`min`, `max`, `mean`, `std` and the quantiles `q01` to `q99` of each component, and `count` [1]: the rows."""
_QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
_MOST_ROWS = 10_000  # of which quantiles are computed
_MOST_VALUES = 1 << 21


class NumberStats:
    """Statistics of numbers [n, ..., D] that come piece by piece, for each of the D components.

    Values that are not finite do not count; a component without others has zeros. Minimum, maximum, mean and standard
    deviation are those of all rows. Quantiles are of rows in equal distances, 10,000 or 2 million values at most, so that
    memory is bounded.

    Args:
        rows: how many there will be.
        width: of a row, in values.
    """

    def __init__(self, rows: int, width: int) -> None:
        kept = min(rows, _MOST_ROWS, max(1, _MOST_VALUES // max(width, 1)))
        self._kept_at = np.unique(np.linspace(0, rows - 1, kept).astype(np.int64))
        self._rows = 0
        self._kept: list[np.ndarray] = []
        self._count = self._mean = self._squares = np.zeros(0)
        self._min = self._max = np.zeros(0)

    def add(self, values: np.ndarray) -> None:
        """Append rows."""
        first, last = np.searchsorted(self._kept_at, [self._rows, self._rows + len(values)])
        at = self._kept_at[first:last] - self._rows
        width = values.shape[-1]
        self._kept.append(values[at].astype(np.float64).reshape(-1, width))
        self._rows += len(values)
        flat = values.reshape(-1, width).astype(np.float64)
        finite = np.isfinite(flat)
        count = finite.sum(0)
        zeros = np.where(finite, flat, 0.0)
        mean = zeros.sum(0) / np.maximum(count, 1)
        squares = (np.where(finite, flat - mean, 0.0) ** 2).sum(0)
        low = np.where(finite, flat, np.inf).min(0)
        high = np.where(finite, flat, -np.inf).max(0)
        if not len(self._count):
            self._count, self._mean, self._squares, self._min, self._max = count, mean, squares, low, high
            return
        total = np.maximum(self._count + count, 1)
        apart = mean - self._mean
        self._squares = self._squares + squares + apart**2 * self._count * count / total
        self._mean = self._mean + apart * count / total
        self._count = self._count + count
        self._min, self._max = np.minimum(self._min, low), np.maximum(self._max, high)

    def result(self) -> Stats:
        """The statistics of all rows so far, each [D]."""
        there = self._count > 0
        kept = np.concatenate(self._kept)
        kept = np.where(np.isfinite(kept), kept, np.nan)
        kept[:, np.isnan(kept).all(0)] = 0.0
        quantiles = np.nanquantile(kept, [*_QUANTILES.values()], axis=0)
        return {
            "min": np.where(there, self._min, 0.0),
            "max": np.where(there, self._max, 0.0),
            "mean": np.where(there, self._mean, 0.0),
            "std": np.sqrt(self._squares / np.maximum(self._count, 1)),
            "count": np.array([self._rows]),
            **dict(zip(_QUANTILES, quantiles, strict=True)),
        }


class ImageStats:
    """Statistics of images [n, H, W, C] of uint8 that come piece by piece, for each channel, of values from 0 to 1.

    They are exact for all pixels of images in equal distances, as many as upstream takes of an episode: n ** 0.75, and at
    least 100. Memory is a histogram.

    Args:
        rows: how many there will be.
        channels: of an image.
    """

    def __init__(self, rows: int, channels: int) -> None:
        kept = max(min(rows, 100), min(int(rows**0.75), _MOST_ROWS))
        self._kept_at = np.unique(np.round(np.linspace(0, rows - 1, kept)).astype(np.int64))
        self._rows = 0
        self._counts = np.zeros((channels, 256), np.int64)

    def add(self, images: np.ndarray) -> None:
        """Append images."""
        first, last = np.searchsorted(self._kept_at, [self._rows, self._rows + len(images)])
        for image in images[self._kept_at[first:last] - self._rows]:
            for channel, counts in enumerate(self._counts):
                counts += np.bincount(image[..., channel].reshape(-1), minlength=256)
        self._rows += len(images)

    def result(self) -> Stats:
        """The statistics of all images so far, each [C, 1, 1]."""
        levels = np.arange(256) / 255.0
        total = self._counts.sum(1, keepdims=True)
        mean = (self._counts * levels).sum(1, keepdims=True) / total
        seen = self._counts > 0
        below = self._counts.cumsum(1) / total
        found = {
            "min": levels[seen.argmax(1)],
            "max": levels[255 - seen[:, ::-1].argmax(1)],
            "mean": mean[:, 0],
            "std": np.sqrt((self._counts * (levels - mean) ** 2).sum(1) / total[:, 0]),
            **{name: levels[(below >= share).argmax(1)] for name, share in _QUANTILES.items()},
        }
        stats = {name: values.reshape(-1, 1, 1) for name, values in found.items()}
        return {**stats, "count": np.array([min(len(self._kept_at), self._rows)])}


def together(parts: Sequence[Stats]) -> Stats:
    """The statistics of several parts as one. Quantiles are means, weighted by the counts, as upstream computes them.

    Only statistics that all parts have.
    """
    counts = np.concatenate([np.asarray(part["count"], np.float64).reshape(1) for part in parts])
    shares = counts / counts.sum()
    names = [name for name in parts[0] if all(name in part for part in parts)]
    stacked = {name: np.stack([np.asarray(part[name], np.float64) for part in parts]) for name in names}

    def mean_of(values: np.ndarray) -> np.ndarray:
        return np.tensordot(shares, values, 1)

    mean = mean_of(stacked["mean"])
    found = {name: mean_of(values) for name, values in stacked.items()}
    found |= {"min": stacked["min"].min(0), "max": stacked["max"].max(0), "mean": mean}
    found["std"] = np.sqrt(mean_of(stacked["std"] ** 2 + (stacked["mean"] - mean) ** 2))
    found["count"] = np.array([int(counts.sum())])
    return found


def as_lists(stats: Mapping[str, Stats]) -> dict[str, dict[str, object]]:
    """Statistics by feature, as JSON has them."""
    return {name: {kind: values.tolist() for kind, values in each.items()} for name, each in stats.items()}
