"""Locks, and what else a forked child needs anew: the threads that held them, or served it, are not there."""

import os
import threading
import weakref
from typing import Any

_renewed: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_in_children(each: Any) -> None:
    """Have `each._renew()` called in every child that is forked while `each` lives."""
    _renewed.add(each)


def _in_child() -> None:
    for each in list(_renewed):
        each._renew()


os.register_at_fork(after_in_child=_in_child)


class Lock:
    """A reentrant lock. A copy, a pickle and a forked child have one that no thread of elsewhere holds."""

    __slots__ = ("__weakref__", "_held", "acquire", "release")

    def __init__(self) -> None:
        self._hold(threading.RLock())
        renew_in_children(self)

    def _hold(self, lock: Any) -> None:
        self._held, self.acquire, self.release = lock, lock.acquire, lock.release

    def _renew(self) -> None:
        if self._held.acquire(blocking=False):  # free, or held by the thread that forked
            self._held.release()
        else:
            self._hold(threading.RLock())

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()

    def __reduce__(self) -> Any:
        return Lock, ()
