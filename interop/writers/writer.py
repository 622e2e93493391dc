"""The base class of writers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from interop.checkpoint.state import Stateful
from interop.data.randomness import Seeded
from interop.storages import Storage


class Writer(Stateful, Seeded, ABC):
    """Chooses the slots of new items and writes them to the storage.

    A subclass defines `add` (returns the slot), `extend` (returns a tensor of slots) and `_empty`. The buffer then passes
    the slots to every sampler. For an item that is not kept `add` returns None, and `extend` has -1.

    A subclass with attributes defines `state_dict`, which returns tensors and plain values in dicts with text keys and
    lists, and `load_state_dict`. Checkpoints save this state. See docs/do/extending.md.
    """

    _storage: Storage

    tracks_generations = False  # whether writes of each row are counted
    keeps_order = True  # whether items stay in the order in which they were written

    compilable = False

    def __init__(self, compilable: bool = False) -> None:
        self.compilable = compilable

    def check_storage(self, storage: Storage) -> None:
        """ValueError for a storage that this writer cannot fill."""

    def register_storage(self, storage: Storage) -> None:
        """Write to this storage from now on."""
        self._storage = storage

    @abstractmethod
    def add(self, data: Any) -> Any:
        """Write one item; the slot it took."""

    @abstractmethod
    def extend(self, data: Any) -> Tensor:
        """Write a batch of items; the slots they took."""

    @property
    def leaves_slots_on_host(self) -> bool:
        """Whether `extend_on_host` is `extend` but for the device of the slots. Then a buffer calls it."""
        return False

    def extend_on_host(self, data: object) -> Tensor:
        """`extend`, with slots on the host; `extend` has them on the device of the data, if data has one.

        The samplers need them on the host, and the way there and back would wait for the device twice.
        """
        return self.extend(data).cpu()

    def refuse_write(self, call: str) -> None:
        """RuntimeError for a writer that takes no items by this call. Called before anything changes."""

    def refuse_empty(self) -> None:
        """RuntimeError for a buffer that must not be emptied. Called before anything changes."""

    def clear(self, empty_write_count: bool = True) -> None:
        """Start over: the buffer was emptied. Calls `_empty`, which a subclass defines."""
        self._empty(empty_write_count)

    @abstractmethod
    def _empty(self, empty_write_count: bool = True) -> None:
        """Start over, the buffer was emptied."""

    @property
    def write_count(self) -> int:
        """How many rows were ever written."""
        return 0

    @property
    def is_undoable(self) -> bool:
        """Whether a write changes more than the storage and its counters."""
        return True

    def before_write(self) -> dict[str, Any]:
        """What `put_back` needs after an interrupted write. O(1). Of a user's class its attributes."""
        return self.__dict__.copy()

    def put_back(self, before: dict[str, Any]) -> None:
        """Be as before an interrupted write."""
        self.__dict__.update(before)

    def generations_of(self, index: Any) -> Tensor:
        """How often rows were overwritten: int64 in the shape of `index`, an int or a tensor of rows.

        0 after the first write; -1 for rows that were never written or do not exist, and if nothing counts writes. Of
        coordinates, a tuple or a tensor [n, ndim], only the rows matter.
        """
        return torch.full_like(self._rows_of(index), -1)

    def _rows_of(self, index: Any) -> Tensor:
        """The rows that an index of `generations_of` names."""
        first = index[0] if isinstance(index, tuple) else index
        rows = first if isinstance(first, Tensor) else torch.as_tensor(first, device="cpu")
        if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
            raise TypeError(f"rows must be integers, got {rows.dtype}")
        coordinates = not isinstance(index, tuple) and rows.ndim == 2 and rows.shape[1] == self._storage.ndim > 1
        return (rows[:, 0] if coordinates else rows).to(torch.int64)

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        """Its settings by name, for text and tables: see `fbuf.shown`."""
        return iter(())

    def stamped(self, data: Any, rows: Any) -> Any:
        """The data to store in rows, with the row numbers if these are stored too. `data` is not changed."""
        return data

    def note(self, data: Any, rows: Any) -> None:
        """Set the row numbers in the data of the caller."""

    def _replicate_index(self, index: Any) -> Any:
        """`Storage.coordinates`, under its name in torchrl."""
        return self._storage.contents.coordinates(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rng": None}
