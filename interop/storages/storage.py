"""The base class of storages."""

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self

import torch
from tensordict import TensorDictBase

from fbuf.memory_plan import Plan, Share
from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.checkpoint.state import EXACT, Apply, Component, LoadOptions
from interop.data.arguments import EMPTY, class_of, whole
from interop.data.randomness import Seeded
from interop.engine import plans
from interop.engine.followers import Follower, Followers
from interop.engine.guard import Guard
from interop.host.ring import Ring
from interop.shared.processes import starting_a_worker
from interop.shared.storage_lock import StorageLock
from interop.storages.contents import Contents


class Storage(Component, Seeded):
    """Items by slot. A subclass defines `set`, `get`, `__len__` and `_empty`.

    Buffers hold `lock` while they read or write. Direct calls of `get` and `set` do not: hold it yourself where other
    threads or processes use the storage.

    Args:
        max_size: the largest number of items.
        checkpointer: saves and loads the content.
        compilable: keep the counters local to this process.
    """

    ndim = 1
    _checkpointer: Any = None
    default_checkpointer: Callable[[], Any] = StorageCheckpointerBase
    _compilable = False
    contents: Contents  # what the library asks of the items
    generations: Any = None  # how often each row was written, if a writer counts that
    guard: Guard  # the lock and the transactions
    reopened = False  # whether the rows were written by an earlier process
    lock: StorageLock
    followers: Followers  # the buffers that are told of writes
    ring: Ring  # rows in use, cursor, and counters of writes

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # here, for subclasses that do not call `__init__`
        storage = super().__new__(cls, *args, **kwargs)
        storage.followers = Followers()
        storage.ring = Ring()
        storage.guard = Guard(storage)
        storage.lock = storage.guard.lock
        storage.contents = storage._new_contents()
        return storage

    def _new_contents(self) -> Contents:
        """The items as the library asks for them, of a new storage."""
        return Contents(self)

    def __init__(self, max_size: int, checkpointer: Any = None, compilable: bool = False) -> None:
        self._max_size = whole("max_size", max_size)
        self._compilable = compilable
        if checkpointer is not None:
            self.checkpointer = checkpointer

    @property
    def max_size(self) -> int:
        """Capacity in items."""
        return self._max_size

    @property
    def checkpointer(self) -> Any:
        """What saves and loads the content."""
        if self._checkpointer is None:
            self._checkpointer = type(self).default_checkpointer()
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, value: Any) -> None:
        value = value() if isinstance(value, type) else value
        if value is not None and not isinstance(value, StorageCheckpointerBase):
            raise TypeError(f"checkpointer must be a StorageCheckpointerBase, got {class_of(value)}")
        self._checkpointer = value

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save the content in a folder, by the checkpointer."""
        self.checkpointer.dumps(self, path)

    def loads(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Load a checkpoint of a storage or of a whole buffer, by the checkpointer. After an error nothing has changed.

        `verify`, `strict`, `cast` and `allow_pickle` are those of `ReplayBuffer.loads`.
        """
        self.checkpointer.loads(self, path, **options)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Change saved data by `hook(data, path=None)`; see `StorageCheckpointerBase`."""
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Change loaded data by `hook(data, out=None)`."""
        self.checkpointer.register_load_hook(hook)

    def state(self) -> dict[str, Any]:
        """A tree of arrays and plain values, which may be views. The lock is held."""
        raise NotImplementedError(f"{type(self).__name__} does not define state_dict() or state()")

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        """Check a result of `state`, or of `state_dict`. The returned function puts it in; until then nothing changes.

        A class of the user's that defines `load_state_dict` checks it only then.
        """
        if type(self).load_state_dict is Storage.load_state_dict:
            raise NotImplementedError(f"{type(self).__name__} does not define load_state_dict() or with_state()")
        return partial(self.load_state_dict, tree)  # type: ignore[arg-type]  # checked there

    def state_dict(self) -> dict[str, Any]:
        """A copy of the content, as tensors and plain values: `torch.load(weights_only=True)` reads it."""
        with self._unchanging():
            return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy in a result of `state_dict`. After an error nothing has changed."""
        super().load_state_dict(state_dict)

    def _unchanging(self) -> contextlib.AbstractContextManager[Any]:
        return self.lock.held()

    def _put_in(self, apply: Apply) -> None:
        self.guard.replace(apply)

    @property
    def shape(self) -> torch.Size | None:
        """The dims that count as items."""
        return torch.Size([self.max_size])

    @property
    def is_full(self) -> bool:
        """Whether as many items are stored as fit: the next write replaces the oldest."""
        return len(self) == self.max_size

    @property
    def compilable(self) -> bool:
        """Whether the counters belong to one process."""
        return self._compilable

    def is_shared(self) -> bool:
        """Whether other processes see what this one writes."""
        return self.guard.shareable.is_shared()

    def share(self) -> None:
        """Share rows and counters with processes started or forked from now on. O(1) if they are shared already."""
        self.guard.share()

    def before_write(self) -> dict[str, Any]:
        """What `put_back` needs after an interrupted write, beside the counters of the ring. O(1)."""
        return {}

    def put_back(self, before: dict[str, Any]) -> None:
        """Be as before an interrupted write, but for the rows that it has overwritten. Inside a transaction."""

    def row_capacity(self, data: Any) -> int:
        """How many rows fit. Before the first write this depends on the batch `data` that will be written."""
        return self.max_size

    def _max_size_along_dim0(self, *, single_data: object = None, batched_data: object = None) -> int:  # in torchrl
        return self.row_capacity(batched_data if single_data is None else [single_data])

    def random_index(self, batch_size: int) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """An index of items drawn uniformly: int64 [batch_size], a tuple of these for several item dims."""
        if not len(self):
            raise RuntimeError(EMPTY)
        device = "cpu" if self._rng is None else self._rng.device
        batch_size = whole("batch_size", batch_size, least=0)
        slots = torch.randint(len(self), (batch_size,), generator=self._rng, device=device)
        return slots if self.ndim == 1 else torch.unravel_index(slots, self.shape or ())

    _rand_given_ndim = random_index  # its name in torchrl

    def plan(self, data: Any = None) -> Plan:
        """The memory that the storage takes, or will take after the first write of `data`, a batch as for `extend`.

        A `TensorSpec` of an item, or with `ndim` > 1 of a row, serves as data too. Nothing is allocated. RuntimeError where
        data is needed and missing; else the errors of the write.
        """
        with self.lock.held():
            return plans.plan(self.memory_shares(data))

    def memory_shares(self, data: Any) -> list[Share]:
        """The shares of `plan`. Unknown in the base class."""
        return [Share("items", f"of a {type(self).__name__}", "cpu", None)]

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write data at `cursor`, an index. With `set_cursor` the length grows to include it."""
        raise NotImplementedError(f"{type(self).__name__} does not define set()")

    def get(self, index: Any) -> Any:
        """The items at an index."""
        raise NotImplementedError(f"{type(self).__name__} does not define get()")

    def is_live(self, index: Any) -> bool:
        """Whether `get(index)` returns the stored data itself, not a copy."""
        return True

    def add_columns(self, data: TensorDictBase) -> None:
        """Store new entries of all stored items; `data` has these items with all their entries."""
        self[:] = data

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} does not define __len__()")

    def empty(self) -> None:
        """Forget all items; the memory is kept. A storage with buffers is emptied by the `empty` of a buffer instead."""
        with self.lock.held(), self.guard.transaction():
            self.guard.refuse_forked_child()
            self._empty()

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        """Counts, settings and the entries of items by name, for tables: see `fbuf.shown`. No item is read."""
        yield "items", len(self)
        yield "max_size", "no bound" if self.max_size == sys.maxsize else self.max_size
        if self.ndim > 1:
            yield "shape", list(self.shape or ())
        if getattr(self, "device", None) is not None:
            yield "device", str(self.device)  # type: ignore[attr-defined]  # which some storages have
        layout = self.contents.layout
        if layout is not None:
            yield "entries", layout.outline()

    def attach(self, buffer: Follower) -> None:
        """Call `buffer.mark_update(index)` at each write through any buffer. Does not keep the buffer alive."""
        self.followers.attach(buffer)
        follows = any(each.sampler.hooks.follows_writes for each in self.followers.buffers())
        follows = follows or bool(self.followers.observers())
        self.followers.is_watching = self.contents.tracks_writes and follows

    def detach(self, buffer: Follower) -> None:
        """Undo `attach`."""
        self.followers.detach(buffer)

    def contains(self, index: Any) -> Any:
        """Whether a row is stored at an int index; a bool tensor for a tensor of them."""
        rows = self.contents.filled_rows
        if isinstance(index, int):
            return -rows <= index < rows
        if isinstance(index, torch.Tensor):
            return (index >= -rows) & (index < rows)
        raise NotImplementedError(f"contains() takes an int or a tensor, got {type(index).__name__}")

    def flatten(self) -> "Storage":
        """The same content with one dim of items."""
        return self

    def _empty(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not define _empty()")

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.set(index, value, set_cursor=False)

    def __iter__(self) -> Iterator[Any]:
        for row in range(self.contents.filled_rows):
            yield self[row]

    def __contains__(self, index: Any) -> bool:
        return bool(self.contains(index))

    def __getstate__(self) -> dict[str, Any]:
        # The buffer that owns this storage attaches itself and sets the generator.
        state = {**self.__dict__, "followers": Followers(), "_rng": None}
        del state["lock"], state["guard"], state["contents"]
        if not starting_a_worker():
            return {**state, "ring": copy.deepcopy(self.ring)}
        self._refuse_to_share()
        self.share()
        return {**state, "_guard": self.guard.given()}

    def _refuse_to_share(self) -> None:
        """RuntimeError for a storage that cannot be shared with a process that is starting."""
        if self._compilable:
            raise RuntimeError(
                f"Cannot share a {type(self).__name__} that is compilable between processes, each would count on its own: "
                "build it with compilable=False"
            )
        self.guard.refuse_forked_child()

    def __setstate__(self, state: dict[str, Any]) -> None:
        guard = state.pop("_guard", None)
        self.__dict__.update(state)
        if guard is not None:
            self.guard.take(guard)


def is_undoable(storage: Storage) -> bool:
    """Whether a write changes more than rows and the counters of the ring: whether the class defines `before_write`."""
    return type(storage).before_write is not Storage.before_write
