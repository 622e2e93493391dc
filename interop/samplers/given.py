"""Slots and priorities as users give them, as NumPy arrays that were looked at; and where they wait."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.host import compiled
from interop.storages import Storage

_AT_ONCE = 1 << 22  # priorities in one update; positions up to 2^24 are exact in single precision
_LEAST = 64  # as many cost little more than one, and fewer lengths fewer programs
_largest = np.maximum.reduce
_NEGATIVE = np.uint64(2**63)  # seen as such a number, a negative one is larger than all others
_PLAIN = (torch.float32, torch.float64)
_BITS = {size: (np.dtype(f"u{size}"), np.array(np.inf, f"f{size}").view(f"u{size}")[()]) for size in (4, 8)}


def flat_slots(index: Any, storage: Storage | None) -> tuple[np.ndarray, int, int]:
    """Flat integers [n] for an int, integers, or coordinates [n, ndim]; the lowest, or 0 for none below 0; the highest.

    TypeError for what is not an integer, RuntimeError and IndexError for coordinates that the storage cannot have.
    """
    if isinstance(index, tuple):
        index = torch.stack([torch.as_tensor(each) for each in index], -1)
    if type(index) is Tensor and index.dtype is torch.int64 and index.ndim == 1 and index.is_cpu:
        array = index.numpy()  # as most are given
        if array.size and (most := _largest(array.view(np.uint64))) < _NEGATIVE:
            return array, 0, int(most)
    else:
        array = index.detach().cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
    if array.size == 0:
        return np.zeros(0, np.int32), 0, -1
    if array.dtype.kind not in "iu":
        raise TypeError(f"index must be integers, got {array.dtype}")
    if array.ndim == 2 and not (array.shape[1] == 1 and (storage is None or storage.ndim == 1)):
        if storage is None or storage.shape is None:
            raise RuntimeError("an index of several columns needs the storage, to know its shape")
        array = of_coordinates(array, tuple(storage.shape))
    array = array.reshape(-1)
    if array.dtype == np.int64:
        most = _largest(array.view(np.uint64))
        if most < _NEGATIVE:
            return array, 0, int(most)
    return array, min(int(array.min()), 0), int(array.max())


def padded_slots(slots: np.ndarray) -> np.ndarray:
    """Slots as a program takes them."""
    return compiled.padded(slots.astype(np.int32), _LEAST)


def refuse_below(lowest: int) -> None:
    """IndexError for a slot that is negative, but for -1, which is no slot."""
    if lowest < -1:
        raise IndexError(f"index {lowest} is negative: only -1 is allowed, for an item that was not kept")


def of_coordinates(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Flat slots [n] for coordinates [n, ndim] in a shape. RuntimeError for another ndim, IndexError out of range."""
    if array.shape[1] != len(shape):
        raise RuntimeError(f"coordinates need {len(shape)} columns, one for each item dim, got {array.shape[1]}")
    flat = np.zeros(array.shape[0], np.int64)
    for axis, length in enumerate(shape):
        column = array[:, axis]
        low, high = column.min(), column.max()
        if low < 0 or high >= length:
            raise IndexError(f"coordinate {low if low < 0 else high} is out of range for dim {axis} of size {length}")
        flat = flat * length + column
    return flat


def good_priorities(priority: Any, dtype: str) -> tuple[np.ndarray, Any]:
    """Priorities in the dtype of the sampler, and the highest of them, 0 of none.

    TypeError for no real numbers, ValueError for negative or not finite ones.
    """
    if isinstance(priority, Tensor):
        if priority.requires_grad or not priority.is_cpu or priority.dtype not in _PLAIN:
            priority = priority.detach()
            priority = (priority.float() if priority.dtype == torch.bfloat16 else priority).cpu()
        priority = priority.numpy()
    given = np.asarray(priority)
    if given.dtype.kind not in "fiu":
        raise TypeError(f"priorities must be real numbers, got {given.dtype}")
    if given.dtype == dtype:
        values = given
    else:
        with np.errstate(over="ignore"):  # what is too large for the dtype becomes infinite, and is refused
            values = given.astype(dtype)
    if not values.size:
        return values, values.dtype.type(0)
    # The bits of floats, as whole numbers, are in the order of the floats; below 0 comes after infinite, NaN after that.
    bits, infinite = _BITS[values.dtype.itemsize]
    most = np.maximum.reduce(values.view(bits), axis=None)
    if most < infinite:
        return values, most.view(values.dtype)
    if not (values.min() >= 0 and values.max() < np.inf):
        at = int((~((values >= 0) & (values < np.inf))).argmax())
        raise ValueError(
            f"priorities must be finite and at least 0 in {dtype}, got {given.reshape(-1)[at]} (number {at}): "
            "pass the absolute error"
        )
    return values, values.max()  # some are -0


def one_for_each(slots: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Priorities of slots, [n], of one value for all or one for each. RuntimeError for another number of them."""
    if values.size not in (1, slots.size) or (values.size == 1 and values.ndim > 1 and slots.size != 1):
        raise RuntimeError(
            "priority should be a number or an iterable of the same length as index: "
            f"got {values.size} priorities for {slots.size} indices"
        )
    flat = values.reshape(-1)
    return flat if flat.size == slots.size else np.broadcast_to(flat, slots.shape)


class Waiting:
    """Priorities that were given since the last draw, in order: one pass over the tree takes them all."""

    ENOUGH = 1 << 18  # entries from which they should wait no longer
    FEW = 1 << 12  # entries up to which it pays to compile one program for them and a draw, of as many at most

    def __init__(self, dtype: str) -> None:
        self._dtype, self.count = dtype, 0
        self._hold(compiled.Words(_LEAST, dtype))

    def _hold(self, words: compiled.Words) -> None:
        self._words, self._slots, self._values, self._room = words, words.slots, words.values, words.count

    def add(self, slots: np.ndarray, values: Any) -> None:
        """Have slots and their values, or the one value of all, wait."""
        start = self.count
        stop = start + slots.size
        if stop > self._room:
            grown = compiled.Words(1 << (stop - 1).bit_length(), self._dtype)
            grown.slots[:start], grown.values[:start] = self._slots[:start], self._values[:start]
            self._hold(grown)
        self._slots[start:stop], self._values[start:stop] = slots, values
        self.count = stop

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All that waits, in order, as many at once as one update takes; in arrays of their own, padded."""
        for start in range(0, self.count, _AT_ONCE):
            part = slice(start, min(start + _AT_ONCE, self.count))
            yield compiled.padded(self._slots[part], _LEAST), compiled.padded(self._values[part], _LEAST)

    def words(self) -> compiled.Words:
        """All that waits, at least one, padded as in `parts`, for one program. It waits until it is cleared."""
        count = self.count
        size = max(1 << (count - 1).bit_length(), _LEAST)
        words = self._words
        if size != self._room:
            words = compiled.Words(size, self._dtype)
            words.slots[:count], words.values[:count] = self._slots[:count], self._values[:count]
        if size != count:
            words.slots[count:size], words.values[count:size] = words.slots[count - 1], words.values[count - 1]
        self._room = 0  # these are not to be written any more: what comes before they are cleared goes elsewhere
        return words

    def clear(self) -> None:
        """Nothing waits. What was given to a program stays as it is: the next memory is for as much, but another."""
        count, self.count = self.count, 0  # first: broken off below, what is held is not what waited
        if self._room == 0 or self._room > 2 * self.ENOUGH:
            size = 1 << (count - 1).bit_length() if 0 < count <= self.FEW else _LEAST
            self._hold(compiled.Words(max(size, _LEAST), self._dtype))

    def __getstate__(self) -> tuple[str, np.ndarray, np.ndarray]:
        """What waits alone: copies of `Words` would not be the views of each other that they have to be."""
        return self._dtype, self._slots[: self.count].copy(), self._values[: self.count].copy()

    def __setstate__(self, state: tuple[str, np.ndarray, np.ndarray]) -> None:
        dtype, slots, values = state
        self.__init__(dtype)  # type: ignore[misc]
        self.add(slots, values)
