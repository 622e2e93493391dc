"""TED data to flat arrays, in which each observation stands once, and back: on tensors by path."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from interop.ted.entries import Entries, Leaves, Names, Path, shown
from interop.ted.refusals import goes_on, missing_done, refuse_lossy
from interop.ted.ring import Order, Ring
from interop.ted.row_values import dense, flags, fresh, whole

Specs = dict[Path, tuple[tuple[int, ...], torch.dtype]]


class Flattened:
    """TED data as flat arrays: what they are like, and their values to be put where they are wanted.

    Done flags, rewards and what only the root has are [items, ...]; an observation is [items + ends, ...]: the root's values
    of a trajectory, then the last one of "next".

    Args:
        leaves: the tensors, [time, *lanes, ...] each.
        ring: the rows that they are.
        names: the keys with a meaning.
        done_key: what says where episodes end.
        verify: refuse what would come back otherwise.

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
        done = self._done(leaves, ring, done_key)
        # Rows behind the newest one of a ring that is not full were never written, unless the writer has begun anew.
        closed = not ring.is_full and ring.newest < ring.shape[0] - 1 and goes_on(leaves, self.entries)
        self.order = Order(ring, done, closed)
        if verify:
            refuse_lossy(leaves, self.entries, names, self.order)
        self._leaves, self._ring = leaves, ring

    def _done(self, leaves: Leaves, ring: Ring, done_key: Path) -> Tensor:
        """Where episodes end, [time, *lanes]."""
        if done_key not in leaves:
            raise missing_done(done_key, leaves)
        below = done_key[0] == "next" and len(done_key) > 1
        if (done_key[1:] if below else done_key) not in (self.entries.outcomes if below else self.entries.plain):
            raise ValueError(f"done_key {shown(done_key)} must be one of done_keys below 'next', or in the root alone")
        done = leaves[done_key]
        if done.numel() != ring.items:
            raise ValueError(
                f"{shown(done_key)} has the shape {list(done.shape)}, the rows have {list(ring.shape)}: from row 0 on it "
                "has more than one value a row, and does not tell where an episode ends"
            )
        return flags(done.reshape(ring.shape))

    def specs(self) -> Specs:
        """The shape and the dtype of each array."""
        found, dims = {}, len(self._ring.shape)
        for path in (*self.entries.outcomes, *self.entries.plain, *self.entries.followed):
            held = self._leaves["next", *path] if path in self.entries.outcomes else self._leaves[path]
            count = self.order.size if path in self.entries.followed else self._ring.items
            found[path] = (count, *held.shape[dims:]), held.dtype
        return found

    def fill(self, path: Path, flat: Tensor) -> None:
        """Put an array into dense memory of its shape on the CPU."""
        if not flat.numel():
            return
        dims = len(self._ring.shape)
        held, places = whole(dense(self._held(path)), dims), whole(flat, 1)
        if path not in self.entries.followed:
            self._ring.lay_out(held, places)
            return
        places[self.order.rows] = held
        after, stops = self._leaves["next", *path], self.order.stops
        if after.device.type == "cpu" and after.is_contiguous():
            values = whole(dense(after), dims)[stops]
        else:
            index = torch.from_numpy(stops).to(after.device)
            values = whole(dense(movable(after).flatten(0, dims - 1)[index]), 1)
        places[self.order.rows[stops] + 1] = values

    def array(self, path: Path) -> Tensor:
        """An array on the CPU: the rows themselves where these are in its order already."""
        (shape, dtype), held = self.specs()[path], self._held(path)
        in_order = path not in self.entries.followed and len(self._ring.shape) == 1 and not self._ring.oldest
        if in_order and held.device.type == "cpu":
            return held
        flat = fresh(shape, dtype)
        self.fill(path, flat)
        return flat

    def _held(self, path: Path) -> Tensor:
        return self._leaves["next", *path] if path in self.entries.outcomes else self._leaves[path]


class Rebuilt:
    """TED data from flat arrays: what it is like, and its values to be put where they are wanted.

    Args:
        specs: the shapes and dtypes of the flat arrays.
        done: the flat array that says where episodes end.
        ring: the rows that they were.
        names: the keys with a meaning.
        closed: whether the last row of each lane ends a trajectory.
        root_only: paths of `names` that are the root's.
        next_only: done flags that the root does not have.

    Raises ValueError for arrays that are not of these rows.
    """

    def __init__(
        self,
        specs: Specs,
        done: Tensor,
        ring: Ring,
        names: Names,
        closed: bool = False,
        root_only: Sequence[Path] = (),
        next_only: Sequence[Path] = (),
    ) -> None:
        if done.numel() != ring.items:
            raise ValueError(f"done flags of shape {list(done.shape)} for {ring.items} rows: one a row is needed")
        self.order = Order(ring, ring.taken_back(flags(done.reshape(-1))), closed)
        self._ring = ring
        self._made: dict[Path, list[tuple[Path, str]]] = {}
        self.specs: Specs = {}
        """The shape and the dtype of each entry of the TED data."""
        for path, (shape, dtype) in specs.items():
            count = shape[0] if shape else 0
            below: Path = ("next", *path)
            if count == self.order.size:
                made = [(path, "root"), (below, "next")]
            elif count != ring.items:
                raise ValueError(
                    f"{shown(path)} has {count} rows: {ring.items} rows with {self.order.size - ring.items} ends have "
                    f"{ring.items}, or {self.order.size} with what came after the ends"
                )
            elif path not in names or path in root_only:
                made = [(path, "row")]
            elif path in names.done and path not in next_only:
                made = [(below, "row"), (path, "zero")]
            else:
                made = [(below, "row")]
            self._made[path] = made
            self.specs |= {each: ((*ring.shape, *shape[1:]), dtype) for each, _ in made}

    def implied(self) -> set[Path]:
        """Done flags of the root, which were not saved."""
        return {path for made in self._made.values() for path, kind in made if kind == "zero"}

    def fill(self, path: Path, flat: Tensor, rows: Mapping[Path, Tensor]) -> None:
        """Put what a flat array tells into memory for the entries of the TED data, as far as there is some."""
        for each in self.fillings(path, flat, rows):
            each()

    def fillings(self, path: Path, flat: Tensor, rows: Mapping[Path, Tensor]) -> list[Callable[[], None]]:
        """What `fill` does, by entry."""
        if not flat.numel():
            return []
        held = whole(dense(flat), 1)
        return [partial(self._fill_one, held, rows[entry], kind) for entry, kind in self._made[path] if entry in rows]

    def _fill_one(self, held: np.ndarray, memory: Tensor, kind: str) -> None:
        in_place = memory.device.type == "cpu" and memory.is_contiguous()
        made = memory if in_place else fresh(memory.shape, memory.dtype)
        self._put(held, whole(made, len(self._ring.shape)), kind)
        if not in_place:
            movable(memory).copy_(movable(made))

    def _put(self, flat: np.ndarray, rows: np.ndarray, kind: str) -> None:
        """Put what an array tells into rows."""
        if kind == "zero":
            rows.view(np.uint8)[:] = 0
        elif kind == "row":
            self._ring.take_back(flat, rows)
        elif kind == "root":
            np.take(flat, self.order.rows, out=rows, mode="clip")  # the other modes take a copy
        else:
            np.take(flat[1:], self.order.rows, out=rows, mode="clip")
            rows[self.order.unended] = flat[self.order.rows[self.order.unended]]


def movable(tensor: Tensor) -> Tensor:
    """The same memory as a dtype that torch can index: not all operations know unsigned integers."""
    return tensor.view(torch.int16) if tensor.dtype == torch.uint16 else tensor
