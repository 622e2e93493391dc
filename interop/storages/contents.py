"""What the library asks of stored items, beside `get` and `set`: their rows, their layout, their entries."""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from tensordict.utils import NestedKey

from interop.data import bridge
from interop.data.keys import as_path
from interop.data.layout import KeyPath, Layout
from interop.engine.kept_values import KeptValues
from interop.engine.table import Table
from interop.host.ring import Ring

_Kept = TypeVar("_Kept", bound=KeptValues)


class Holder(Protocol):
    """A storage."""

    ndim: int
    ring: Ring

    @property
    def shape(self) -> torch.Size | None: ...

    def row_capacity(self, data: Any, /) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Any: ...


class Contents:
    """The items of any storage, as its length and `get` show them. The lock of the storage is held.

    Args:
        storage: has the items. It is not kept alive.
        tracks_writes: whether the ring counts every write.
    """

    def __init__(self, storage: Holder, tracks_writes: bool = False) -> None:
        self._reference = weakref.ref(storage)
        self.tracks_writes = tracks_writes

    @property
    def _storage(self) -> Holder:
        storage = self._reference()
        assert storage is not None
        return storage

    @property
    def filled_rows(self) -> int:
        """Rows that were written, along the first dim."""
        return len(self._storage)

    @property
    def items_per_row(self) -> int:
        """The items of each row: 1 for one item dim, and where nothing is stored."""
        return max(len(self._storage) // max(self.filled_rows, 1), 1)

    @property
    def oldest_row(self) -> int:
        """The row with which the stored ones begin: the one at the cursor of a full ring, else 0."""
        storage = self._storage
        filled = self.filled_rows
        return storage.ring.cursor if filled and filled == storage.row_capacity(None) else 0

    def rows_in_order(self) -> np.ndarray:
        """The numbers of the stored rows from the oldest to the newest, int64 [rows]."""
        filled = self.filled_rows
        return (np.arange(filled) + self.oldest_row) % max(filled, 1)

    def row_ages(self) -> np.ndarray:
        """How many of the stored rows follow each of them, int64 [rows]: 0 for the newest."""
        filled = self.filled_rows
        return (self.oldest_row - 1 - np.arange(filled)) % max(filled, 1)

    def coordinates(self, rows: Any) -> Any:
        """Row numbers as they are for one item dim; a [n, ndim] tensor of coordinates, row by row, for more."""
        storage = self._storage
        if storage.ndim == 1:
            return rows
        lanes = storage.shape[1:] if storage.shape is not None else torch.Size([])
        rows = torch.as_tensor(rows).reshape(-1)
        within = torch.cartesian_prod(*(torch.arange(n, device="cpu") for n in lanes)).reshape(-1, len(lanes))
        return torch.cat(
            [rows.repeat_interleave(within.shape[0])[:, None], within.repeat(rows.shape[0], 1).to(rows.device)], dim=1
        )

    @property
    def compressed_bytes(self) -> int | None:
        """The bytes of all items; None if they are not compressed."""
        return None

    # ------------------------------------------------------------------ entries

    @property
    def layout(self) -> Layout | None:
        """The layout of the items in memory; None for a storage whose items may differ, and before the first write."""
        return None

    @property
    def fixed_layout(self) -> Layout | None:
        """The layout that new items must have; None if the next write fixes it, or items may differ."""
        return None

    def column(self, key: NestedKey) -> torch.Tensor | None:
        """The memory of an entry, [rows, *lanes, ...]; None if entries can only be read by `get`.

        Do not keep it: the memory may move. KeyError for an entry that is not stored.
        """
        return None

    def read(self, key: NestedKey, slots: np.ndarray) -> torch.Tensor | None:
        """Copies of an entry of the items at flat slots, [*slots.shape, ...]; None if entries can only be read by `get`.

        KeyError for an entry that is not stored. O(slots).
        """
        held = self.column(key)
        if held is None:
            return None
        ndim = self._storage.ndim
        if ndim == 1 and held.device.type == "cpu" and held.dtype in bridge.DTYPES:
            found = torch.from_numpy(bridge.numpy_view(held).take(slots, 0))
            return found.view(torch.bfloat16) if held.dtype == torch.bfloat16 else found
        shape = tuple(held.shape[:ndim])
        return held[tuple(torch.from_numpy(each).to(held.device) for each in np.unravel_index(slots, shape))]

    def host_columns(self, paths: Sequence[KeyPath]) -> list[np.ndarray | None] | None:
        """NumPy views of entries, [items, ...] each, None for an entry that is not stored; None if there are no views."""
        return None

    # ------------------------------------------------------------------ edits in place

    def editable(self, given: object) -> Any:
        """The stored items as a view, whose entries named in `given` can be written in place."""
        return self._storage[:]

    def refuse_edit(self, paths: Iterable[KeyPath]) -> None:
        """RuntimeError if one of these entries cannot be written in place."""

    def edited(self, rows: Any) -> None:
        """Note that rows, a slice or an array of numbers, were changed in place."""
        self._storage.ring.edited(rows)

    def appended(
        self, places: tuple[torch.Tensor, ...], more: Mapping[KeyPath, object], replace: Mapping[KeyPath, object]
    ) -> Callable[[], None]:
        """Check values that are put behind entries of stored items. The function writes them, and may run twice.

        Args:
            places: of different stored items, int64 [n] for each item dim, on the CPU.
            more: by path, for each item what is put behind its value.
            replace: by path the new values of other entries, [n, ...]; a number is for all.

        Raises, before anything is written: TypeError for items that do not grow, or for an entry that does not; KeyError
        for an entry that is not stored; RuntimeError for another dtype, shape or number of values.
        """
        raise TypeError(
            f"append_to() needs a storage of tensors with text or ragged rows, or a list: the items of a "
            f"{type(self._storage).__name__} do not grow; nothing was written"
        )

    # ------------------------------------------------------------------ values of items in files

    @property
    def kept(self) -> KeptValues | None:
        """Priorities or uses of the items, if they are kept in a file."""
        return None

    def keep(self, kind: type[_Kept]) -> _Kept | None:
        """The file of this kind, made if needed; None for storages that end with the process.

        There is one file: that of another kind is replaced.
        """
        return None

    def keep_other(self, kind: type[_Kept], before: KeptValues | None) -> _Kept | None:
        """`keep`, where this is another file than the one before; else None."""
        if before is not None and self.kept is before:
            return None
        file = self.keep(kind)
        return None if file is before else file


class TableContents(Contents):
    """The items of a table.

    Args:
        storage: has the table.
        tracks_writes: whether the ring counts every write.
        table: the items.
        as_stored: entries that `get` returns as they are in the rows; None if it returns all of them so.
    """

    def __init__(
        self, storage: Holder, tracks_writes: bool, table: Table, as_stored: Collection[KeyPath] | None = None
    ) -> None:
        super().__init__(storage, tracks_writes)
        self._table = table
        self._as_stored = as_stored

    @property
    def filled_rows(self) -> int:
        return self._table.ring.size

    @property
    def items_per_row(self) -> int:
        return self._table.per_row

    @property
    def layout(self) -> Layout | None:
        return self._table.layout

    @property
    def fixed_layout(self) -> Layout | None:
        return self._table.fixed_layout

    def column(self, key: NestedKey) -> torch.Tensor | None:
        path = as_path(key)
        return self._table.column(path) if self._are_read([path]) else None

    def host_columns(self, paths: Sequence[KeyPath]) -> list[np.ndarray | None] | None:
        return None if self._table.layout is None or not self._are_read(paths) else self._table.host_columns(paths)

    def _are_read(self, paths: Iterable[KeyPath]) -> bool:
        """Whether entries are read from the rows, not by the `get` of a subclass."""
        return self._as_stored is None or all(path in self._as_stored for path in paths)

    def editable(self, given: object) -> Any:
        views = self._table.editable(given)
        return super().editable(given) if views is None else views

    def refuse_edit(self, paths: Iterable[KeyPath]) -> None:
        self._table.refuse_edit(paths)

    def edited(self, rows: Any) -> None:
        self._table.ring.edited(rows)
        self._table.edited()

    def appended(
        self, places: tuple[torch.Tensor, ...], more: Mapping[KeyPath, object], replace: Mapping[KeyPath, object]
    ) -> Callable[[], None]:
        if not self._are_read((*more, *replace)):
            raise TypeError(
                f"the get() of {type(self._storage).__name__} makes entries of the rows, which are not what grows: write "
                "whole items, by rb[index] = data; nothing was written"
            )
        return self._table.appended(places, more, replace)

    @property
    def kept(self) -> KeptValues | None:
        return self._table.place.kept

    def keep(self, kind: type[_Kept]) -> _Kept | None:
        kept = self._table.place.keep(kind, self._table.rows is not None)
        return kept if isinstance(kept, kind) else None
