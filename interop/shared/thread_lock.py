"""Locks, and what else a forked child needs anew: the threads that held them, or served it, are not there."""

import _thread
import os
import weakref
from typing import Any, Protocol


class Renewed(Protocol):
    def renew(self) -> None:
        """Begin anew in a forked child."""


_renewed: weakref.WeakSet[Renewed] = weakref.WeakSet()


def renew_in_children(each: Renewed) -> None:
    """Have `each.renew()` called in every child that is forked while `each` lives."""
    _renewed.add(each)


def _in_child() -> None:
    for each in list(_renewed):
        each.renew()


os.register_at_fork(after_in_child=_in_child)


class Lock(_thread.RLock):  # type: ignore[misc]  # final in its stubs, not in C
    """A reentrant lock. A copy, a pickle and a forked child have one that no thread of elsewhere holds.

    No signal comes between it and the body of its `with`: neither end of that is a step of Python.
    """

    __slots__ = ()

    def __init__(self) -> None:
        renew_in_children(self)

    def renew(self) -> None:
        if self.acquire(blocking=False):  # free, or held by the thread that forked
            self.release()
        else:
            self._at_fork_reinit()  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        return Lock, ()
