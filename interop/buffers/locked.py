"""Holding the locks of buffers: those of their storages."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from interop.shared.storage_lock import Held
from interop.storages import Storage


class HasStorage(Protocol):
    @property
    def storage(self) -> Storage: ...


def locked(buffer: HasStorage) -> Held:
    """Hold the lock of the storage of a buffer, which other buffers may have too. Reentrant."""
    return Held(_held(buffer))


def _held(buffer: HasStorage) -> Iterator[None]:
    done = False
    while not done:
        lock = buffer.storage.lock
        with lock.threads:
            done = lock is buffer.storage.lock  # or it was exchanged while this thread waited
            if done and lock.hooked:
                with lock.held():
                    yield
            elif done:
                yield


@contextlib.contextmanager
def all_locked(buffers: Sequence[HasStorage]) -> Iterator[None]:
    """Hold the locks of several buffers at once, taken in the one order in which all threads take them."""
    while True:
        locks = {id(each.storage.lock): each.storage.lock for each in buffers}
        with contextlib.ExitStack() as held:
            for place in sorted(locks):
                held.enter_context(locks[place].held())
            if all(id(each.storage.lock) in locks for each in buffers):  # or one was exchanged
                yield
                return
