"""Tensors, tensordicts and pytrees in preallocated memory."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor

from interop.codec import Layout, stack_items
from interop.index import as_int, as_tensor
from interop.processes import starting_a_worker
from interop.shared_int import counter
from interop.storages.rows import JaxRows, Rows, TorchRows, rows_in_jax
from interop.storages.storage import Storage


class TensorStorage(Storage):
    """Items in memory that the user gives: a tensor, tensordict, tensorclass or pytree of tensors, taken to be full.

    Args:
        storage: the memory; its leaves share their first `ndim` dims.
        max_size: must agree with the size of `storage` where both are given.
        device: where the memory is; "auto" leaves it where it is.
        ndim: how many leading dims count as items: 1 for rows, 2 for [time, environments].
        compilable: keep the length local to this process.
    """

    _MAPPED = False  # whether rows are in files: tensordicts that are views of them come locked

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
    ) -> None:
        if storage is None and max_size is None:
            raise ValueError("TensorStorage needs the memory to use (storage=...), or a max_size")
        if ndim < 1:
            raise ValueError(f"ndim must be at least 1, got {ndim}")
        self.ndim = ndim
        self.device: torch.device | str = device if device == "auto" else torch.device(device)
        self._layout: Layout | None = None
        self._rows: Rows | None = None
        self._lanes: tuple[int, ...] = ()
        self._length = counter(compilable)
        if storage is None:
            super().__init__(max_size, compilable=compilable)  # type: ignore[arg-type]  # checked above
            return
        layout = Layout.of(storage, ndim)
        tensors = layout.flatten(storage, ndim)
        shape = tensors[0].shape[:ndim]
        if max_size is not None and max_size != shape[0]:
            raise ValueError(f"max_size={max_size} does not agree with the size of the storage, {shape[0]}")
        if any(0 in [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in tensors):
            raise ValueError("a tensor of the storage was expanded: its rows share memory. Pass storage.clone()")
        super().__init__(math.prod(shape), compilable=compilable)
        self.device = tensors[0].device if device == "auto" else torch.device(device)
        self._adopt(layout, TorchRows([tensor.detach().to(self.device) for tensor in tensors], tuple(shape[1:])))
        self._length.value = self.max_size

    def _adopt(self, layout: Layout, rows: Rows) -> None:
        self._layout, self._rows, self._lanes = layout, rows, rows.lanes

    @property
    def initialized(self) -> bool:
        """Whether memory is there."""
        return self._rows is not None

    @property
    def max_size(self) -> int:
        if self.ndim == 1 or self._rows is None:
            return self._max_size
        return self._row_count * math.prod(self._lanes)

    @property
    def _row_count(self) -> int:
        return -(-self._max_size // math.prod(self._lanes))

    @property
    def _filled_rows(self) -> int:
        return self._length.value // math.prod(self._lanes)

    @property
    def shape(self) -> torch.Size | None:
        """The filled part: [rows, *lanes]; None before the first write."""
        return torch.Size([self._filled_rows, *self._lanes]) if self._rows is not None else None

    def row_capacity(self, data: Any) -> int:
        if self._rows is not None or self.ndim == 1:
            return self._row_count
        return -(-self._max_size // math.prod(_first(data).shape[1 : self.ndim]))

    def __len__(self) -> int:
        return self._length.value

    @property
    def _storage(self) -> Any:
        """The whole memory as the user's type."""
        if self._rows is None or self._layout is None:
            return None
        return self._build(self._rows.tensors, (self._row_count, *self._lanes))

    def _allocate(self, layout: Layout, lanes: tuple[int, ...], first: Sequence[Tensor]) -> Rows:
        raise RuntimeError("this TensorStorage was built without memory; use LazyTensorStorage to have it allocated")

    def admit(self, data: Any, dims: int, lead: tuple[int, ...] | None = None) -> list[Tensor]:
        """The leaves of data with `dims` leading dims, checked; the first data fixes the layout and allocates.

        KeyError, TypeError or RuntimeError where data does not fit, or its leading dims are not `lead`. What is stored
        does not change.
        """
        layout = self._layout or Layout.of(data, dims)
        leaves = layout.flatten(data, dims)
        if not leaves:
            raise RuntimeError("cannot store items without any tensor")
        if leaves[0].ndim < dims:
            raise RuntimeError(
                f"the storage has ndim={self.ndim}: data needs {dims} leading dims, got {leaves[0].ndim}"
            )
        found = tuple(leaves[0].shape[:dims])
        if lead is not None and found != lead:
            raise RuntimeError(f"the index names places of shape {lead}, data has {found}; nothing was written")
        if lead is None:
            lanes = found[dims - self.ndim + 1 :] if self.ndim > 1 else ()
            if self._rows is not None and lanes != self._lanes:
                raise RuntimeError(f"items have the batch dims {self._lanes}, got {lanes}; nothing was written")
        else:
            lanes = self._lanes if self._rows is not None else lead[len(lead) - self.ndim + 1 :]
        if self._rows is None:
            if self.device == "auto":
                self.device = leaves[0].device
            self._adopt(layout, self._allocate(layout, lanes, leaves))
        return leaves

    def set_run(self, start: int, index: Tensor, data: Any) -> None:
        """Write rows one after the other from `start`, around the ring; `index` names them."""
        leaves = self.admit(_stacked(data), self.ndim)
        if leaves[0].shape[0] != index.shape[0]:
            raise RuntimeError(f"{index.shape[0]} places for {leaves[0].shape[0]} rows; nothing was written")
        self._own_rows().write_run(start, leaves)
        self._grow(min(start + leaves[0].shape[0], self._row_count))
        self._last_cursor = index

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write data at an int, slice, mask, array or tensor of rows. Of equal rows the last wins.

        IndexError for rows out of range, and the errors of `admit`: then nothing was written. O(batch).
        """
        data = _stacked(data)
        single = as_int(cursor)
        new = self._rows is None
        # A place is counted from the end of the filled part, like a place that is read; nothing is filled at first.
        lanes = tuple(_first(data).shape[(0 if single is not None else 1) :][: self.ndim - 1]) if new else self._lanes
        whole = -(-self._max_size // math.prod(lanes))
        filled = whole if new or set_cursor else self._filled_rows
        if single is not None:
            if not -filled <= single < whole:
                raise IndexError(f"index {single} is out of range for {filled} rows; nothing was written")
            single = single + filled if single < 0 else single
            leaves = self.admit(data, self.ndim - 1)
            self._own_rows().write_at(single, leaves)
            reached = single + 1
        else:
            place = _from_the_end(cursor, filled, whole)
            named = _indexed((whole, *lanes), place)
            leaves = self.admit(data, len(named), named)
            self._own_rows().write_at(place, leaves)
            rows = torch.arange(whole)[place[0] if isinstance(place, tuple) and place else place]
            reached = int(rows.max()) + 1 if rows.numel() else 0
        if set_cursor:
            self._grow(reached)
            self._last_cursor = cursor

    def _grow(self, reached: int) -> None:
        if reached > self._filled_rows:
            self._length.value = reached * math.prod(self._lanes)

    def get(self, index: Any) -> Any:
        """What is stored at index, over the filled part: a view for ints and slices, a copy for arrays and masks.

        RuntimeError before the first write, IndexError out of range.
        """
        rows, filled = self._own_rows(), (self._filled_rows, *self._lanes)
        if self.ndim > 1 and isinstance(index, tuple) and len(index) == self.ndim and all(_is_long(i) for i in index):
            flat = torch.zeros((), dtype=torch.int64)
            for axis, each in enumerate(index):
                flat = flat * filled[axis] + _in_range(each, filled[axis])
            return self._build(rows.read(flat.reshape(-1)), tuple(flat.reshape(-1).shape))
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        single = as_int(index)
        if single is not None and not -filled[0] <= single < filled[0]:
            raise IndexError(f"index {single} is out of range: {filled[0]} rows are stored")
        if single is not None or _is_basic(index):
            place = index if single is None else single
            views = [tensor[: filled[0]][place] for tensor in rows.tensors]
            return self._build(views, _indexed(filled, place), locked=self._MAPPED)
        if isinstance(index, tuple):
            return self._build([tensor[: filled[0]][index] for tensor in rows.tensors], _indexed(filled, index))
        place = as_tensor(index)
        if place.dtype == torch.bool:
            if tuple(place.shape) != filled[: place.ndim]:
                raise IndexError(f"the mask has shape {list(place.shape)}, the filled part {list(filled)}")
            place = place.to(rows.device)
            return self._build([t[: filled[0]][place] for t in rows.tensors], _indexed(filled, place.cpu()))
        place = _in_range(place, filled[0])
        if self.ndim == 1 and place.ndim == 1:
            return self._build(rows.read(place), tuple(place.shape))
        return self._build([t[place.to(t.device)] for t in rows.tensors], (*place.shape, *filled[1:]))

    def build(self, leaves: Sequence[Tensor], batch_size: Sequence[int]) -> Any:
        """Items around tensors that were read."""
        return self._build(leaves, batch_size)

    def _build(self, leaves: Sequence[Tensor], batch_size: Sequence[int], locked: bool = False) -> Any:
        assert self._layout is not None
        device = self.device if isinstance(self.device, torch.device) else None
        built = self._layout.build(leaves, batch_size, device)
        if locked and is_tensor_collection(built):
            built.lock_()
        return built

    def _own_rows(self) -> Rows:
        if self._rows is None:
            raise RuntimeError("Cannot get elements out of a non-initialized storage: call extend() or add() first")
        return self._rows

    def flatten(self) -> Storage:
        """A storage over a copy of the content with the item dims merged into one; self where there is only one."""
        rows = self._own_rows()
        if self.ndim == 1:
            return self
        kept = [tensor[: self._filled_rows].flatten(0, self.ndim - 1) for tensor in rows.tensors]
        return TensorStorage(self._build(kept, (len(self),)), device=self.device)

    def _is_shared(self) -> bool:
        return self._rows is not None and (isinstance(self._rows, JaxRows) or self._rows.forked or self._rows.shared)

    def _empty(self) -> None:
        self._length.value = 0
        self._last_cursor = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        rows = state.pop("_rows")
        if rows is None and starting_a_worker():
            raise RuntimeError(
                f"Cowardly refusing to share a {type(self).__name__} that was not written to: the workers would each "
                "allocate their own. Call extend() or add() first"
            )
        if rows is None:
            return {**state, "_tensors": None}
        if not starting_a_worker():  # a pickle or copy is a buffer of its own
            return {**state, "_tensors": [tensor.detach().as_subclass(Tensor).clone() for tensor in rows.tensors]}
        if isinstance(rows, TorchRows):
            rows.share()
        return {**state, "_tensors": rows.tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = state.pop("_tensors")
        super().__setstate__(state)
        self._rows = None
        if tensors is not None:
            owned = isinstance(self.device, torch.device) and rows_in_jax(self.device)
            self._rows = (
                JaxRows.holding(tensors, self._lanes)
                if owned
                else TorchRows(self._kept(tensors), self._lanes, self._MAPPED)
            )

    def _kept(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Unpickled rows in the kind of memory of this storage."""
        return tensors

    def __repr__(self) -> str:
        data = "<empty>" if self._rows is None else self[:]
        body = f"data={data},\nshape={self.shape},\nlen={len(self)},\nmax_size={self.max_size}"
        return f"{type(self).__name__}(\n" + "\n".join("    " + line for line in body.splitlines()) + ")"


def _stacked(data: Any) -> Any:
    return stack_items(data) if isinstance(data, list) else data


def _first(data: Any) -> Tensor:
    leaves = Layout.of(data, 0).flatten(data, 0)
    if not leaves:
        raise RuntimeError("cannot store items without any tensor")
    return leaves[0]


def _from_the_end(index: Any, filled: int, whole: int) -> Any:
    """The index with what counts from the end of `filled` rows named from the start of all `whole` rows."""
    if isinstance(index, tuple):
        return (_from_the_end(index[0], filled, whole), *index[1:]) if index else index
    if index is Ellipsis:
        return slice(0, filled)
    if isinstance(index, slice):
        beyond = index.stop is not None and index.stop > filled
        return slice(*index.indices(whole if beyond else filled)) if (index.step or 1) > 0 else index
    if index is None or as_int(index) is not None:
        return index
    place = as_tensor(index)
    if place.dtype == torch.bool:
        if place.shape[0] not in (filled, whole):
            raise IndexError(f"the mask has {place.shape[0]} entries, {filled} rows are stored; nothing was written")
        if place.ndim == 1 and place.shape[0] != whole:
            place = torch.cat([place, place.new_zeros(whole - place.shape[0])])
        return place
    return torch.where(place < 0, place + filled, place) if place.numel() else place


def _is_basic(index: Any) -> bool:
    if isinstance(index, tuple):
        return all(_is_basic(each) for each in index)
    return index is Ellipsis or index is None or isinstance(index, slice) or as_int(index) is not None


def _is_long(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.int64


def _indexed(shape: tuple[int, ...], index: Any) -> tuple[int, ...]:
    """The shape that indexing an array of `shape` gives; IndexError out of range. Touches no memory."""
    return tuple(torch.empty((), dtype=torch.bool).expand(shape)[index].shape)


def _in_range(index: Tensor, length: int) -> Tensor:
    """The index with negative entries counted from the end; IndexError out of range."""
    if index.numel():
        low, high = torch.aminmax(index)
        if high >= length or low < -length:
            wrong = int(high) if high >= length else int(low)
            raise IndexError(f"index {wrong} is out of range: {length} rows are stored")
        if low < 0:
            index = torch.where(index < 0, index + length, index)
    return index
