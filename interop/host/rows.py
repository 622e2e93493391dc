"""Rows are written and read here, one copy a leaf: tensors [rows, *lanes, ...] in the memory of torch or of JAX.

On the CPU rows live in torch's memory (ordinary, given by the user, shared or memory-mapped): an item that the user
holds stays a live view, and no length of batch costs a compilation. They are read by NumPy's
and torch's gathers, which copy whole rows; XLA's goes element by element, and has fewer reads of memory under way at a
time. On a GPU rows are arrays of JAX, written by a donated program, read by the one that draws.
"""

import ctypes
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor
from torch import Tensor

from interop.data import bridge, staging
from interop.host.equal_places import chosen_items, coordinates, last_of_equal
from interop.host.leaf_rows import LARGE, LeafRows
from interop.host.maps import Space, in_shared_memory
from interop.host.paging import Paging
from interop.host.runs import Runs
from interop.host.stored_rows import Rows

_BRIEF = 1 << 16  # bytes that are copied faster than another thread starts
_move = ctypes.memmove  # releases the GIL; if other threads run Python, getting it back takes a while
_move_briefly = ctypes.PYFUNCTYPE(None, *3 * (ctypes.c_size_t,))(ctypes.cast(_move, ctypes.c_void_p).value or 0)
_from_numpy = torch.from_numpy
_is_cpu = attrgetter("is_cpu")


class TorchRows(Rows):
    """Rows in tensors of torch, on any device."""

    _space: Space | None = None  # where rows may have no memory yet
    runs: Runs | None = None  # of rows on the host

    def __init__(self, tensors: Sequence[Tensor], lanes: tuple[int, ...], mapped: bool = False) -> None:
        """`mapped`: the tensors are memory maps."""
        self._tensors = list(tensors)
        self.lanes = lanes
        self._mapped = mapped
        self._space = Space.of(self._tensors)
        self._hold()

    def _hold(self) -> None:
        self.device = self.tensors[0].device
        plain = [tensor.detach().as_subclass(Tensor) for tensor in self.tensors]
        self._plain = plain
        self._numpy = [bridge.numpy_view(tensor) for tensor in plain] if self.device.type == "cpu" else None
        self._dense = [_place(tensor) for tensor in plain]
        self._items = [LeafRows(tensor, self.lanes) for tensor in plain]
        simple = all(items.take is not None and not items.is_bfloat16 for items in self._items)
        self._widest = max((items.size for items in self._items), default=0) if simple else math.inf
        self._takes: tuple[Any, list[Any]] = None, []  # of the leaves that were read last, whose places were not known
        self._paging = Paging.of(self._items, self.tensors, self.lanes, self._mapped)
        self.runs = None if self._numpy is None else Runs(self._items, self.lanes, self._paging)
        self._extents = _extents(plain)

    @property
    def shared(self) -> bool:
        """Whether other processes see writes."""
        return all(isinstance(t, MemoryMappedTensor) or t.is_shared() or t.numel() == 0 for t in self.tensors)

    def share(self) -> None:
        """Move CPU memory to shared memory. Earlier views keep the old memory."""
        if self.device.type != "cpu" or self.shared:
            return
        self._numpy, self._items, self._plain, self._dense = None, [], [], []
        self.runs = None
        try:
            self._tensors = [in_shared_memory(tensor) for tensor in self._tensors]
        finally:  # some may have moved before memory ran out
            self._hold()

    def beside(self, other: Rows, order: Sequence[int]) -> "TorchRows":
        """The leaves of both, in this order."""
        every = [*self.tensors, *other.tensors]
        return TorchRows([every[place] for place in order], self.lanes, self._mapped)

    def apart(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """The leaves; those in the memory of these rows are copied, since a write would change them."""
        starts, stops = self._extents
        low, high = starts[0], stops[-1]
        for place, leaf in enumerate(leaves):
            start = leaf.data_ptr()
            if start < high and (stop := start + leaf.nbytes) > low and stops[bisect_left(starts, stop) - 1] > start:
                leaves = [*leaves[:place], leaf.detach().clone(), *leaves[place + 1 :]]
        return leaves

    def array(self, place: int) -> np.ndarray | None:
        """NumPy's view of a leaf, with bfloat16 as unsigned integers; None on devices."""
        found: np.ndarray | None = None if self._numpy is None else self._numpy[place]
        return found

    def column(self, place: int) -> Tensor | None:
        """The memory of a leaf as a plain tensor. Do not keep it: the memory may move."""
        return self._plain[place]

    @property
    def tensors(self) -> list[Tensor]:
        """The leaves."""
        return self._tensors

    def refuse(self, places: Any, leaves: Sequence[Tensor], in_order: bool) -> None:
        """Raise for a write that cannot be done, at resolved places or a range of rows around the ring."""
        if self._space is not None:
            self.reserve(places.stop if isinstance(places, range) else _stop(places))

    def reserve(self, rows: int) -> None:
        """Take memory for the first `rows` rows. OSError if there is none."""
        space = self._space
        if space is not None and rows > space.rows:
            space.take(min(rows, space.capacity))
            if space.rows == space.capacity:
                self._space = None

    def copies(self, filled: int) -> list[Tensor]:
        """Copies of the leaves, of which `filled` rows are filled."""
        plain = [tensor.detach().as_subclass(Tensor) for tensor in self.tensors]
        if self._space is None:
            return [tensor.clone() for tensor in plain]
        copies = [torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in plain]
        there = max(filled, self._space.rows)
        for copy, tensor in zip(copies, plain, strict=True):  # to read the other rows would give them memory
            copy[:there] = tensor[:there]
        return copies

    def at(self, filled: int, index: Any) -> list[Tensor]:
        """The leaves at an index over their filled rows: views if torch gives a view."""
        if isinstance(index, slice):
            start, stop, step = index.indices(filled)
            return [tensor[start:stop:step] for tensor in self.tensors]
        return [tensor[:filled][index] for tensor in self.tensors]

    def write_run(self, start: int, leaves: Sequence[Tensor], index: Tensor | None = None) -> None:
        """Write leaves [n, *lanes, ...] from row `start` on, around the ring. Of more than all rows the last stay.

        `index`, the numbers of the rows, may be one of the leaves.
        """
        capacity, count = self._plain[0].shape[0], leaves[0].shape[0]
        kept = min(count, capacity)
        start = (start + count - kept) % capacity
        head = min(kept, capacity - start)
        leaves = self.apart(leaves)
        if head == count:
            if left := self._copy_bytes(start, count, leaves):
                leaves = self._reached(leaves)
            for place in left:
                self._copy(place, start, leaves[place])
        else:
            leaves = self._reached(leaves)
            for place, leaf in enumerate(leaves):
                self._copy(place, start, leaf[count - kept : count - kept + head])
                self._copy(place, 0, leaf[count - kept + head :])

    def _reached(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """The leaves where NumPy can read them if it writes the rows. Waits once for leaves on a device."""
        if self._numpy is None or all(map(_is_cpu, leaves)):
            return leaves
        return staging.fetched([leaf.detach() for leaf in leaves])

    def _copy(self, place: int, start: int, leaf: Tensor) -> None:
        stop = start + leaf.shape[0]
        if self._numpy is None or leaf.device.type != "cpu" or leaf.nbytes >= LARGE or _unusual(leaf):
            self._plain[place][start:stop].copy_(leaf.detach())
        else:
            self._numpy[place][start:stop] = bridge.numpy_view(leaf.detach() if leaf.requires_grad else leaf)

    def _copy_bytes(self, start: int, count: int, leaves: Sequence[Tensor]) -> list[int]:
        """Copy the leaves whose rows are one block of memory, with a third of the overhead of NumPy. Returns the others."""
        left = []
        for place, (leaf, (memory, row, whole, dtype)) in enumerate(zip(leaves, self._dense, strict=True)):
            size = count * row
            plain = leaf.is_cpu and leaf.is_contiguous() and not leaf.is_neg() and not leaf.is_conj()
            fits = leaf.dtype is dtype and leaf.nbytes == size < LARGE and 0 <= start * row <= whole - size
            if plain and fits and (given := leaf.data_ptr()):  # zeros of autograd are tensors without memory
                (_move_briefly if size < _BRIEF else _move)(memory + start * row, given, size)
            else:
                left.append(place)
        return left

    def write_at(self, index: Any, leaves: Sequence[Tensor]) -> None:
        """Write at a resolved index of the leading dims. Of equal places the last wins."""
        leaves = self.apart(leaves)
        if type(index) is int:
            left = self._copy_bytes(index, 1, leaves)
            if not left:
                return
        leaves = self._reached(leaves)
        if self._numpy is not None:  # NumPy promises that the last of equal places wins; torch does not
            place = _numpy_index(index)
            for held, leaf in zip(self._numpy, leaves, strict=True):
                held[place] = bridge.numpy_view(_on_host(leaf))
            return
        slots, last, lanes = last_of_equal(index, self.lanes)
        for target, leaf in zip(self._plain, leaves, strict=True):
            at = tuple(map(torch.from_numpy, coordinates(slots, target.shape[0], lanes)))
            chosen = chosen_items(leaf.detach(), last, target.shape[1 + len(lanes) :])
            target[at] = chosen.to(target.device)

    def read(self, slots: Tensor, known: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        """Copies of the items at flat slots, which are not checked. Leaves that are `known` are not read."""
        if self._numpy is None:
            slots = staging.to_device(slots, self.device)
            return [items.read(slots, None) for items in self._items]
        slots = slots if slots.is_cpu else staging.to_host([slots])[0]
        at, known = slots.numpy(), known or {}
        if self._paging is not None and self._paging.due():
            return self._paging.read(slots, at, known)
        if self._widest * at.size < LARGE:  # without a look at each
            places, takes = self._takes
            if places != known.keys():
                takes = [items.take for place, items in enumerate(self._items) if place not in known]
                self._takes = set(known), takes
            found = [_from_numpy(take(at, 0, None, "clip")) for take in takes]  # other modes copy twice
            for place in sorted(known) if len(known) > 1 else known:
                found.insert(place, known[place])
            return found
        return [known[place] if place in known else items.read(slots, at) for place, items in enumerate(self._items)]

    @property
    def host_arrays(self) -> list[np.ndarray] | None:
        """NumPy views of the leaves; None on devices."""
        return self._numpy

    @property
    def gives_views(self) -> bool:
        return True

    @property
    def on_host(self) -> bool:
        """Whether NumPy sees the rows."""
        return self._numpy is not None

    @property
    def in_place(self) -> bool:
        """Whether writes to `tensors` change the stored rows."""
        return self.on_host


def _place(tensor: Tensor) -> tuple[int, int, int, torch.dtype]:
    """Address, bytes of a row, bytes of all rows, and dtype. No bytes for rows that are not one block on the host."""
    dense = tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes > 0
    size = tensor.nbytes if dense else 0
    return (tensor.data_ptr(), size // tensor.shape[0], size, tensor.dtype) if dense else (0, 1, 0, tensor.dtype)


def _unusual(leaf: Tensor) -> bool:
    return leaf.is_conj() or leaf.is_neg() or leaf.layout != torch.strided


def _on_host(leaf: Tensor) -> Tensor:
    """A tensor with the same values that NumPy can view."""
    if leaf.requires_grad:
        leaf = leaf.detach()
    return leaf.cpu().resolve_conj().resolve_neg() if leaf.device.type != "cpu" or _unusual(leaf) else leaf


def _extents(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Starts and stops of the memory of tensors, sorted and merged; one empty range for none."""
    starts, stops = [0], [0]
    memory = [tensor.untyped_storage() for tensor in tensors]
    for start, size in sorted((each.data_ptr(), each.nbytes()) for each in memory if each.nbytes()):
        if start < stops[-1]:
            stops[-1] = max(stops[-1], start + size)
        else:
            starts.append(start)
            stops.append(start + size)
    return (starts[1:], stops[1:]) if len(starts) > 1 else (starts, stops)


def _numpy_index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_numpy_index(each) for each in index)
    return index.numpy() if isinstance(index, Tensor) else index


def _stop(places: Any) -> int:
    """The last row of resolved places, plus one."""
    rows = places[0] if isinstance(places, tuple) else places
    if isinstance(rows, slice):
        return max(rows.start, rows.stop)
    return rows + 1 if isinstance(rows, int) else int(rows.max()) + 1 if rows.numel() else 0
