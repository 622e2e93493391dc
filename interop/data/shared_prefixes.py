"""Ragged rows in pieces: rows that begin alike have their first pieces in common, and are stored once as far as they agree.

A row is one span, as without sharing, or the span of a list of spans: its pieces, one behind the other. Nothing counts how
many rows use a piece: a segment is free when no piece of a stored row is in it.
"""

import weakref
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

from interop.data.packed import PackedValues

_KIND = 2  # bits of a length that tell the kind of value
_PIECES = 1  # the kind of a span of a list of spans
_SPAN = 16  # bytes of a span in a list
_LEAST = 256  # bytes that two rows must have in common to share them; the first ones are looked up
_Known = tuple[
    np.ndarray, list[int], list[int]
]  # the pieces of a row, and where each begins and how far the row then is
_BEGINNINGS, _ROWS = 4096, 64  # how many beginnings are known, and how many of the last rows with each


class SharedPrefixes:
    """Appends ragged rows to packed values, and finds for each the longest beginning of rows that were appended lately.

    Rows are compared byte by byte with the last 64 that have the same first 256 bytes. What is known of them belongs to one
    process, and may be dropped at any time.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, deque[_Known]] = OrderedDict()

    def append(self, values: PackedValues, rows: Sequence[memoryview]) -> np.ndarray:
        """Append rows; returns their spans, int64 [n, 2]. O(bytes), and for each row up to 64 comparisons."""
        found = np.empty((len(rows), 2), np.int64)
        for at, row in enumerate(rows):
            data = np.frombuffer(row, np.uint8)
            pieces, size = self._longest(values, data)
            rest = data[size:]
            if rest.size or not len(pieces):
                own = np.array([[values.append_whole(rest), rest.size << _KIND]], np.int64)
                pieces = np.concatenate([pieces, own])
            found[at] = span_of(values, pieces)
            self._learn(data[:_LEAST].tobytes(), pieces)
        return found

    def extended(self, values: PackedValues, spans: np.ndarray, added: Sequence[memoryview]) -> np.ndarray:
        """The spans of rows with more bytes behind the last piece, where that has room, or as a further piece."""
        found = np.array(spans, np.int64)
        for at, more in enumerate(added):
            if not len(more):
                continue
            pieces = pieces_of(values, spans[at : at + 1])[0].copy()
            last = pieces[-1:]
            if values.has_room(last[0], len(more)):
                pieces[-1] = values.extended(last, [more])[0]
            else:
                data = np.frombuffer(more, np.uint8)
                address = values.append_with_room(data, (int(last[0, 1] >> _KIND) + data.size) // 2)
                pieces = np.concatenate([pieces, [[address, data.size << _KIND]]])
            pieces = pieces[pieces[:, 1] > 0]
            found[at] = span_of(values, pieces)
            self._learn(_beginning(values, pieces), pieces)
        return found

    def _longest(self, values: PackedValues, data: np.ndarray) -> tuple[np.ndarray, int]:
        """The pieces of the longest known beginning of a row, and its bytes."""
        best, size = np.empty((0, 2), np.int64), 0
        known = self._known.get(data[:_LEAST].tobytes(), ()) if data.size >= _LEAST else ()
        for pieces, starts, ends in reversed(known):
            if data.size <= size:
                break
            if ends[-1] <= size:
                continue
            piece = bisect_right(ends, size)
            byte = starts[piece] + size - (ends[piece - 1] if piece else 0)
            try:
                if values.byte_at(byte) != data[size] or not values.are_there(pieces):
                    continue
            except RuntimeError:  # its segment was freed
                continue
            common = _common(values.read(pieces), data)
            if common > size:
                best, size = pieces, common
        if size < _LEAST:
            return np.empty((0, 2), np.int64), 0
        reached = (best[:, 1] >> _KIND).cumsum()
        count = int(np.searchsorted(reached, size)) + 1
        best = best[:count].copy()
        best[-1, 1] -= (int(reached[count - 1]) - size) << _KIND
        return best, size

    def _learn(self, beginning: bytes, pieces: np.ndarray) -> None:
        if len(beginning) < _LEAST:
            return
        self._known.setdefault(beginning, deque(maxlen=_ROWS)).append(
            (pieces, pieces[:, 0].tolist(), (pieces[:, 1] >> _KIND).cumsum().tolist())
        )
        self._known.move_to_end(beginning)
        while len(self._known) > _BEGINNINGS:
            self._known.popitem(last=False)


class _OfValues:
    """What this process knows of the rows in packed values; dropped with these."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[PackedValues, SharedPrefixes] = weakref.WeakKeyDictionary()

    def of(self, values: PackedValues) -> SharedPrefixes:
        known = self._known.get(values)
        if known is None:
            known = self._known[values] = SharedPrefixes()
        return known


PREFIXES = _OfValues()


def _beginning(values: PackedValues, pieces: np.ndarray) -> bytes:
    """The first bytes of a row."""
    found = b""
    for piece in values.read(pieces):
        found += piece[: _LEAST - len(found)]
        if len(found) == _LEAST:
            break
    return found


def _common(pieces: Sequence[memoryview], data: np.ndarray) -> int:
    """How many bytes pieces, one behind the other, and data have in common at the beginning."""
    start = 0
    for piece in pieces:
        other = data[start : start + len(piece)]
        held = np.frombuffer(piece, np.uint8)[: other.size]
        if not np.array_equal(held, other):
            return start + int((held != other).argmax())
        start += other.size
        if start == data.size:
            break
    return start


def span_of(values: PackedValues, pieces: np.ndarray) -> np.ndarray:
    """The span, int64 [2], of a row of these pieces, int64 [m, 2]. Of several pieces their list is appended."""
    if len(pieces) == 1:
        return pieces[0]
    table = np.ascontiguousarray(pieces).view(np.uint8).reshape(-1)
    return np.array([values.append_whole(table), table.size << _KIND | _PIECES], np.int64)


def pieces_of(values: PackedValues, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pieces of rows, int64 [m, 2], and how many each of the n rows has, int64 [n]."""
    in_lists = (spans[:, 1] & ((1 << _KIND) - 1)) == _PIECES
    counts = np.ones(len(spans), np.int64)
    if not in_lists.any():
        return spans, counts
    counts[in_lists] = (spans[in_lists, 1] >> _KIND) // _SPAN
    pieces = np.empty((int(counts.sum()), 2), np.int64)
    of_lists = np.repeat(in_lists, counts)
    pieces[of_lists] = np.frombuffer(b"".join(values.read(spans[in_lists])), np.int64).reshape(-1, 2)
    pieces[~of_lists] = spans[~in_lists]
    return pieces, counts


def used_spans(values: PackedValues, spans: np.ndarray) -> np.ndarray:
    """All spans that rows use, int64 [m, 2], each once: their own, and those of their pieces."""
    return np.unique(np.concatenate([spans, pieces_of(values, spans)[0]]), axis=0)


def whole_rows(values: PackedValues, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of rows, one behind the other, and their spans in these."""
    pieces, counts = pieces_of(values, spans)
    lengths = lengths_of(pieces, counts)
    data = np.frombuffer(b"".join(values.read(pieces)), np.uint8)
    return data, np.stack([lengths.cumsum() - lengths, lengths << _KIND], 1)


def lengths_of(pieces: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The bytes of rows of so many pieces each, int64 [n]."""
    sums = np.concatenate([[0], (pieces[:, 1] >> _KIND).cumsum()])
    ends = counts.cumsum()
    found: np.ndarray = sums[ends] - sums[ends - counts]
    return found


def moved(values: PackedValues, spans: np.ndarray) -> np.ndarray:
    """Append the bytes of rows once more, those that rows have in common once; returns the new spans."""
    pieces, counts = pieces_of(values, spans)
    starts, stops = pieces[:, 0], pieces[:, 0] + (pieces[:, 1] >> _KIND)
    order = starts.argsort(kind="stable")
    reached = np.maximum.accumulate(stops[order])
    begins = np.concatenate([[True], starts[order][1:] > reached[:-1]]) if len(order) else np.zeros(0, np.bool_)
    first = np.flatnonzero(begins)
    areas = starts[order][first]
    ends = reached[np.append(first[1:], len(order)) - 1] if len(first) else areas
    addresses = np.empty_like(areas)
    for at, (start, end) in enumerate(zip(areas.tolist(), ends.tolist(), strict=True)):
        [data] = values.read(np.array([[start, (end - start) << _KIND]], np.int64))
        addresses[at] = values.append_whole(np.frombuffer(data, np.uint8))
    area = np.searchsorted(areas, starts, "right") - 1
    new = np.stack([starts - areas[area] + addresses[area], pieces[:, 1]], 1) if len(pieces) else pieces
    found, known = np.empty_like(spans), dict[bytes, np.ndarray]()
    for at, part in enumerate(np.split(new, counts.cumsum()[:-1]) if len(spans) else []):
        key = part.tobytes()
        if key not in known:
            known[key] = span_of(values, part)
        found[at] = known[key]
    return found
