"""Columns of int64 that grow at the end."""

import numpy as np


class Columns:
    """Named columns of int64 of one length, in host memory. Growing doubles the memory, so n rows cost O(n).

    Args:
        fill: the names, and what new rows hold.
    """

    def __init__(self, **fill: int) -> None:
        self._fill = np.array(list(fill.values()), np.int64)
        self._places = {name: place for place, name in enumerate(fill)}
        self._data = np.empty((len(fill), 0), np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: str) -> np.ndarray:
        """A column as a view, valid until the next growth."""
        return self._data[self._places[name], : self._length]

    def grow(self, length: int) -> None:
        """Have at least `length` rows."""
        if length <= self._length:
            return
        if length > self._data.shape[1]:
            grown = np.empty((len(self._fill), max(16, length, 2 * self._data.shape[1])), np.int64)
            grown[:, : self._length] = self._data[:, : self._length]
            self._data = grown
        self._data[:, self._length : length] = self._fill[:, None]
        self._length = length

    def saved(self) -> np.ndarray:
        """A copy of all columns, [names, length]."""
        return self._data[:, : self._length].copy()

    def restore(self, saved: np.ndarray) -> None:
        """Take the columns that `saved` gave."""
        self._data, self._length = np.array(saved, np.int64), saved.shape[1]
