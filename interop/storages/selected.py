"""Some items of another storage, to read."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data.layout import KeyPath, Layout
from interop.host.ring import Ring
from interop.storages.contents import Contents
from interop.storages.storage import Storage
from interop.storages.unmoved import UnmovedRows


class SelectedItems(Storage):
    """Chosen items of another storage in a chosen order, without a copy. Nothing can be written through it.

    An index counts the chosen items: slot i here is slot `slots[i]` there. Values that are edited in place there are read
    here. Once rows were written there, reads raise a RuntimeError: other items may be where the chosen ones were. Takes
    8 bytes an item.

    Args:
        base: the storage that has the items. Its lock is held, and is the lock of this storage, too.
        slots: int64 [n], flat slots of stored items.
        starts: int64, increasing, the places in `slots` of items that do not continue the item before them. Place 0 is one.

    Attributes:
        base: the storage that has the items.
        slots: as above.
    """

    base: Storage
    slots: np.ndarray

    def __init__(self, base: Storage, slots: np.ndarray, starts: np.ndarray) -> None:
        super().__init__(len(slots))
        self._begin(base, slots, starts)

    def _begin(self, base: Storage, slots: np.ndarray, starts: np.ndarray) -> None:
        self.base = base
        self.slots = slots
        self.guard = base.guard
        self.lock = base.lock
        self._starts = starts
        self._rows = UnmovedRows(base)
        self.ring = _FixedRing(base.ring, len(slots), starts)
        self.contents = _SelectedContents(self)

    @property
    def device(self) -> torch.device | str | None:
        """Where the items are; None if that is not known."""
        return getattr(self.base, "device", None)

    def __len__(self) -> int:
        return len(self.slots)

    def located(self, index: object) -> np.ndarray:
        """The slots in `base` of items at an index of NumPy, [*shape of the index].

        IndexError out of range, RuntimeError if rows were written there since the items were chosen.
        """
        if not self._rows.still_there():
            raise RuntimeError(
                "rows were written to the buffer since these items were chosen, and may have replaced them: choose again, "
                "by episodes.split() or episodes.select()"
            )
        return np.asarray(self.slots[index])  # type: ignore[call-overload]  # NumPy raises

    def get(self, index: object) -> object:
        """The items at an int, slice, mask, array or tensor: a copy, or a view for an int if the base has views.

        IndexError out of range, RuntimeError if rows of the base were written since.
        """
        if isinstance(index, tuple):
            if len(index) != 1:
                raise RuntimeError(f"these items have one dim, got an index of {len(index)}")
            index = index[0]
        return self.base.get(self._named_there(index))

    def is_live(self, index: object) -> bool:
        return self.base.is_live(self._named_there(index[0] if isinstance(index, tuple) else index))

    def _named_there(self, index: object) -> object:
        """The index in the base of items here."""
        if isinstance(index, Tensor):
            index = index.detach().cpu().numpy()
        elif isinstance(index, range | list):
            index = np.asarray(index, np.int64 if not len(index) else None)
        slots = self.located(index)
        places = (slots,) if self.base.ndim == 1 else np.unravel_index(slots, tuple(self.base.shape or ()))
        there = tuple(map(int, places)) if slots.ndim == 0 else tuple(map(torch.from_numpy, places))
        return there if self.base.ndim > 1 else there[0]

    def memory_shares(self, data: object) -> list[Share]:
        return [Share("items", "the slots of chosen items", "cpu", self.slots.nbytes)]

    # ------------------------------------------------------------------ writes

    def set(self, cursor: object, data: object, *, set_cursor: bool = True) -> NoReturn:
        """RuntimeError: write to the buffer that has the items."""
        _refuse()

    def add_columns(self, data: object) -> NoReturn:
        """RuntimeError: write to the buffer that has the items."""
        _refuse()

    def _empty(self) -> NoReturn:
        _refuse()

    # ------------------------------------------------------------------ copies

    def __getstate__(self) -> dict[str, Any]:
        return {"base": self.base, "slots": self.slots, "starts": self._starts, "max_size": self._max_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._max_size = state["max_size"]
        self._begin(state["base"], state["slots"], state["starts"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} items of a {type(self.base).__name__} of {len(self.base)})"


class _SelectedContents(Contents):
    """The chosen items: what another storage has at their slots."""

    def __init__(self, storage: SelectedItems) -> None:
        super().__init__(storage, storage.base.contents.tracks_writes)
        self._base = storage.base
        self._located = storage.located

    @property
    def layout(self) -> Layout | None:
        return self._base.contents.layout

    @property
    def fixed_layout(self) -> Layout | None:
        return self._base.contents.fixed_layout

    def column(self, key: NestedKey) -> None:
        """None: the items are not next to each other there. KeyError for an entry that is not stored."""
        self._base.contents.column(key)

    def read(self, key: NestedKey, slots: np.ndarray) -> Tensor | None:
        return self._base.contents.read(key, self._located(slots))

    def host_columns(self, paths: Sequence[KeyPath]) -> list[np.ndarray | None] | None:
        columns = self._base.contents.host_columns(paths)
        if columns is None:
            return None
        slots = self._located(slice(None))
        return [None if column is None else column[slots] for column in columns]

    def editable(self, given: object) -> NoReturn:
        _refuse()

    def refuse_edit(self, paths: Iterable[KeyPath]) -> NoReturn:
        _refuse()


class _FixedRing(Ring):
    """The counters of rows that are never written. Edits are those that another ring counts; of which rows is not known."""

    def __init__(self, base: Ring, size: int, starts: np.ndarray) -> None:
        super().__init__()
        self.size = self.written = size
        self._base = base
        self._starts = [int(start) for start in starts if start]

    @property
    def counts(self) -> tuple[int, int, int]:
        self.version = self._base.version
        return super().counts

    def slots_edited_since(self, version: int | None, stored: int, length: int) -> tuple[int, np.ndarray]:
        self.version = self._base.version
        return super().slots_edited_since(version, stored, length)

    def discontinuities(self) -> list[int]:
        return self._starts


def _refuse() -> NoReturn:
    raise RuntimeError(
        "these items are chosen from another buffer and can only be read: write to that buffer; nothing was changed"
    )
