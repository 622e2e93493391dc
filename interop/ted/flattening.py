"""TED data to flat arrays, in which each observation is once, and back: tensors by path."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from interop.ted.entries import Entries, Leaves, Names, Path, is_below, shown
from interop.ted.ring import Order, Ring
from interop.ted.row_values import dense, first_apart, first_set, flags, fresh, side_by_side, whole

Specs = dict[Path, tuple[tuple[int, ...], torch.dtype]]


class Flattened:
    """TED data as flat arrays: their specs, and their values, which are copied when they are asked for.

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

    def __init__(self, leaves: Leaves, ring: Ring, names: Names, done_key: Path, verify: bool = True) -> None:
        for path, leaf in leaves.items():
            if tuple(leaf.shape[: len(ring.shape)]) != ring.shape:
                raise ValueError(f"{shown(path)} has the shape {list(leaf.shape)}, the rows have {list(ring.shape)}")
        self.entries = Entries.of(leaves, names)
        for path in self.entries.followed:
            one, another = leaves[path], leaves["next", *path]
            if one.dtype != another.dtype or one.shape != another.shape:
                raise ValueError(
                    f"{shown(('next', *path))} is {another.dtype} {list(another.shape)}, {shown(path)} is {one.dtype} "
                    f"{list(one.shape)}: from row 0 on they cannot stand for each other"
                )
        self._leaves, self._ring, self._names = leaves, ring, names
        self.order = Order(ring, self._done(done_key))
        if verify:
            self._refuse_lossy()

    def specs(self) -> Specs:
        """The shape and the dtype of each array."""
        found, dims, followed = {}, len(self._ring.shape), self.entries.followed
        for path in (*self.entries.outcomes, *self.entries.plain, *followed):
            held = self._held(path)
            count = self.order.size if path in followed else self._ring.items
            found[path] = (count, *held.shape[dims:]), held.dtype
        return found

    def fill(self, path: Path, flat: Tensor) -> None:
        """Copy an array into dense memory of its shape on the CPU."""
        if not flat.numel():
            return
        dims = len(self._ring.shape)
        held, places = whole(dense(self._held(path)), dims), whole(flat, 1)
        if path not in self.entries.followed:
            self._ring.lay_out(held, places)
            return
        places[self.order.rows] = held
        stops = self.order.stops
        places[self.order.rows[stops] + 1] = whole(dense(self._leaves["next", *path]), dims)[stops]

    def array(self, path: Path) -> Tensor:
        """An array on the CPU, in new memory."""
        flat = fresh(*self.specs()[path])
        self.fill(path, flat)
        return flat

    def _held(self, path: Path) -> Tensor:
        return self._leaves["next", *path] if path in self.entries.outcomes else self._leaves[path]

    def _done(self, done_key: Path) -> Tensor:
        """Whether episodes end, [time, *lanes]."""
        if done_key not in self._leaves:
            raise missing_done(done_key, self._leaves)
        known = self.entries.outcomes if is_below(done_key) else self.entries.plain
        if (done_key[1:] if is_below(done_key) else done_key) not in known:
            raise ValueError(f"done_key {shown(done_key)} must be one of done_keys below 'next', or in the root alone")
        done, shape = self._leaves[done_key], self._ring.shape
        if done.numel() != self._ring.items:
            raise ValueError(
                f"{shown(done_key)} has the shape {list(done.shape)}, the rows have {list(shape)}: from row 0 on it "
                "has more than one value a row, of which none ends an episode"
            )
        return flags(done.reshape(shape))

    def _refuse_lossy(self) -> None:
        """ValueError naming the key and the first row, by its place in the storage, that would come back otherwise."""
        found = [*self._lost_outcomes()]
        works = [partial(self._first_lost, path) for path in self.entries.followed]
        rows = side_by_side(works, sum(self._leaves[path].nbytes for path in self.entries.followed))
        for path, row in zip(self.entries.followed, rows, strict=True):
            if row is not None:
                what = f"is not the {shown(path)} of the row that follows, and no episode ends there"
                found.append((row, f"{shown(('next', *path))} {what}"))
        if found:
            row, why = min(found)
            place = tuple(int(each) for each in np.unravel_index(row, self._ring.shape))
            raise ValueError(
                f"row {place[0] if len(place) == 1 else place} would come back otherwise: {why}. Only TED data can be "
                "flattened: use a TensorStorageCheckpointer for other data, name keys in done_keys or reward_keys, or pass "
                "verify=False to lose what differs"
            )

    def _lost_outcomes(self) -> Iterator[tuple[int, str]]:
        """Rows of the root with values that "next" does not repeat."""
        for path in self.entries.outcomes:
            above, below = self._leaves.get(path), self._leaves["next", *path]
            if above is None:
                continue
            if path not in self._names.done:
                yield 0, f"{shown(path)} is in the root too and would be dropped: rewards are kept in 'next'"
            elif (above.dtype, above.shape) != (below.dtype, below.shape):
                yield 0, f"{shown(path)} and {shown(('next', *path))} differ in dtype or shape"
            elif (row := first_set(self._by_row(above))) is not None:
                yield row, f"{shown(path)} is set in the root, where done flags are all False"

    def _first_lost(self, path: Path) -> int | None:
        """The first row with another observation after it than that of the next row, though no trajectory ends there.

        The next row of a lane's last one is the first one in a full ring, and the row itself otherwise.
        """
        after, before = self._by_row(self._leaves["next", *path]), self._by_row(self._leaves[path])
        lanes, stops = self._ring.items // self._ring.shape[0], self.order.stops
        last = self._ring.items - lanes
        row = first_apart(after[:last], before[lanes:], stops)
        if row is not None:
            return row
        row = first_apart(after[last:], before[:lanes] if self._ring.is_full else before[last:], stops - last)
        return None if row is None else row + last

    def _by_row(self, leaf: Tensor) -> Tensor:
        return leaf.flatten(0, len(self._ring.shape) - 1)


class Rebuilt:
    """TED data from flat arrays: its specs, and its values, which are copied into given memory.

    Args:
        flat: the shapes and dtypes of the flat arrays.
        done: the flat array that ends trajectories.
        ring: the rows.
        names: the keys of done flags and rewards.
        root_only: those of `names` that are in the root.
        next_only: done flags that the root does not have.

    Raises ValueError for arrays that are not of these rows.
    """

    def __init__(
        self,
        flat: Specs,
        done: Tensor,
        ring: Ring,
        names: Names,
        root_only: Sequence[Path] = (),
        next_only: Sequence[Path] = (),
    ) -> None:
        if done.numel() != ring.items:
            raise ValueError(f"done flags of shape {list(done.shape)} for {ring.items} rows: one a row is needed")
        self.order = Order(ring, ring.taken_back(flags(done.reshape(-1))))
        self._ring = ring
        self._made: dict[Path, list[tuple[Path, str]]] = {}
        self.specs: Specs = {}
        """The shape and the dtype of each entry of the TED data."""
        for path, (shape, dtype) in flat.items():
            count, below = shape[0] if shape else 0, ("next", *path)
            if count == self.order.size:
                made = [(path, "root"), (below, "next")]
            elif count != ring.items:
                raise ValueError(
                    f"{shown(path)} has {count} rows: {ring.items} rows with {self.order.size - ring.items} ends have "
                    f"{ring.items}, or {self.order.size} with what came after the ends"
                )
            elif path not in names or path in root_only:
                made = [(path, "row")]
            else:
                implied = path in names.done and path not in next_only
                made = [(below, "row"), *([(path, "zero")] if implied else [])]
            self._made[path] = made
            self.specs |= {each: ((*ring.shape, *shape[1:]), dtype) for each, _ in made}

    def implied(self) -> set[Path]:
        """Done flags of the root, which were not saved."""
        return {path for made in self._made.values() for path, kind in made if kind == "zero"}

    def fillings(self, path: Path, flat: Tensor, rows: Mapping[Path, Tensor]) -> list[Callable[[], None]]:
        """Functions that copy a flat array into those entries of the TED data that are in `rows`."""
        if not flat.numel():
            return []
        held = whole(dense(flat), 1)
        return [partial(self._fill, held, rows[entry], kind) for entry, kind in self._made[path] if entry in rows]

    def _fill(self, flat: np.ndarray, memory: Tensor, kind: str) -> None:
        in_place = memory.device.type == "cpu" and memory.is_contiguous()
        made = memory if in_place else fresh(memory.shape, memory.dtype)
        rows, order = whole(made, len(self._ring.shape)), self.order
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
            memory.copy_(made)


def missing_done(key: Path, leaves: Leaves) -> ValueError:
    """The error of data without the flags that end episodes."""
    known = ", ".join(shown(path) for path in leaves)
    return ValueError(f"{shown(key)} is missing from row 0 on, the flag that ends episodes; there are {known}")
