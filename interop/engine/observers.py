"""The observers of a buffer: they are told of the batches that the buffer returns, and of what happens to its rows."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from interop.engine.followers import Followed, Follower


class Observed(Followed, Protocol):
    """A storage."""

    @property
    def max_size(self) -> int: ...
    @property
    def ndim(self) -> int: ...
    @property
    def shape(self) -> Sequence[int] | None: ...
    def attach(self, follower: Follower, /) -> None: ...
    def detach(self, follower: Follower, /) -> None: ...


class Observer(ABC):
    """Is told of the draws of one buffer, and of the writes into its storage, by whichever buffer or process.

    The lock of the storage is held in all methods. They change nothing that others see, and raise nothing.
    """

    @abstractmethod
    def joined(self, storage: Observed, in_order: bool, copies: bool) -> None:
        """The buffer has these components now; the last storage, if there was another one, is not followed any more.

        Args:
            storage: of the buffer.
            in_order: whether its rows are in the order of writing, the oldest at the cursor of a full ring.
            copies: whether the sampler may change an index that it has returned: one of the user's.
        """

    @abstractmethod
    def started_over(self) -> None:
        """All rows were removed, or replaced by others."""

    @abstractmethod
    def read(self, info: dict[Any, Any]) -> Callable[[], object]:
        """A batch with this info was drawn and read.

        The buffer calls the returned function when it returns the batch, without the lock, perhaps twice after an
        interrupt; and never if the batch is dropped.
        """

    @abstractmethod
    def mark_update(self, index: object) -> None:
        """New items are at index."""

    @abstractmethod
    def before_write(self) -> dict[str, Any]:
        """What `put_back` needs to forget the writes that follow. O(1)."""

    @abstractmethod
    def put_back(self, before: dict[str, Any]) -> None:
        """The writes since then were undone."""


class Observers:
    """Weak references to the observers of one buffer, which follow it from storage to storage.

    Attributes:
        references: of the observers; empty if there are none, so that a draw pays for one test.
    """

    def __init__(self) -> None:
        self.references: tuple[weakref.ref[Observer], ...] = ()
        self._storage: Callable[[], Observed | None] = _none  # of the buffer
        self._in_order = self._copies = False

    def join(self, storage: Observed, in_order: bool, copies: bool) -> None:
        """The buffer has these components now: see `Observer.joined`. The lock of the storage is held."""
        before = self._storage()
        self._storage = weakref.ref(storage)
        self._in_order = in_order
        self._copies = copies
        for observer in self.all():
            if before is not None and before is not storage:
                before.detach(observer)
            storage.attach(observer)
            observer.joined(storage, in_order, copies)

    def add(self, observer: Observer) -> None:
        """Tell it of all that happens from now on. Does not keep it alive. The lock of the storage is held."""
        self.references = (*(each for each in self.references if each() not in (None, observer)), weakref.ref(observer))
        if (storage := self._storage()) is not None:  # else the components of the buffer are still to be made
            storage.attach(observer)
            observer.joined(storage, self._in_order, self._copies)

    def remove(self, observer: Observer) -> None:
        """Undo `add`. The lock of the storage is held."""
        self.references = tuple(each for each in self.references if each() not in (None, observer))
        if (storage := self._storage()) is not None:
            storage.detach(observer)

    def all(self) -> list[Observer]:
        """All observers."""
        return [observer for each in self.references if (observer := each()) is not None]

    def read(self, info: dict[Any, Any]) -> list[Callable[[], object]]:
        """`read` of all observers. References to those that are gone are dropped."""
        found = []
        for reference in self.references:
            observer = reference()
            if observer is None:
                self.references = tuple(each for each in self.references if each() is not None)
            else:
                found.append(observer.read(info))
        return found


def _none() -> None:
    return None
