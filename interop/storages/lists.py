"""Any objects in a Python list."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection
from torch import Tensor

from fbuf.checkpoint import CheckpointMismatch, Fields
from fbuf.memory_plan import Share
from interop.checkpoint.list_checkpointers import ListStorageCheckpointer
from interop.checkpoint.list_states import check_setting, cursor_of, items_of, saved_cursor
from interop.checkpoint.plain_values import plain
from interop.checkpoint.state import EXACT, LoadOptions
from interop.checkpoint.values import load_items, save_items
from interop.data.index import as_int, as_list
from interop.data.layout import Layout
from interop.shared.processes import starting_a_worker
from interop.storages import planning
from interop.storages.storage import Storage


class ListStorage(Storage):
    """A list of items of any kind, one a slot.

    Args:
        max_size: capacity; None for no bound.
        compilable: accepted for compatibility; a list is never shared.
        device: where tensors, tensordicts and the leaves of other items are moved; None leaves them alone.
    """

    default_checkpointer = ListStorageCheckpointer
    _AROUND = 0  # containers around an item in what is saved

    def __init__(
        self, max_size: int | None = None, *, compilable: bool = False, device: torch.device | str | None = None
    ) -> None:
        super().__init__(sys.maxsize if max_size is None else max_size, compilable=compilable)
        self._storage: list[Any] = []
        self.device = torch.device(device) if device is not None else None

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write one item at an int, or one item each at a sequence of ints. Appends at most one past the end.

        A slice is assigned as to a list: with `set_cursor` it may change the length. RuntimeError past the capacity or
        the end, ValueError for another number of items than places, TypeError for data that is not a sequence of items;
        the list is as before then.
        """
        single = as_int(cursor)
        if single is not None:
            self._check([single])
            self._told([single], set_cursor)
            self._put(single, self._to_keep(data))
        elif isinstance(cursor, slice):
            self._set_slice(cursor, [self._to_keep(item) for item in unbind(data)], may_resize=set_cursor)
        else:
            places = as_list(cursor, len(self._storage))
            items = [self._to_keep(item) for item in unbind(data)]
            if len(places) != len(items):
                raise ValueError(f"{len(places)} places were given for {len(items)} items; nothing was written")
            self._check(places)
            self._told(places, set_cursor)
            for place, item in zip(places, items, strict=True):
                self._put(place, item)
        if set_cursor:
            self._last_cursor = cursor

    def memory_shares(self, data: Any) -> list[Share]:
        return [*self._tensors_of(planning.example(data, 1)), Share("items", "the objects of the list", "cpu", None)]

    def _tensors_of(self, data: Any) -> list[Share]:
        """The tensors of as many items as there is room for, if all are like the first of data."""
        items = self._storage[:1] if data is None else unbind(data[:1])
        if not items or self.max_size == sys.maxsize:
            return []
        try:
            layout = Layout.of(items[0], 0)
        except TypeError:  # of which nothing is known
            return []
        leaves = layout.flatten(items[0], 0)
        place = planning.place_of(self.device or leaves[0].device) if leaves else ""
        return planning.arrays("items", layout.leaves, (self.max_size,), place, counts="at most")

    def get(self, index: Any) -> Any:
        """An item for an int, a list of items for a slice, sequence, mask or tensor."""
        if isinstance(index, tuple):
            if len(index) != 1:
                raise RuntimeError(f"a list storage has one dim of items, got an index of {len(index)}")
            index = index[0]
        single = as_int(index)
        if single is not None:
            if not self.contains(single):
                raise IndexError(f"index {single} is out of range: {len(self)} items are stored")
            return self._taken([single])[0]
        if isinstance(index, slice):
            return self._taken(range(len(self._storage))[index])
        places = as_list(index, len(self._storage))
        wrong = next((place for place in places if not self.contains(place)), None)
        if wrong is not None:
            raise IndexError(f"index {wrong} is out of range: {len(self)} items are stored")
        return self._taken(places)

    @property
    def tracks_writes(self) -> bool:
        return type(self).set is ListStorage.set

    def __len__(self) -> int:
        return len(self._storage)

    def _set_slice(self, cursor: slice, items: list[Any], may_resize: bool) -> None:
        places = range(*cursor.indices(len(self._storage)))
        if len(places) == len(items):
            self._told(places, may_resize)
            self._storage[cursor] = items
            return
        if not may_resize:
            raise ValueError(f"{len(places)} places were given for {len(items)} items; nothing was written")
        changed = list(self._storage)
        changed[cursor] = items
        if len(changed) > self.max_size:
            raise RuntimeError(
                f"{len(changed)} items are past the maximum capacity of {self.max_size}; nothing was written"
            )
        self.ring.replaced(places.start, places.start + len(places), len(items), self.max_size)
        self._storage = changed

    def _check(self, places: Sequence[int]) -> None:
        length = len(self._storage)
        for place in places:
            if place >= self.max_size:
                raise RuntimeError(f"index {place} is past the maximum capacity of {self.max_size}")
            if place < -length:
                raise IndexError(f"index {place} is out of range: {length} items are stored")
            if place > length:
                raise RuntimeError(
                    f"index {place} is more than one item away from the {length} stored: no gap may be left"
                )
            length += place == length

    def _told(self, places: Sequence[int], set_cursor: bool) -> None:
        """Note a write: of a run around the ring, or elsewhere."""
        places = [place + len(self._storage) if place < 0 else place for place in places]
        first = places[0] if places else 0
        if set_cursor:
            runs = all(place == (first + n) % self.max_size for n, place in enumerate(places))
            rows = range(first, first + len(places)) if runs else np.array(places)
            self.ring.wrote_elsewhere(rows, self.max_size, max(places, default=0) >= len(self._storage))
        else:
            self.ring.edited(list(places))

    def _to_keep(self, item: Any) -> Any:
        """What is put in the list for an item."""
        return self._moved(item)

    def _taken(self, places: Iterable[int]) -> list[Any]:
        """The items for what is in the list at places."""
        return [self._storage[place] for place in places]

    def _put(self, place: int, item: Any) -> None:
        if place == len(self._storage):
            self._storage.append(item)
        else:
            self._storage[place] = item

    def _moved(self, item: Any) -> Any:
        """The item on the device of this storage, without a graph; the same object where nothing is to be done."""
        if isinstance(item, Tensor):
            item = item.detach() if item.requires_grad else item
            return item if self.device is None else item.to(self.device)
        if is_tensor_collection(item):
            item = item.detach() if _requires_grad(item) else item
            return item if self.device is None else item.to(self.device)
        if type(item) in (dict, tuple, list):
            values = list(item.values()) if isinstance(item, dict) else list(item)
            moved = [self._moved(value) for value in values]
            if all(new is old for new, old in zip(moved, values, strict=True)):
                return item
            return dict(zip(item, moved, strict=True)) if isinstance(item, dict) else type(item)(moved)
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*map(self._moved, item))
        return item

    def _empty(self) -> None:
        self.ring.renewed(0)
        self._storage = []

    # ------------------------------------------------------------------ checkpoints

    def saved_items(self, allow_pickle: bool = False) -> dict[str, Any]:
        """The saved tree of the items and the ring. TypeError for an item that cannot be saved."""
        items = save_items(self._held(), allow_pickle, unnamed=self._AROUND)
        return {
            **self._setting(), **self._ring(), "cursor": saved_cursor(self._last_cursor, len(self)), "items": items,
        }  # fmt: skip

    def restoring_items(self, saved: Any, options: LoadOptions, given: Any = None) -> Callable[[], None]:
        """Check saved items, or those given in their place; calling the result stores them in the place of all items."""
        where = f"the checkpoint of a {type(self).__name__}"
        fields = Fields(saved, where)
        check_setting(fields, {**self._setting(), "capacity": self.max_size}, where)
        written, end = fields.whole("written"), fields.whole("end", 0, self.max_size)
        if given is None:
            items = load_items(fields.any("items"), options.allow_pickle, where, self._home(), self.max_size)
            items = self._checked(items, where)
        else:
            items = self._kept(given, where)
        return self._putting(items, written, end, cursor_of(fields, len(items)))

    def _kept(self, given: Any, where: str) -> list[Any]:
        """What is kept of items that a load hook made."""
        if not isinstance(given, list) or len(given) > self.max_size:
            what = f"{len(given)} items" if isinstance(given, list) else type(given).__name__
            raise CheckpointMismatch(f"{where}: a list of at most {self.max_size} items is to be loaded, got {what}")
        try:
            return [self._to_keep(item) for item in given]
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointMismatch(f"{where}: what was loaded cannot be stored: {error}") from error

    def _putting(self, items: list[Any], written: int, end: int, cursor: Any) -> Callable[[], None]:
        def put() -> None:
            self._hold(items)
            self.ring.restored(written, end)
            self._last_cursor = cursor

        return put

    def saved(self) -> dict[str, Any]:
        return self.saved_items()

    def restoring(self, saved: Any, options: LoadOptions = EXACT) -> Callable[[], None]:
        return self.restoring_items(saved, options)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the items: "_storage", a list of tensors, plain values and, for tensordicts, dicts of their entries.

        Of a `CompressedListStorage` the leaves of each item, and beside them "_metadata", what restores it.
        `torch.load(weights_only=True)` reads it. TypeError for an item that cannot be saved, naming it.
        """
        with self.locked():
            held = [plain(each, f"item {n}") for n, each in enumerate(self._held())]
            state = {"_storage": [each[0] for each in held] if self._AROUND else held, "_ring": self._ring()}
            return {**state, "_metadata": [each[1] for each in held]} if self._AROUND else state

    def load_state_dict(self, state_dict: Any) -> None:
        """Copy what `state_dict` gave in. After an error nothing has changed.

        TypeError for an item of another kind than it gives, `CheckpointMismatch` for more items than there is room for.
        """
        with self.locked():
            self.restoring_dict(state_dict)()

    def restoring_dict(self, given: Any) -> Callable[[], None]:
        where = f"the state_dict of a {type(self).__name__}"
        items, written, end = items_of(given, self.max_size, bool(self._AROUND), where)
        return self._putting(self._checked(items, where), written, end, None)

    def _ring(self) -> dict[str, Any]:
        return {"capacity": self.max_size, "written": self.ring.written, "end": self.ring.cursor}

    def _setting(self) -> dict[str, Any]:
        """What a checkpoint must have in common with the storage."""
        return {"storage": "list"}

    def _home(self) -> torch.device | None:
        """Where tensors of a checkpoint go; None for where they were."""
        return self.device

    def _held(self) -> list[Any]:
        """What is saved, one value an item."""
        return self._storage

    def _checked(self, held: list[Any], where: str) -> list[Any]:
        """What was loaded, to be held; CheckpointCorrupt where the storage could not have held it."""
        return held if self.device is None else [self._moved(item) for item in held]

    def _hold(self, held: list[Any]) -> None:
        """Store it in the place of all items."""
        self._storage = held

    def __getstate__(self) -> dict[str, Any]:
        if starting_a_worker():
            raise RuntimeError(
                f"Cannot share a storage of type {type(self).__name__} between processes: use a LazyMemmapStorage or "
                "LazyTensorStorage that has been written to"
            )
        return super().__getstate__()

    def __repr__(self) -> str:
        if not self._storage:
            return f"{type(self).__name__}()"
        return f"{type(self).__name__}(items=[{self._taken([0])[0]}, ...])"


def _requires_grad(held: Any) -> bool:
    if type(held) is TensorDict:
        return any(map(_requires_grad, held.values()))
    if isinstance(held, LazyStackedTensorDict):  # whose entries need not be alike
        return any(map(_requires_grad, held.tensordicts))
    if is_tensor_collection(held):
        return any(map(_requires_grad, held.values(True, True)))
    return isinstance(held, Tensor) and held.requires_grad


def unbind(data: Any) -> list[Any]:
    """The items that `extend` takes from an iterable. TypeError for what is not one: dict, str and single objects."""
    if isinstance(data, Tensor) or (is_tensor_collection(data)):
        if data.ndim == 0:
            raise TypeError("extend() needs a leading dim to iterate over, got one without dims: use add()")
        return list(data.detach().clone().unbind(0))  # items of their own, not views of what the caller holds
    if isinstance(data, str | bytes | dict) or not isinstance(data, Iterable | np.ndarray):
        raise TypeError(f"extend() of a list storage takes a sequence of items, got {type(data).__name__}: use add()")
    return list(data)
