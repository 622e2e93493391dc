"""Whose turn it is at a storage: one thread's and, once processes share it, one process's."""

import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from interop.shared.process_lock import ProcessLock
from interop.shared.thread_lock import Lock, renew_in_children

_WAITING = (True,)  # for the lock, as long as it takes
_PATIENCE = 1.0  # seconds that a fork waits for turns in other threads to end
_all: weakref.WeakSet["Access"] = weakref.WeakSet()
_sharing = Lock()
_forking = threading.RLock()


class Access:
    """The lock that buffers hold while they read or write a storage: of threads and, after `share`, of processes.

    Reentrant. A process that ends frees it. In a forked child a turn at memory that is not shared is refused once another
    process has changed what is counted; and torch uses one thread, GNU's OpenMP would wait for threads that are not there.
    """

    __slots__ = (
        "__weakref__",
        "_at_fork",
        "_begun",
        "_forked",
        "_held",
        "_kept",
        "_lock",
        "_storage",
        "_threads",
        "given",
        "more",
    )

    def __init__(self, storage: Any = None) -> None:
        self._storage: Callable[[], Any] = _no_storage if storage is None else weakref.ref(storage)
        self._held = threading.RLock()
        self.more = False  # whether a turn takes more than the lock of threads
        self._begun = False  # whether that was done, and is to be undone at the end
        self._lock: ProcessLock | None = None
        self.given = False  # whether other processes have the lock
        self._forked = False
        self._at_fork: tuple[int, ...] | None = None  # what was counted of rows that a forked child does not share
        self._kept = False  # whether the thread that forks has the turn
        self._threads = 0  # that torch is to have again
        renew_in_children(self)
        _all.add(self)

    # ------------------------------------------------------------------ turns

    def turn(self) -> "Holding":
        """A context that has the turn. RuntimeError in a forked child for which the storage is not what others see."""
        return Holding(self)

    @property
    def _depth(self) -> int:
        """Turns within each other that this thread has, which holds the lock."""
        return _times_held(self._held) - self._kept

    def _begin(self) -> None:
        try:
            if self._forked and (threads := torch.get_num_threads()) > 1:
                torch.set_num_threads(1)
                self._threads = threads
            if self._lock is not None:
                self._lock.acquire()
            self._begun = True
            storage = self._storage()
            if storage is not None:
                if self._forked:
                    self._check(storage)
                storage._begin_turn()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._begun = False
        if self._threads:
            torch.set_num_threads(self._threads)
            self._threads = 0
        try:
            if (storage := self._storage()) is not None:
                storage._end_turn()
        finally:
            if self._lock is not None:
                self._lock.release()

    # ------------------------------------------------------------------ processes

    @property
    def processes(self) -> ProcessLock | None:
        """The lock among processes, where they take turns."""
        return self._lock

    def share(self) -> None:
        """Have processes take turns from now on. A turn that a thread is in the middle of is one of this process."""
        with _sharing:
            if self._lock is None:
                lock = ProcessLock()
                lock.acquire()
                self._lock = lock
                self._begun = True
                self.more = True
                self.settle()

    def settle(self) -> None:
        """End what was begun for a turn in another thread, if that is over; else it does, at its end."""
        taken: list[bool] = []
        try:
            taken.extend(map(self._held.acquire, (False,)))
            if taken[0] and self._depth == 1 and self._begun:
                self._end()
        finally:
            if any(taken):
                self._held.release()

    def unshare(self) -> None:
        """Have processes no longer take turns, where none was started yet."""
        with self.turn(), _sharing:
            if not self.given:
                self._lock, self.more = None, self._forked

    def give(self) -> ProcessLock:
        """The lock, for a process that is starting."""
        self.share()
        self.given = True
        assert self._lock is not None
        return self._lock

    def take(self, lock: ProcessLock) -> None:
        """Take turns with the process that gave this lock."""
        self._lock, self.given, self.more = lock, True, True

    def before_fork(self, until: float) -> None:
        """Have the child take turns, or know what was there when it was forked; and no thread be in the middle of a turn,
        if that can be had by then."""
        self._kept = self._held.acquire(timeout=max(0.0, until - time.monotonic()))
        storage = self._storage()
        if storage is None:
            return
        before, self._at_fork = self._at_fork, ()  # the child refuses where this does not work
        if storage.is_shared():
            if self._lock is None:
                storage._start_sharing()
            self.given, self._at_fork = True, None
        else:
            self._at_fork = before if self._forked else storage.ring.counts

    def after_fork(self) -> None:
        """Let threads go on."""
        if self._kept:
            self._kept = False
            self._held.release()

    def _renew(self) -> None:  # in a forked child
        if self._kept:
            self.after_fork()
        elif self._held.acquire(blocking=False):  # free, or held by the thread that forked
            self._held.release()
        else:
            self._held = threading.RLock()
        self._begun, self._threads, self._forked, self.more = False, 0, True, True

    def __reduce__(self) -> Any:
        return Access, ()  # a copied storage has one of its own

    def _check(self, storage: Any) -> None:
        """RuntimeError where what this process has is not what is counted."""
        kind = type(storage).__name__
        if self._at_fork is None:
            if not storage.is_shared():
                raise RuntimeError(
                    f"the memory of this {kind} has moved since the process was forked, which has the old: start workers "
                    "by one method, or fork after spawning"
                )
        elif storage._compilable and not storage.is_shared():
            if self._at_fork:  # what it has is its own: from now on that is counted apart, too
                storage.ring = copy.deepcopy(storage.ring)
                storage.ring.restored(*self._at_fork[:2])
                self._at_fork = ()
        elif storage.ring.counts != self._at_fork:
            raise RuntimeError(
                f"what this {kind} holds has changed since the process was forked, in memory that it does not share: use "
                "LazyMemmapStorage, or the spawn start method, and write to it before workers start"
            )


class Holding:
    """A turn as a context.

    A signal may raise between any two steps of Python, but not within one: whether the lock was taken is known in the step
    that takes it, and what gives it back does so once, at the end or, where that was broken off, when this is gone.
    """

    __slots__ = ("__del__", "_access", "_give_back")

    def __init__(self, access: Access) -> None:
        self._access = access

    def __enter__(self) -> Any:
        self._take(self._access)

    def _take(self, access: Access) -> None:
        self._access = access
        taken: list[bool] = []
        self._give_back = self.__del__ = partial(next, map(access._held.__exit__, taken), None)  # type: ignore
        try:
            taken.extend(map(access._held.acquire, _WAITING))
            if access.more and (not access._begun or access._depth == 1):  # or a signal broke off the end of another
                access._begin()
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *raised: object) -> None:
        access, last = self._access, True
        try:
            if access._begun and (last := access._depth == 1):
                access._end()
        finally:
            self._give_back()
        if last and access._begun:  # processes began to share it meanwhile
            access.settle()


def _times_held(lock: Any) -> int:
    """How often the thread that calls has taken a lock that it holds."""
    return int(
        lock._recursion_count() if hasattr(lock, "_recursion_count") else repr(lock).split("count=")[1].split()[0]
    )


def _no_storage() -> None:
    return None


def _before_fork() -> None:
    _forking.acquire()  # one at a time: what was taken for one fork is not given back after another
    until = time.monotonic() + _PATIENCE
    for access in _living():
        try:
            access.before_fork(until)
        except Exception:  # no descriptor or memory is left
            continue


def _after_fork() -> None:
    try:
        for access in _living():
            access.after_fork()
    finally:
        _forking.release()


def _living() -> Iterator[Access]:
    while True:
        try:
            return iter(list(_all))
        except RuntimeError:  # another thread has made a storage meanwhile
            continue


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forking.release)
