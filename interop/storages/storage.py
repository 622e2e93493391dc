"""What every storage does."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Self

import torch

from interop.numbers import whole
from interop.storages.ledger import Ledger
from interop.storages.lock import Lock


class Storage:
    """Items by slot. Subclasses give `set`, `get` and `__len__`; `_empty` and `contains` where the defaults do not fit.

    Buffers take turns: each holds the lock of its storage while it reads or writes. Who calls `get` and `set` directly
    beside them has to see to that itself.

    Args:
        max_size: the largest number of items.
        checkpointer: what saves and loads the content.
        compilable: keep counters local to this process.
    """

    ndim = 1
    checkpointer: Any = None
    _compilable = False
    _last_cursor: Any = None
    _rng: torch.Generator | None = None
    _generations: Any = None  # of its rows, where a writer counts them
    _pid: int  # of the process that made it
    _access: Lock
    _listeners: "_Listeners"
    _ledger: Ledger

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # here, for subclasses that do not call `__init__`
        storage = super().__new__(cls)
        storage._access = Lock()
        storage._listeners = _Listeners()
        storage._ledger = Ledger()
        storage._pid = os.getpid()
        return storage

    def __init__(self, max_size: int, checkpointer: Any = None, compilable: bool = False) -> None:
        self._max_size = whole("max_size", max_size)
        self._compilable = compilable
        self.checkpointer = checkpointer

    @property
    def max_size(self) -> int:
        """Capacity in items."""
        return self._max_size

    @property
    def shape(self) -> torch.Size | None:
        """The dims that count as items."""
        return torch.Size([self.max_size])

    @property
    def _is_full(self) -> bool:
        return len(self) == self.max_size

    def refuse_a_stranger(self) -> None:
        """RuntimeError in a forked child whose writes the parent would not see, while it would count them."""
        if os.getpid() != self._pid and not self._compilable and not self._is_shared():
            raise RuntimeError(
                f"this {type(self).__name__} is in memory that a forked process does not share: use LazyMemmapStorage, or "
                "the spawn start method, or build the buffer in the process that writes to it"
            )

    def _is_shared(self) -> bool:
        """Whether other processes see what this one writes."""
        return False

    @property
    def _notes_writes(self) -> bool:
        """Whether every write is in the ledger."""
        return False

    def row_capacity(self, data: Any) -> int:
        """Rows along the first dim; `data` is what will be written first, if nothing was yet."""
        return self.max_size

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write data at cursor. With `set_cursor` the length grows to include it and the place is remembered."""
        raise NotImplementedError(f"{type(self).__name__} does not define set()")

    def get(self, index: Any) -> Any:
        """What is stored at index."""
        raise NotImplementedError(f"{type(self).__name__} does not define get()")

    def is_live(self, index: Any) -> bool:
        """Whether what `get` gives at index is what is stored, and not a copy."""
        return True

    def editable(self, given: Any) -> Any:
        """The stored items, by whose entries those that `given` names can be written in place."""
        return self[:]

    def refuse_edit(self, paths: Iterable[tuple[Any, ...]]) -> None:
        """RuntimeError if one of these entries cannot be written in place."""

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} does not define __len__()")

    def attach(self, buffer: Any) -> None:
        """Have `buffer.mark_update(index)` called at each write through any buffer. Does not keep the buffer alive."""
        if any(each is buffer for each in self.attached()):
            return
        try:
            reference: Callable[[], Any] = weakref.ref(buffer)
        except TypeError:  # a kind of object that cannot be referred to weakly
            reference = partial(_itself, buffer)
        self._listeners = _Listeners([*(each for each in self._listeners if each() is not None), reference])

    def detach(self, buffer: Any) -> None:
        """Have the buffer no longer told."""
        self._listeners = _Listeners(each for each in self._listeners if each() is not buffer)

    def attached(self) -> list[Any]:
        """What is told of each write, in the order of attaching."""
        return [listener for each in self._listeners if (listener := each()) is not None]

    def contains(self, index: Any) -> Any:
        """Whether an item is stored at an int index; a bool tensor for a tensor of them."""
        if isinstance(index, int):
            return -len(self) <= index < len(self)
        if isinstance(index, torch.Tensor):
            return (index >= -len(self)) & (index < len(self))
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
        for index in range(len(self)):
            yield self[index]

    def __contains__(self, index: Any) -> bool:
        return bool(self.contains(index))

    def __getstate__(self) -> dict[str, Any]:
        # Buffers and the generator are put back by the buffer that owns this storage.
        return {**self.__dict__, "_access": Lock(), "_listeners": _Listeners(), "_rng": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _pid=os.getpid())


class _Listeners(list[Callable[[], Any]]):
    """References to what is told of writes. A copy begins without any: its own buffers attach themselves."""

    def __reduce__(self) -> Any:
        return _Listeners, ()


def _itself(each: Any) -> Any:
    return each
