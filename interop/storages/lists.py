"""Any objects in a Python list."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, is_tensor_collection
from torch import Tensor

from fbuf.checkpoint import CheckpointMismatch, Fields
from fbuf.memory_plan import Share
from interop.checkpoint.plain_values import opened, plain
from interop.checkpoint.state import EXACT, Apply, LoadOptions, as_tensors, defined_outside
from interop.checkpoint.values import load_items, save_items
from interop.data.index import as_int, as_list
from interop.data.layout import KeyPath, Layout
from interop.data.pytrees import each_leaf
from interop.engine import plans
from interop.shared.processes import starting_a_worker
from interop.storages import planning
from interop.storages.checkpointers import ListStorageCheckpointer, Unsaved
from interop.storages.contents import Contents
from interop.storages.longer_items import with_more
from interop.storages.storage import Storage


class ListStorage(Storage):
    """A list of items of any kind, one a slot.

    Args:
        max_size: capacity; None for no bound.
        compilable: accepted for compatibility; a list is never shared.
        device: where tensors, tensordicts and the leaves of other items are moved; None leaves them alone.
    """

    default_checkpointer = ListStorageCheckpointer
    _kind = "list"  # its name in checkpoints

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
        items = [self._to_keep(item) for item in (unbind(data) if single is None else [data])]
        if isinstance(cursor, slice):
            places: Sequence[int] = range(*cursor.indices(len(self)))
        else:
            places = as_list(cursor, len(self)) if single is None else [single]
        if len(places) != len(items):
            if not (isinstance(cursor, slice) and set_cursor):
                raise ValueError(f"{len(places)} places were given for {len(items)} items; nothing was written")
            self._resize(cursor, items)
            return
        self._check(places)
        self._note(places, set_cursor)
        for place, item in zip(places, items, strict=True):
            if place == len(self._storage):
                self._storage.append(item)
            else:
                self._storage[place] = item

    def before_write(self) -> dict[str, Any]:
        return {"items": self._storage, "length": len(self._storage)}

    def put_back(self, before: dict[str, Any]) -> None:
        self._storage = before["items"]
        del self._storage[before["length"] :]

    def memory_shares(self, data: Any) -> list[Share]:
        return [*self._tensors_of(planning.example(data, 1)), Share("items", "the objects of the list", "cpu", None)]

    def _tensors_of(self, data: Any) -> list[Share]:
        """The tensors of a full list of items like the first of data."""
        items = self._storage[:1] if data is None else unbind(data[:1])
        if not items or self.max_size == sys.maxsize:
            return []
        try:
            layout = Layout.of(items[0], 0)
        except TypeError:  # not tensors: the size is unknown
            return []
        leaves = layout.flatten(items[0], 0)
        place = plans.place_of(self.device or leaves[0].device) if leaves else ""
        return plans.arrays("items", layout.leaves, (self.max_size,), place, counts="at most")

    def get(self, index: Any) -> Any:
        """An item for an int, a list of items for a slice, sequence, mask or tensor."""
        if isinstance(index, tuple):
            if len(index) != 1:
                raise RuntimeError(f"a list storage has one dim of items, got an index of {len(index)}")
            index = index[0]
        single = as_int(index)
        places = as_list(index, len(self)) if single is None else [single]
        for place in (min(places), max(places)) if places else ():
            if not self.contains(place):
                raise IndexError(f"index {place} is out of range: {len(self)} items are stored")
        found = self._taken(places)
        return found if single is None else found[0]

    def _new_contents(self) -> Contents:
        return ListContents(self, tracks_writes=type(self).set is ListStorage.set)

    def __len__(self) -> int:
        return len(self._storage)

    def _resize(self, cursor: slice, items: list[Any]) -> None:
        """Assign another number of items to a slice of the list."""
        changed = list(self._storage)
        changed[cursor] = items
        if len(changed) > self.max_size:
            raise RuntimeError(
                f"{len(changed)} items are past the maximum capacity of {self.max_size}; nothing was written"
            )
        start, stop, _ = cursor.indices(len(self))
        self.ring.replaced(start, max(start, stop), len(items), self.max_size)
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

    def _note(self, places: Sequence[int], set_cursor: bool) -> None:
        """Count a write in the ring: a run around the ring, or rows elsewhere."""
        places = [place + len(self._storage) if place < 0 else place for place in places]
        first = places[0] if places else 0
        if set_cursor:
            runs = all(place == (first + n) % self.max_size for n, place in enumerate(places))
            rows = range(first, first + len(places)) if runs else np.array(places)
            self.ring.wrote_elsewhere(rows, self.max_size, max(places, default=0) >= len(self._storage))
        else:
            self.ring.edited(list(places))

    def _to_keep(self, item: Any) -> Any:
        """The stored form of an item: the same object, unless it must be moved or detached."""
        return item if self.device is None and not _has_graph(item) else each_leaf(item, self._moved)

    def _moved(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) and not is_tensor_collection(leaf):
            return leaf
        leaf = leaf.detach() if _has_graph(leaf) else leaf
        return leaf if self.device is None else leaf.to(self.device)

    def _taken(self, places: Iterable[int]) -> list[Any]:
        """The items at places."""
        return [self._storage[place] for place in places]

    def _empty(self) -> None:
        self.ring.renewed(0)
        self._storage = []

    # ------------------------------------------------------------------ checkpoints

    def state(self, allow_pickle: bool = False) -> dict[str, Any]:
        """A tree of the items and the ring. TypeError for an item that cannot be saved.

        With `allow_pickle`, which the checkpointer decides, objects of other kinds are pickled.
        """
        items = save_items(self._held(), allow_pickle, remedy=ListStorageCheckpointer.REMEDY)
        return {"storage": self._kind, **self._setting(), **self._ring(), "items": items}

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        if isinstance(tree, dict) and "storage" not in tree:
            return self._with_state_dict(tree)
        where = f"the checkpoint of a {type(self).__name__}"
        fields = Fields(tree, where)
        if fields.text("storage") != self._kind:
            raise CheckpointMismatch(f"{where} is of a {fields.text('storage')[:40]}, to be loaded into a {self._kind}")
        for name, mine in {**self._setting(), "capacity": self.max_size}.items():
            if type(fields.any(name)) is not type(mine) or fields.any(name) != mine:
                raise CheckpointMismatch(
                    f"{where} does not fit: {name} is {str(fields.any(name))[:40]}, in the storage {mine}. Build it with "
                    "the same arguments"
                )
        items = fields.any("items")
        if not isinstance(items, Unsaved):
            held = load_items(items, options.allow_pickle, where, self._home())
            return self._applying(self._loaded(held, where), fields)
        if not isinstance(items.items, list):
            raise CheckpointMismatch(f"{where}: load hooks give a list, got {type(items.items).__name__}")
        return self._applying(self._kept(items.items, where), fields)

    def _held(self) -> list[Any]:
        """The saved form of the items, one value each."""
        return self._storage

    def _home(self) -> torch.device | None:
        """The device of loaded tensors; None for the device that they had."""
        return self.device

    def _loaded(self, held: list[Any], where: str) -> list[Any]:
        """The stored form of saved values. CheckpointError if the storage could not have held them."""
        return self._kept(held, where)

    def _kept(self, items: list[Any], where: str) -> list[Any]:
        """The stored form of items from load hooks or a state dict."""
        if len(items) > self.max_size:
            raise CheckpointMismatch(f"{where} has {len(items)} items, the storage a capacity of {self.max_size}")
        try:
            return [self._to_keep(item) for item in items]
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointMismatch(f"{where}: what was loaded cannot be stored: {error}") from error

    def _applying(self, items: list[Any], ring: Fields) -> Apply:
        written, end = ring.whole("written"), ring.whole("end", 0, self.max_size)

        def apply() -> None:
            self._storage = items
            self.ring.restored(written, end)

        return apply

    def state_dict(self) -> dict[str, Any]:
        """Copies of the items: "_storage", a list of tensors, plain values and, for tensordicts, dicts of their entries.

        `torch.load(weights_only=True)` reads it. TypeError for an item that cannot be saved, naming it.
        """
        with self._unchanging():
            items = [plain(held, f"item {place}") for place, held in enumerate(self._held())]
            added = {}
            if defined_outside(self, "state"):
                known = {"storage", "items", *self._setting(), *self._ring()}
                added = as_tensors({name: value for name, value in self.state().items() if name not in known})
            return {"_storage": items, "_ring": self._ring(), **added}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Store copies of the items of a `state_dict`. After an error nothing has changed.

        TypeError for an item of a kind that `state_dict` does not give, `CheckpointMismatch` for too many items.
        """
        if not isinstance(state_dict, dict):
            name = type(state_dict).__name__
            raise TypeError(f"the state_dict of a {type(self).__name__}: expected a dict, got {name}")
        super().load_state_dict(state_dict)

    def _with_state_dict(self, given: dict[str, Any]) -> Apply:
        """Check a result of `state_dict`; the returned function replaces all items with copies of its items."""
        where = f"the state_dict of a {type(self).__name__}"
        fields = Fields(given, where)
        if "_metadata" in fields or not isinstance(given.get("_storage"), list):
            raise CheckpointMismatch(
                f"{where}: it is the state of something else, it has '_metadata' or no list '_storage'"
            )
        held = [opened(each, f"{where}, item {place}") for place, each in enumerate(fields.items("_storage"))]
        items = self._loaded(held, where)
        if "_ring" not in fields:
            return self._applying(items, Fields({"written": len(items), "end": len(items) % self.max_size}, where))
        ring = fields.fields("_ring")
        if ring.whole("capacity", 1) != self.max_size:
            raise CheckpointMismatch(
                f"{where} is of a capacity of {ring.whole('capacity')}, the storage has {self.max_size}: build it with the "
                "same max_size"
            )
        return self._applying(items, ring)

    def _ring(self) -> dict[str, Any]:
        return {"capacity": self.max_size, "written": self.ring.written, "end": self.ring.cursor}

    def _setting(self) -> dict[str, Any]:
        """Arguments that must be equal in a checkpoint and the storage that loads it."""
        return {}

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


class ListContents(Contents):
    """The items of a list."""

    def appended(
        self, places: tuple[Tensor, ...], more: Mapping[KeyPath, object], replace: Mapping[KeyPath, object]
    ) -> Callable[[], None]:
        storage = self._storage
        assert isinstance(storage, ListStorage)
        [rows] = places
        slots = rows.tolist()
        items = with_more([storage[slot] for slot in slots], slots, more, replace)

        def write() -> None:
            storage.set(slots, items, set_cursor=False)

        return write


def _has_graph(item: Any) -> bool:
    """Whether a tensor of an item requires a gradient."""
    if isinstance(item, Tensor):
        return item.requires_grad
    if isinstance(item, LazyStackedTensorDict):  # whose entries need not be alike
        return any(map(_has_graph, item.tensordicts))
    if is_tensor_collection(item) or isinstance(item, dict):
        return any(map(_has_graph, item.values()))
    return isinstance(item, tuple | list) and any(map(_has_graph, item))


def unbind(data: Any) -> list[Any]:
    """The items that `extend` takes from an iterable. TypeError for what is not one: dict, str and single objects."""
    if isinstance(data, Tensor) or is_tensor_collection(data):
        if data.ndim == 0:
            raise TypeError("extend() needs a leading dim to iterate over, got one without dims: use add()")
        return list(data.detach().clone().unbind(0))  # items of their own, not views of what the caller holds
    if isinstance(data, str | bytes | dict) or not isinstance(data, Iterable | np.ndarray):
        raise TypeError(f"extend() of a list storage takes a sequence of items, got {type(data).__name__}: use add()")
    return list(data)
