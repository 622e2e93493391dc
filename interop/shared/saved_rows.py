"""The bytes of rows, as an undo record keeps them."""

import numpy as np
import torch

LARGE = 1 << 19  # bytes from which torch's threaded copy is faster
Rows = range | np.ndarray


class RowBytes:
    """The bytes by row of an array [rows, ...]."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.size, self.rows = array[:1].nbytes, array.shape[0]
        dense = array.flags.c_contiguous and self.size > 0
        self._bytes = array.reshape(array.shape[0], -1).view(np.uint8) if dense else None
        self._flat = None if self._bytes is None else self._bytes.reshape(-1)

    def save(self, rows: Rows, out: np.ndarray) -> None:
        if self._flat is None or self._bytes is None:
            out[:] = np.ascontiguousarray(self._array[_index(rows)]).reshape(-1).view(np.uint8)
        elif isinstance(rows, range):
            held = self._flat[rows.start * self.size : rows.stop * self.size]
            if held.size < LARGE:
                out[:] = held
            else:
                torch.from_numpy(out).copy_(torch.from_numpy(held))
        else:
            self._bytes.take(rows, 0, out.reshape(-1, self.size), mode="clip")

    def put_back(self, rows: Rows, saved: np.ndarray) -> None:
        at = _index(rows)
        if self._bytes is not None:
            self._bytes[at] = saved.reshape(-1, self.size)
        else:
            self._array[at] = saved.copy().view(self._array.dtype).reshape(self._array[at].shape)


def _index(rows: Rows) -> slice | np.ndarray:
    return slice(rows.start, rows.stop) if isinstance(rows, range) else rows
