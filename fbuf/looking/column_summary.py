"""The values of one key of the items: a pass over blocks of rows in bounded memory."""

import dataclasses
from collections.abc import Callable

import numpy as np

from fbuf.keywords import checked

BLOCK = 1 << 24
"""Bytes of rows that are in memory at once."""


@checked
@dataclasses.dataclass(frozen=True)
class ColumnSummary:
    """What one leaf of the items holds. Numbers are those of the rows that were looked at.

    Attributes:
        key: its path in an item, as text.
        dtype: of its values; "text", or the class of other objects. Of items that differ "float32 or int64".
        shape: of the leaf in one item, -1 for a dim in which items differ; None if they differ in the number of dims.
        bytes: that are allocated for it, for all rows of the capacity; None if not known.
        device: where these are.
        smallest: the smallest finite value; of bools 0 or 1; None if there is none, or if values are not real numbers.
        mean: of the finite values.
        largest: the largest finite value.
        nans: how many values are NaN.
        infinite: how many values are infinite.
        looked_at: how many rows were looked at: all, or evenly spaced ones.
        rows: how many rows are stored.
        measured: what the numbers are of: "values", or of text "characters".
        missing: in how many of the items that were looked at there is no such leaf.
    """

    key: str
    dtype: str
    shape: tuple[int, ...] | None
    bytes: int | None
    device: str
    smallest: int | float | None
    mean: float | None
    largest: int | float | None
    nans: int
    infinite: int
    looked_at: int
    rows: int
    measured: str = "values"
    missing: int = 0

    def to_dict(self) -> dict[str, object]:
        """The fields as plain values."""
        return {**dataclasses.asdict(self), "shape": None if self.shape is None else list(self.shape)}


@checked
def evenly(stored: int, rows: int | None) -> np.ndarray:
    """The numbers of `rows` evenly spaced rows of `stored` ones; all by default."""
    if rows is None or rows >= stored:
        return np.arange(stored)
    return np.arange(rows) * stored // rows


@checked
def rows_of(values: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """A function that reads some rows of an array: a view, if they follow each other."""

    def read(numbers: np.ndarray) -> np.ndarray:
        first, last = int(numbers[0]), int(numbers[-1]) + 1
        return values[first:last] if last - first == numbers.size else values[numbers]

    return read


@checked
def summarize(
    key: str,
    read: Callable[[np.ndarray], np.ndarray],
    numbers: np.ndarray,
    *,
    dtype: np.dtype,
    shape: tuple[int, ...],
    stored: int,
    per_row: int = 1,
    bytes: int | None = None,
    device: str = "cpu",
) -> ColumnSummary:
    """The summary of a leaf. O(rows looked at), with a block of 16 MiB in memory, or a row.

    Args:
        key: path of the leaf, as text.
        read: returns the rows of ascending numbers as a NumPy array: for an array in memory `rows_of(values)`.
        numbers: of the rows to look at: see `evenly`.
        dtype: of the leaf.
        shape: of the leaf in one item.
        stored: how many rows are stored.
        per_row: items of a row.
        bytes: that are allocated.
        device: of the memory.
    """
    row_bytes = max(int(np.prod(shape, dtype=np.int64)) * per_row * np.dtype(dtype).itemsize, 1)
    step = max(BLOCK // row_bytes, 1)
    total = Total()
    for first in range(0, numbers.size, step):
        total.add(read(numbers[first : first + step]))
    return total.summary(key, str(np.dtype(dtype)), tuple(shape), bytes, device, int(numbers.size), stored)


@checked
class Total:
    """Smallest, largest and mean of the finite values so far, and how many are not."""

    def __init__(self) -> None:
        self.smallest: int | float | None = None
        self.largest: int | float | None = None
        self._sum = 0.0  # in units of `_UNIT`
        self.finite = self.nans = self.infinite = 0

    def add(self, block: np.ndarray) -> None:
        """Count values. Of other dtypes than real and complex numbers nothing is known."""
        if block.dtype.kind == "V" and block.dtype.fields is None:
            block = block.astype(np.float32)  # bfloat16 and others that NumPy has no reductions for
        if block.dtype.kind == "c":
            nan = np.isnan(block)
            self.nans, self.infinite = self.nans + int(nan.sum()), self.infinite + int((np.isinf(block) & ~nan).sum())
            return
        if block.dtype.kind not in "biuf" or not block.size:
            return
        if block.dtype.kind == "f" and not (np.isfinite(block.min()) and np.isfinite(block.max())):
            finite, nan = np.isfinite(block), np.isnan(block)
            self.nans, self.infinite = self.nans + int(nan.sum()), self.infinite + int((~finite & ~nan).sum())
            block = block[finite]
            if not block.size:
                return
        low, high = block.min().item(), block.max().item()
        if block.dtype.kind == "b":
            low, high = int(low), int(high)
        self.smallest = low if self.smallest is None else min(self.smallest, low)
        self.largest = high if self.largest is None else max(self.largest, high)
        self.finite += block.size
        self._sum += _sum(block)

    @property
    def mean(self) -> float | None:
        """Of the finite values; None without any."""
        return self._sum / self.finite * _UNIT if self.finite else None

    def summary(
        self,
        key: str,
        dtype: str,
        shape: tuple[int, ...] | None,
        bytes: int | None,
        device: str,
        looked_at: int,
        rows: int,
        measured: str = "values",
        missing: int = 0,
    ) -> ColumnSummary:
        """The summary of a leaf with these values. The arguments are as in `ColumnSummary`."""
        numbers = (self.smallest, self.mean, self.largest, self.nans, self.infinite)
        return ColumnSummary(key, dtype, shape, bytes, device, *numbers, looked_at, rows, measured, missing)


_UNIT = 2.0**64
"""Of sums: a power of two, which changes no digit of them, so large that the sum of all values is a float."""


def _sum(block: np.ndarray) -> float:
    """The sum of finite values in units of `_UNIT`."""
    with np.errstate(over="ignore"):
        found = float(block.sum(dtype=np.float64))
    return found / _UNIT if np.isfinite(found) else float((block / _UNIT).sum(dtype=np.float64))
