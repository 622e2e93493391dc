"""Arrays as bytes of files, and the dtypes that files may have."""

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from fbuf.keywords import checked

_INTEGERS = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]
_FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
_EIGHT_BITS = ["e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"]
_MORE = ["bfloat16", *(f"float8_{name}" for name in _EIGHT_BITS), "int2", "int4", "uint2", "uint4"]
# A dtype name in a file is looked up here and nowhere else.
BY_NAME: dict[str, np.dtype] = {name: np.dtype(name) for name in ["bool", *_INTEGERS, *_FLOATS]} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in _MORE if hasattr(ml_dtypes, name)
}
_SMALLEST, _LARGEST, _PARTS = 1 << 18, 1 << 24, 256


def name_of(dtype: np.dtype) -> str:
    """The name of a dtype. TypeError for one that files cannot have."""
    native = dtype.newbyteorder("=")
    if BY_NAME.get(native.name) != native:
        raise TypeError(f"an array of dtype {dtype} cannot be saved; known are {', '.join(BY_NAME)}")
    return native.name


@checked
class Columns:
    """Arrays with the same first dim, the rows. Each file holds some rows of all arrays.

    A change of few rows changes few files; a save links the others to those of the previous checkpoint.

    Args:
        arrays: the columns, [rows, ...] each; they are not copied.
        capacity: the largest number of rows. It fixes where files begin, so that these places stay as rows are added.
    """

    def __init__(self, arrays: Sequence[Any], capacity: int | None = None) -> None:
        self.arrays = [as_native(np.asarray(each)) for each in arrays]
        rows = {each.shape[0] if each.ndim else None for each in self.arrays}
        if len(rows) > 1 or None in rows:
            raise ValueError(f"columns must have the same first dim, got shapes {[each.shape for each in self.arrays]}")
        self.rows: int = rows.pop() or 0 if rows else 0
        self.dtypes, self.shapes = [each.dtype for each in self.arrays], [each.shape[1:] for each in self.arrays]
        for dtype in self.dtypes:
            name_of(dtype)  # TypeError for dtypes that cannot be saved
        width = sum(map(row_bytes, self.dtypes, self.shapes))
        size = min(max(width * max(self.rows, capacity or 0) // _PARTS, _SMALLEST), _LARGEST)
        self.rows_a_file = 1 << max(0, int(size // width).bit_length() - 1) if width else max(self.rows, 1)

    def check(self) -> None:
        """Does nothing: arrays in memory have no checksums. See `StoredColumns`."""

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
    """The memory of an array, [bytes] uint8; a copy only if it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def as_native(array: np.ndarray) -> np.ndarray:
    """The array in the byte order of this machine."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
