"""Arrays as bytes of files."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fbuf.checkpoint.dtypes import name_of

_SMALLEST, _LARGEST, _PARTS = 1 << 18, 1 << 24, 256


class Columns:
    """Arrays with the same first dim, the rows, which are cut into files together: a part of the rows is one file.

    What changes few rows changes few files, and those that stay as they are need not be written again.

    Args:
        arrays: the columns, [rows, ...] each; they are not copied.
        capacity: rows that there may be one day. Where files begin depends on it, not on the rows there are now.
    """

    def __init__(self, arrays: Sequence[Any], capacity: int | None = None) -> None:
        self.arrays = [_native(np.asarray(each)) for each in arrays]
        rows = {each.shape[0] if each.ndim else None for each in self.arrays}
        if len(rows) > 1 or None in rows:
            raise ValueError(f"columns must have the same first dim, got shapes {[each.shape for each in self.arrays]}")
        self.rows: int = rows.pop() or 0 if rows else 0
        self.dtypes = [each.dtype for each in self.arrays]
        list(map(name_of, self.dtypes))  # TypeError for dtypes that cannot be saved
        self.shapes = [each.shape[1:] for each in self.arrays]
        width = sum(row_bytes(each.dtype, each.shape[1:]) for each in self.arrays)
        whole = width * max(self.rows, capacity or 0)
        size = min(max(whole // _PARTS, _SMALLEST), _LARGEST)
        self.rows_a_file = 1 << max(0, int(size // width).bit_length() - 1) if width else max(self.rows, 1)

    def check(self) -> None:
        """Nothing: memory is not damaged. See `StoredColumns`."""

    def read_into(self, arrays: Sequence[np.ndarray | None]) -> None:
        """Fill arrays of [rows, ...]; None for a column that is not wanted."""
        for array, column in zip(arrays, self.arrays, strict=True):
            if array is not None:
                array[...] = column

    def parts(self) -> list[list[np.ndarray]]:
        """The bytes of each file: one piece a column, [bytes] uint8 each."""
        step = self.rows_a_file
        return [[as_bytes(each[at : at + step]) for each in self.arrays] for at in range(0, self.rows, step)]


def row_bytes(dtype: np.dtype, shape: Sequence[int]) -> int:
    """Bytes of one row."""
    return dtype.itemsize * math.prod(shape)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The memory of an array, [bytes] uint8; a copy only where it is not in one piece."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _native(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
