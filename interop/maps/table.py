"""A batched hash table from rows of bytes to consecutive ints."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)
_LONGEST = 2**32 - 2  # row numbers that fit in 32 bits


class KeyTable:
    """Numbers distinct rows of bytes from 0, in order of first appearance. In host memory, not thread-safe.

    Open addressing with triangular probing, at most a third full. An entry holds half of the row's hash and its number.
    Rows with equal hashes are compared in full, so different rows never share a number. Each probing step handles all
    unresolved rows of the batch: O(batch) in total, in about log(batch) steps. The first batch fixes the width of rows. In
    a large table, lookups of thousands of rows are many times faster than a dict of bytes; a single row is slower.
    """

    def __init__(self) -> None:
        self._width: int | None = None  # bytes per row
        self._size = 0
        self._entries = np.zeros(16, np.uint64)  # high half: half of the hash; low half: number + 1; 0: empty
        self._words = np.empty((0, 1), np.uint64)  # [allocated, words per row]

    @classmethod
    def of(cls, keys: np.ndarray) -> Self:
        """A table with the `keys` of another one. ValueError for duplicate keys."""
        made = cls()
        made.insert(np.ascontiguousarray(keys))
        if len(made) != len(keys):
            raise ValueError(f"{len(keys)} keys were saved, of which {len(made)} are different")
        return made

    def __len__(self) -> int:
        return self._size

    @property
    def keys(self) -> np.ndarray:
        """The stored rows: uint8 [len, width], read-only."""
        rows = self._words[: self._size].view(np.uint8)[:, : self._width or 0]
        rows.flags.writeable = False
        return rows

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Look up rows uint8 [B, W]. Returns their numbers, int64 [B]; `len(self)` for an unknown row."""
        words = self._words_of(keys)
        return self._find(words, _hash_words(words, keys.shape[1]))

    def insert(self, keys: np.ndarray, limit: int | None = None) -> np.ndarray:
        """Look up rows uint8 [B, W], and store new ones. Returns their numbers, int64 [B].

        IndexError if more rows than `limit`, or 2**32 - 2, would be stored; then no row is stored.
        """
        words = self._words_of(keys)
        hashes = _hash_words(words, keys.shape[1])
        numbers = self._find(words, hashes)
        new = np.flatnonzero(numbers == self._size)
        if new.size:
            numbers[new] = self._append(words[new], hashes[new], _LONGEST if limit is None else min(limit, _LONGEST))
            self._width = keys.shape[1]
        return numbers

    def truncate(self, size: int) -> None:
        """Remove all rows but the first `size`. At size 0 the width may change. O(size)."""
        self._size = min(size, self._size)
        self._width = self._width if self._size else None
        self._resize(self._size, self._words.shape[1])

    def _words_of(self, keys: np.ndarray) -> np.ndarray:
        if keys.ndim != 2 or keys.dtype != np.uint8:
            raise TypeError(f"keys must be rows of bytes, uint8 [B, W], got {keys.dtype} {list(keys.shape)}")
        if self._width not in (None, keys.shape[1]):
            raise ValueError(f"the stored keys have {self._width} bytes each, got keys of {keys.shape[1]}")
        return _as_words(keys)

    def _find(self, words: np.ndarray, hashes: np.ndarray) -> np.ndarray:
        numbers = np.full(len(words), self._size)
        rows = np.arange(len(words)) if self._size else numbers[:0]  # unresolved
        places, marks = self._starts(hashes[: len(rows)]), _entry(hashes[: len(rows)], -1)
        step = 0
        while rows.size:
            entries = self._entries.take(places)
            found = (entries & _LOW).view(np.int64) - 1
            same = (entries ^ marks) <= _LOW
            same &= _equal(self._words.take(found, axis=0, mode="clip"), words)
            numbers[rows] = np.where(same, found, self._size)
            step += 1
            left = (entries.astype(bool) > same).nonzero()[0]
            rows, places, marks = rows[left], self._next(places[left], step), marks[left]
            words = words.take(left, axis=0)
        return numbers

    def _append(self, words: np.ndarray, hashes: np.ndarray, limit: int) -> np.ndarray:
        """Store new rows, which may have duplicates. Returns their numbers."""
        _, first, owners = np.unique(hashes, return_index=True, return_inverse=True)
        if not _equal(words[first[owners]], words).all():  # hash collision of different rows
            _, first, owners = np.unique(words, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(first)
        stop = self._size + len(first)
        if stop > limit:
            raise IndexError(
                f"{len(first)} new keys do not fit beside the {self._size} stored ones: there is room for {limit}. "
                "Use a larger max_size, or clear() first"
            )
        if 3 * stop > len(self._entries) or stop > len(self._words):
            self._resize(stop, words.shape[1])
        self._words[self._size : stop] = words[first[order]]
        self._place(hashes[first[order]], self._size)
        numbers = np.empty(len(order), np.int64)
        numbers[order] = np.arange(self._size, stop)
        self._size = stop
        return numbers[owners.reshape(-1)]

    def _resize(self, size: int, width: int) -> None:
        """Make room for `size` rows of `width` words; stored rows keep their entries."""
        length = 1 << max(4, (3 * size).bit_length())
        kept = self._words[: self._size]
        self._entries = np.zeros(length, np.uint64)
        self._words = np.empty((length // 3 if size else 0, width), np.uint64)
        if len(kept):
            self._words[: len(kept)] = kept
            self._place(_hash_words(kept, self._width or 0), 0)

    def _place(self, hashes: np.ndarray, start: int) -> None:
        """Assign entries to numbers from `start` on. If several reach an entry in one step, the last one gets it."""
        entries, places = _entry(hashes, np.arange(start, start + len(hashes))), self._starts(hashes)
        step = 0
        while entries.size:
            free = self._entries[places] == 0
            self._entries[places[free]] = entries[free]
            left = self._entries[places] != entries
            step += 1
            entries, places = entries[left], self._next(places[left], step)

    def _starts(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes.view(np.uint64) & np.uint64(len(self._entries) - 1)).view(np.int64)

    def _next(self, places: np.ndarray, step: int) -> np.ndarray:
        return (places + step) & (len(self._entries) - 1)


def row_bytes(tensors: Sequence[Tensor], batch: torch.Size) -> np.ndarray:
    """Concatenate the bytes of each row of several tensors: uint8 [B, W], the batch dims flattened.

    Values are not converted: 0.0 and -0.0, or 1 and 1.0, differ. A single contiguous tensor on the CPU is not copied.
    """
    count = batch.numel()
    parts = []
    for tensor in tensors:
        if tensor.shape[: len(batch)] != batch:
            raise ValueError(f"a key of shape {list(tensor.shape)} does not have the batch dims {list(batch)}")
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        features = flat.numel() // count if count else flat.shape[len(batch) :].numel()
        flat = flat.as_strided((flat.numel(),), (1,))  # a single element may have any stride
        parts.append(flat.view(torch.uint8).numpy().reshape(count, features * flat.element_size()))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def hash_rows(rows: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each row of uint8 [B, W]: int64 [B], the same in every process. O(bytes).

    Each half is a multilinear hash of the row's 32-bit words and length, with fixed random 64-bit multipliers (Lemire &
    Kaser 2014, "Strongly universal string hashing is fast", arXiv:1202.4961). Different rows collide with probability
    2^-64. The hash has no key: with known multipliers, collisions can be crafted.
    """
    return _hash_words(_as_words(rows), rows.shape[1])


def _hash_words(words: np.ndarray, width: int) -> np.ndarray:
    multipliers = _multipliers(2 * words.shape[1] + 1)
    halves = multipliers[:, 1:] @ words.view(np.uint32).astype(np.uint64).T + multipliers[:, :1] * np.uint64(width + 1)
    return ((halves[0] & ~_LOW) | (halves[1] >> _HIGH)).view(np.int64)


_known: dict[int, np.ndarray] = {}


def _multipliers(count: int) -> np.ndarray:
    """uint64 [2, count], equal in every process: NumPy keeps the streams of its bit generators stable."""
    if count not in _known:
        _known[count] = np.ascontiguousarray(np.random.PCG64(0x5EED).random_raw(2 * count).reshape(count, 2).T)
    return _known[count]


def _as_words(rows: np.ndarray) -> np.ndarray:
    """Rows of bytes as uint64 [B, at least 1], padded with zeros. A view if the width allows."""
    B, W = rows.shape
    words = max(1, -(-W // 8))
    if 8 * words == W and rows.flags.c_contiguous:
        return rows.view(np.uint64)
    padded = np.zeros((B, 8 * words), np.uint8)
    padded[:, :W] = rows
    return padded.view(np.uint64)


def _equal(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compare rows of words. Reducing a transposed copy over axis 0 is five times faster than over the last axis."""
    return np.logical_and.reduce((some == others).T.copy(), axis=0)


def _entry(hashes: np.ndarray, numbers: np.ndarray | int) -> np.ndarray:
    return (hashes.view(np.uint64) & ~_LOW) | np.asarray(numbers + 1).astype(np.uint64)
