"""The groups of stored items, and how often each was used."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from tensordict.utils import NestedKey

from fbuf.checkpoint import CheckpointMismatch
from interop.checkpoint.state import Apply, Entries, a_key, integers, key_of
from interop.engine.kept_uses import KeptUses
from interop.samplers.groups import Group, Groups, Id
from interop.samplers.item_values import ItemValues
from interop.samplers.staleness_draws import first_of_equal
from interop.samplers.validation import flat_slots
from interop.shared.processes import OneProcess
from interop.storages import Storage, columns

_NONE = np.zeros(0, np.int64)
_ONE_PROCESS = (
    "a PromptGroupSampler with max_uses cannot be used in another process, which would not know what others consume: sample "
    "and write in the process that made it, or use max_uses=None"
)


class ItemGroups(ItemValues):
    """Groups of the rows of one storage, up to date with what was written and edited.

    Args:
        size, key, most, size_key: `group_size`, `group_key`, `max_uses` and `size_key` of `PromptGroupSampler`.

    Attributes:
        ran_out: whether the last draw left fewer groups than it took.
    """

    marks_new_items = True
    groups: Groups
    _pending: np.ndarray  # slots of written rows whose ids were not read yet
    _edits: int | None  # version of the ring whose edits were read; None to read all rows
    _file: KeptUses | None
    _words: np.ndarray | None  # of an earlier process, before the ids were read

    def __init__(self, size: int | None, key: NestedKey, most: int | None, size_key: NestedKey | None = None) -> None:
        self.size = size
        self.size_key = size_key
        self.key = key
        self.most = most
        self._process = None if most is None else OneProcess(_ONE_PROCESS)
        self._storage: Callable[[], Storage | None] = _none  # of the last write or draw
        self.clear()

    def clear(self) -> None:
        self.groups = Groups(self.size, self.most)
        self._pending = _NONE
        self._edits = None
        self._file = None
        self._words = None
        self.ran_out = False

    @property
    def ready(self) -> list[Group]:
        """Groups that can be drawn, of any staleness, as of the last write or draw."""
        return self.groups.ready

    @property
    def storage(self) -> Storage | None:
        """The storage of the last write or draw; None if there is none."""
        return self._storage()

    def use(self, chosen: list[Group]) -> None:
        """Count a use of each of these groups, in memory and in the file."""
        self.groups.use(chosen)
        self._keep_changes()
        self.ran_out = len(self.ready) < len(chosen)

    def written(self, index: object, *, storage: Storage | None = None) -> None:
        """The items at index are new, in this order."""
        slots = flat_slots(index, storage)[0]
        slots = slots[slots >= 0].astype(np.int64)
        slots = first_of_equal(slots[::-1])[::-1]  # of equal slots the last
        if self._pending.size:
            slots = np.concatenate((self._pending[~np.isin(self._pending, slots)], slots))
        self._pending = slots
        if storage is not None:
            self._keep(storage)
            self.try_sync(storage)

    def take_over(self, storage: Storage) -> None:
        """Know the groups of the stored rows now: a write would remove the rows that tell which groups are broken."""
        self.clear()
        self._storage = weakref.ref(storage)
        self._keep(storage)
        if len(storage):
            self.try_sync(storage)

    def reloaded(self, storage: Storage) -> None:
        self._keep(storage)
        self._words = None
        self._keep_changes(every=True)

    @property
    def are_uses(self) -> bool:  # type: ignore[override]  # a class attribute of other values
        return self.most is not None

    def _keep(self, storage: Storage) -> None:
        """Keep the groups in the file of the storage; start from those of an earlier process at the next draw or write."""
        uses = None if self.most is None else storage.contents.keep_other(KeptUses, self._file)
        if uses is None:
            return
        if uses.bind(self) and self._edits is None and len(storage):
            self._words = uses.read(len(storage))
        else:
            uses.give_all(self, *self.groups.changes(every=True))
        uses.was_read()
        self._file = uses  # the last: the next call does what an interrupted one has not done

    def _keep_changes(self, every: bool = False) -> None:
        if self._file is not None:
            (self._file.give_all if every else self._file.give)(self, *self.groups.changes(every))

    def try_sync(self, storage: Storage) -> None:
        """`sync`, unless the ids cannot be read."""
        with contextlib.suppress(KeyError, TypeError, ValueError):  # the rows are stored already: the draw raises
            self.sync(storage)

    def before_write(self) -> dict[str, Any]:
        self.groups.begin()
        return self.__dict__.copy()

    def put_back(self, before: dict[str, Any]) -> None:
        self.__dict__.update(before)
        self.groups.undo()

    def sync(self, storage: Storage) -> None:
        """Read the ids of rows that were written or edited; the next call does where this one raises."""
        if self._storage() is not storage:
            self._storage = weakref.ref(storage)
        if self._words is not None:
            self._recall(storage, self._words)
        groups = self.groups
        undoable = self.groups.undoable
        try:
            self._read_ids(storage)
        except BaseException:
            groups.undo(undoable)
            raise

    def _read_ids(self, storage: Storage) -> None:
        edits, places = storage.ring.slots_edited_since(self._edits, storage.contents.filled_rows, len(storage))
        if edits != self._edits:
            self.groups.truncate(len(storage))
        pending = self._pending[self._pending < len(storage)]
        places = places[~np.isin(places, pending)] if places.size else places
        if places.size or pending.size:
            ids = ids_of(storage, self.key, np.concatenate((places, pending)))
            slots = places.tolist()
            changed = ids[: places.size]
            sizes = self._sizes_of(storage, np.concatenate((places, pending)))
            differing = self.groups.differing(slots, changed)
            self.groups.write(
                [slots[at] for at in differing],
                [changed[at] for at in differing],
                None if sizes is None else [sizes[at] for at in differing],
            )
            self.groups.write(pending.tolist(), ids[places.size :], None if sizes is None else sizes[places.size :])
        self._edits, self._pending = edits, _NONE  # one statement: no interrupt forgets rows that were not read
        self._keep_changes()

    def _sizes_of(self, storage: Storage, slots: np.ndarray) -> list[int] | None:
        """The sizes of the groups of items at flat slots; None where all have one. The errors of `ids_of`; ValueError."""
        if self.size_key is None:
            return None
        sizes = ids_of(storage, self.size_key, slots, "sizes of groups")
        for size in sizes:
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"{self.size_key!r} must be the size of a group, an integer of at least 1, got {size!r}"
                )
        return cast(list[int], sizes)

    def _recall(self, storage: Storage, words: np.ndarray) -> None:
        """Enter the groups of an earlier process, except rows that were written since."""
        slots = np.arange(min(words.size, len(storage)))
        slots = np.roll(slots, -storage.contents.oldest_row * storage.contents.items_per_row)
        slots = slots[(words[slots] > 0) & ~np.isin(slots, self._pending)]
        sizes = self._sizes_of(storage, slots) or [self.size or 1] * slots.size
        rows = zip(slots.tolist(), words[slots].tolist(), ids_of(storage, self.key, slots), sizes, strict=True)
        self.groups = Groups.of_words(rows, self.size, self.most)
        self._words = None
        self._keep_changes(every=True)

    def refuse_forked_child(self) -> None:
        if self._process is not None:
            self._process.check()

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """The tree of a checkpoint."""
        return {
            "group_size": self.size,
            **({} if self.size_key is None else {"size_key": key_of(self.size_key)}),
            "group_key": key_of(self.key),
            "max_uses": self.most,
            "groups": self.groups.state(),
            "pending": self._pending,
            "ran_out": self.ran_out,
        }

    def with_state(self, entries: Entries, batch_size: int | None = None) -> Apply:
        """Check a result of `state`, whose groups must divide this batch size. The returned function puts it in."""
        size = None if entries.any("group_size") is None else entries.whole("group_size", 1)
        size = entries.parameter("group_size", size, self.size)
        size_key = a_key(entries, "size_key") if "size_key" in entries else None
        if (size is None) != (size_key is not None):
            raise entries.wrong("group_size", "an integer, or None beside a size_key", size)
        size_key = entries.parameter("size_key", size_key, self.size_key)
        if batch_size is not None and size is not None and batch_size % size:
            raise CheckpointMismatch(f"batch_size={batch_size} is no multiple of group_size={size}")
        most = None if entries.any("max_uses") is None else entries.whole("max_uses", 1)
        most = entries.parameter("max_uses", most, self.most)
        key = entries.parameter("group_key", a_key(entries, "group_key"), self.key)
        groups = Groups.of_state(entries.fields("groups"), size, most)
        pending = integers(entries, "pending", None, 0, 2**48)
        ran_out = entries.flag("ran_out")

        def put() -> None:
            self.size = size
            self.size_key = size_key
            self.most = most
            self.key = key
            self.groups = groups
            self._pending = pending
            self.ran_out = ran_out
            self._edits = None

        return put

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None, "_storage": _none}


def _none() -> None:
    return None


def ids_of(storage: Storage, key: NestedKey, slots: np.ndarray, what: str = "group ids") -> list[Id]:
    """The ids of items at flat slots; `what` they are, for messages.

    KeyError where they are not stored; TypeError or ValueError for other values.
    """
    try:
        column = columns.read(storage, key, slots)
    except (KeyError, TypeError):  # it is not stored, or not as a tensor
        with contextlib.suppress(KeyError, TypeError):
            if (texts := columns.texts(storage, key, slots)) is not None:
                return list[Id](texts)
        raise
    if column.is_floating_point():  # whole floats, as columns that have passed through another library
        as_integers = column.double().to(torch.int64)
        column = as_integers if bool((as_integers == column.double()).all()) else column
    if column.dtype == torch.bool or column.is_floating_point() or column.is_complex():
        raise TypeError(f"{what} must be integers or texts, {key!r} holds {column.dtype}")
    if column.numel() != slots.size:
        raise ValueError(f"{key!r} must have one value an item, it has the shape {list(column.shape[1:])}")
    ids: list[Id] = column.reshape(-1).tolist()
    return ids
