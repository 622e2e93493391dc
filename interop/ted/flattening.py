"""TED data as flat arrays, which have each observation once, and back: tensors by path."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.data.keys import as_path
from interop.ted.row_values import dense, first_apart, first_set, flags, fresh, rows_as_values, side_by_side

KeyPath = tuple[str, ...]
Specs = dict[KeyPath, tuple[tuple[int, ...], torch.dtype]]

REWARD_KEYS = ("reward",)


@dataclass(frozen=True)
class Names:
    """The keys of done flags and rewards, as paths below the root and below "next" alike."""

    done: tuple[KeyPath, ...]
    reward: tuple[KeyPath, ...]

    @classmethod
    def of(cls, done_keys: Iterable[Any], reward_keys: Iterable[Any]) -> "Names":
        """From keys. TypeError for a single string, whose letters would be taken for keys."""
        for name, keys in (("done_keys", done_keys), ("reward_keys", reward_keys)):
            if isinstance(keys, str):
                raise TypeError(f"{name} must be a list or tuple of keys, got {keys!r}: pass ({keys!r},)")
        return cls(tuple(map(as_path, done_keys)), tuple(map(as_path, reward_keys)))

    def __contains__(self, path: object) -> bool:
        return path in self.done or path in self.reward


def is_below(path: KeyPath) -> bool:
    """Whether a path is one of "next"."""
    return path[0] == "next" and len(path) > 1


def shown(path: KeyPath) -> str:
    """A key as users write it."""
    return repr(path[0] if len(path) == 1 else path)


# ------------------------------------------------------------------ where rows go


@dataclass(frozen=True)
class TedRing:
    """Rows [time, *lanes] of a ring buffer. Flat arrays have them lane after lane, each lane from its oldest row on.

    Args:
        shape: the sizes of these dims.
        shift: the row behind the newest one; 0 or all rows where that is the last row.
        is_full: whether every row was written: then the oldest row is at `shift`, otherwise row 0.
    """

    shape: tuple[int, ...]
    shift: int
    is_full: bool

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"there are no rows in data of shape {list(self.shape)}")
        if not 0 <= self.shift <= self.shape[0]:
            raise ValueError(f"shift must be a row of {self.shape[0]}, got {self.shift}")

    @property
    def items(self) -> int:
        """The rows of all lanes."""
        return math.prod(self.shape)

    @property
    def oldest(self) -> int:
        """The oldest row."""
        return self.shift % self.shape[0] if self.is_full else 0

    def lay_out(self, rows: np.ndarray, flat: np.ndarray) -> np.ndarray:
        """Copy values, one a row in the order of storage, to their places in a flat array; returns that."""
        _roll(rows.reshape(self.shape[0], -1).T, flat.reshape(-1, self.shape[0]), self.oldest)
        return flat

    def take_back(self, flat: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The inverse of `lay_out`; returns the rows."""
        _roll(flat.reshape(-1, self.shape[0]), rows.reshape(self.shape[0], -1).T, self.shape[0] - self.oldest)
        return rows


def _roll(source: np.ndarray, target: np.ndarray, shift: int) -> None:
    """`target[:] = np.roll(source, -shift, 1)` without a temporary copy."""
    head = source.shape[1] - shift
    target[:, :head] = source[:, shift:]
    target[:, head:] = source[:, :shift]


class FlatOrder:
    """The places of rows in a flat array of observations: behind each end of a trajectory is one more place.

    Args:
        ring: the rows.
        done: whether a trajectory ends with a row, as a flat array. The newest row of a lane ends one in any case.
    """

    def __init__(self, ring: TedRing, done: np.ndarray) -> None:
        times = ring.shape[0]
        lanes = ring.items // ring.shape[0]
        ends = done.copy()
        ends.reshape(lanes, times)[:, (ring.shift - 1 - ring.oldest) % times] = True
        closing = np.flatnonzero(ends)
        places = np.arange(ring.items)
        places += np.repeat(np.arange(len(closing) + 1), np.diff(closing, prepend=-1, append=ring.items - 1))
        self.size = int(places[-1]) + 1 + int(ends[-1])
        """How many places there are."""
        self.rows = ring.take_back(places, np.empty_like(places))
        """The place of each row, in the order of storage."""
        stored = ring.take_back(ends, np.empty_like(ends))
        self.stops = np.flatnonzero(stored)
        """The rows with which trajectories end."""
        self.unended = np.flatnonzero(~stored[-lanes:]) + ring.items - lanes if not ring.is_full else self.stops[:0]
        """The last rows of lanes that were not written, with which no trajectory ends."""
        self._ends = ends
        self._times = times

    def trajectories(self) -> tuple[Tensor, Tensor]:
        """How many rows each trajectory has, and whether it has an end; rows that were not written are one without."""
        stops = self._ends.copy()
        stops.reshape(-1, self._times)[:, -1] = True
        last_rows = np.flatnonzero(stops)
        return torch.from_numpy(np.diff(last_rows, prepend=-1)), torch.from_numpy(self._ends[last_rows])


def entries_of(path: KeyPath, followed: bool, names: Names) -> list[KeyPath]:
    """The entries of usual TED data that one flat array stands for.

    Args:
        path: of the array.
        followed: whether it has the observations behind ends too.
        names: of done flags, whose entries of the root are all False, and of rewards.
    """
    below = ("next", *path)
    if followed or path in names.done:
        return [below, path]
    return [below] if path in names.reward else [path]


# ------------------------------------------------------------------ to flat arrays


class Flattened:
    """TED data as flat arrays: `specs` has their shapes and dtypes; values are copied by `fill`.

    Done flags, rewards and entries of the root alone are [items, ...]. An observation is [items + ends, ...]: the root's
    values of a trajectory, then the last value of "next".

    Args:
        leaves: the tensors, [time, *lanes, ...] each.
        ring: their rows.
        names: the keys of done flags and rewards.
        done_key: the flag that ends trajectories.
        verify: refuse data that would not come back bit for bit.

    Raises ValueError for data that is not TED data.
    """

    def __init__(
        self, leaves: Mapping[KeyPath, Tensor], ring: TedRing, names: Names, done_key: KeyPath, verify: bool = True
    ) -> None:
        for path, leaf in leaves.items():
            if tuple(leaf.shape[: len(ring.shape)]) != ring.shape:
                raise ValueError(f"{shown(path)} has the shape {list(leaf.shape)}, the rows have {list(ring.shape)}")
        below = [path[1:] for path in leaves if is_below(path)]
        self.followed = [path for path in below if path not in names]
        for path in self.followed:
            before = leaves.get(path)
            after = leaves["next", *path]
            key = shown(("next", *path))
            if before is None:
                raise ValueError(
                    f"the root has no {shown(path)} for {key}, which is none of done_keys and reward_keys: only TED data "
                    "can be flattened"
                )
            if (before.dtype, before.shape) != (after.dtype, after.shape):
                raise ValueError(
                    f"{key} is {after.dtype} {list(after.shape)}, {shown(path)} is {before.dtype} {list(before.shape)}: "
                    "observations of the root and of 'next' need one dtype and shape"
                )
        self._leaves = leaves
        self._ring = ring
        self._names = names
        outcomes = [path for path in below if path in names]
        plain = [path for path in leaves if not is_below(path) and path not in below]
        self._sources = {path: leaves["next", *path] for path in outcomes}
        self._sources |= {path: leaves[path] for path in [*plain, *self.followed]}
        self.order = FlatOrder(ring, self._done(done_key))
        dims = len(ring.shape)
        counts = {path: self.order.size if path in self.followed else ring.items for path in self._sources}
        self.specs: Specs = {
            path: ((counts[path], *source.shape[dims:]), source.dtype) for path, source in self._sources.items()
        }
        if verify:
            self._refuse_lossy()

    def unusual(self) -> bool:
        """Whether `entries_of` gives other entries than the data has: flags or rewards on one side alone."""
        usual = {entry for path in self.specs for entry in entries_of(path, path in self.followed, self._names)}
        return usual != self._leaves.keys()

    def fill(self, path: KeyPath, flat: Tensor) -> None:
        """Copy an array into dense memory of its shape on the CPU."""
        if not flat.numel():
            return
        dims = len(self._ring.shape)
        values = rows_as_values(dense(self._sources[path]), dims)
        places = rows_as_values(flat, 1)
        if path not in self.followed:
            self._ring.lay_out(values, places)
            return
        places[self.order.rows] = values
        stops = self.order.stops
        places[self.order.rows[stops] + 1] = rows_as_values(dense(self._leaves["next", *path]), dims)[stops]

    def array(self, path: KeyPath) -> Tensor:
        """An array on the CPU, in new memory."""
        flat = fresh(*self.specs[path])
        self.fill(path, flat)
        return flat

    def _done(self, done_key: KeyPath) -> np.ndarray:
        """Whether episodes end, as a flat array."""
        done = self._leaves.get(done_key)
        ring = self._ring
        if done is None:
            raise missing_done(done_key, self._leaves)
        path = done_key[1:] if is_below(done_key) else done_key
        if path in self.followed or self._sources.get(path) is not done:
            raise ValueError(f"done_key {shown(done_key)} must be one of done_keys below 'next', or in the root alone")
        if done.numel() != ring.items:
            raise ValueError(
                f"{shown(done_key)} has the shape {list(done.shape)}, the rows have {list(ring.shape)}: one value a row is "
                "needed to end episodes"
            )
        return ring.lay_out(flags(done).numpy().reshape(-1), np.empty(ring.items, np.bool_))

    def _refuse_lossy(self) -> None:
        """ValueError naming a key and its first row, by its place in the storage, that would come back otherwise."""
        losses = []
        size = 2 * sum(self._leaves[path].nbytes for path in self.followed)
        rows = side_by_side([partial(self._first_lost, path) for path in self.followed], size)
        lost = dict(zip(self.followed, rows, strict=True))
        for path in self._sources:
            above = self._leaves.get(path)
            below = self._leaves.get(("next", *path))
            if above is None or below is None:
                continue
            if path in self.followed:
                row = lost[path]
                fault = f"is not the {shown(path)} of the row that follows, and no episode ends there"
                losses += [] if row is None else [(row, f"{shown(('next', *path))} {fault}")]
            elif path not in self._names.done:
                losses.append((0, f"{shown(path)} is in the root too and would be dropped: rewards are kept in 'next'"))
            elif (above.dtype, above.shape) != (below.dtype, below.shape):
                losses.append((0, f"{shown(path)} and {shown(('next', *path))} differ in dtype or shape"))
            elif (row := first_set(self._by_row(above))) is not None:
                losses.append((row, f"{shown(path)} is set in the root, where done flags are all False"))
        if losses:
            row, why = min(losses)
            place = tuple(map(int, np.unravel_index(row, self._ring.shape)))
            raise ValueError(
                f"row {place[0] if len(place) == 1 else place} would come back otherwise: {why}. Only TED data can be "
                "flattened: use a TensorStorageCheckpointer for other data, name keys in done_keys or reward_keys, or pass "
                "verify=False to lose what differs"
            )

    def _first_lost(self, path: KeyPath) -> int | None:
        """The first row whose next observation is not that of the next row, though no trajectory ends there.

        The next row of a lane's last one is the first one in a full ring, and the row itself otherwise.
        """
        after = self._by_row(self._leaves["next", *path])
        before = self._by_row(self._leaves[path])
        lanes = self._ring.items // self._ring.shape[0]
        stops = self.order.stops
        last = self._ring.items - lanes
        row = first_apart(after[:last], before[lanes:], stops)
        if row is not None:
            return row
        row = first_apart(after[last:], before[:lanes] if self._ring.is_full else before[last:], stops - last)
        return None if row is None else row + last

    def _by_row(self, leaf: Tensor) -> Tensor:
        return leaf.flatten(0, len(self._ring.shape) - 1)


# ------------------------------------------------------------------ and back


class Rebuilt:
    """TED data from flat arrays: `specs` has the shapes and dtypes of its entries; values are copied by `fillings`.

    Args:
        flat: the shapes and dtypes of the flat arrays.
        done: the flat array that ends trajectories.
        ring: the rows.
        names: the keys of done flags and rewards.
        paths: the entries; None for those of `entries_of`.

    Raises ValueError for arrays that are not of these rows.
    """

    def __init__(
        self, flat: Specs, done: Tensor, ring: TedRing, names: Names, paths: Collection[KeyPath] | None = None
    ) -> None:
        if done.numel() != ring.items:
            raise ValueError(f"done flags of shape {list(done.shape)} for {ring.items} rows: one a row is needed")
        self._ring = ring
        self._order = FlatOrder(ring, flags(done).numpy().reshape(-1))
        self._targets: dict[KeyPath, dict[KeyPath, str]] = {}
        self.specs: Specs = {}
        for path, (shape, dtype) in flat.items():
            followed = shape[:1] == (self._order.size,)
            below = ("next", *path)
            if not followed and shape[:1] != (ring.items,):
                raise ValueError(
                    f"{shown(path)} has {shape[0] if shape else 0} rows: {ring.items} rows with "
                    f"{self._order.size - ring.items} ends have {ring.items}, or {self._order.size} with what came after "
                    "the ends"
                )
            entries = entries_of(path, followed, names)
            if paths is not None:
                entries = [entry for entry in (below, path) if entry in paths]
            if followed:
                self._targets[path] = {below: "next", path: "root"}
            else:
                self._targets[path] = dict(zip(entries, ("row", "zero"), strict=False))
            self.specs |= dict.fromkeys(self._targets[path], ((*ring.shape, *shape[1:]), dtype))
        if paths is not None and self.specs.keys() != set(paths):
            raise ValueError("the arrays are not those of the items")

    def fillings(self, path: KeyPath, flat: Tensor, rows: Mapping[KeyPath, Tensor]) -> list[Callable[[], None]]:
        """Functions that copy a flat array into those entries of the TED data that are in `rows`."""
        if not flat.numel():
            return []
        values = rows_as_values(dense(flat), 1)
        return [
            partial(self._fill, values, rows[entry], kind)
            for entry, kind in self._targets[path].items()
            if entry in rows
        ]

    def _fill(self, flat: np.ndarray, memory: Tensor, kind: str) -> None:
        in_place = memory.device.type == "cpu" and memory.is_contiguous()
        filled = memory if in_place else fresh(memory.shape, memory.dtype)
        rows = rows_as_values(filled, len(self._ring.shape))
        order = self._order
        if kind == "zero":
            rows.view(np.uint8)[:] = 0
        elif kind == "row":
            self._ring.take_back(flat, rows)
        elif kind == "root":
            np.take(flat, order.rows, out=rows, mode="clip")  # the other modes make a copy
        else:
            np.take(flat[1:], order.rows, out=rows, mode="clip")
            rows[order.unended] = flat[order.rows[order.unended]]
        if not in_place:
            memory.copy_(filled)


def missing_done(key: KeyPath, leaves: Mapping[KeyPath, Tensor]) -> ValueError:
    """The error of data without the flags that end episodes."""
    entries = ", ".join(map(shown, leaves))
    return ValueError(f"{shown(key)} is missing, the flag that ends episodes; there are {entries}")
