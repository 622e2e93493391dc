"""The lock of a storage: among threads and, once processes share the storage, among these too."""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from interop.host.threads import Lock
from interop.shared.process_lock import ProcessLock

_PATIENCE = 1.0  # seconds that a fork waits for other threads to release their locks
_all: weakref.WeakSet["StorageLock"] = weakref.WeakSet()
_forking = threading.RLock()
_held_for_fork: list["StorageLock"] = []


class Locked(Protocol):
    """What a lock calls: the guard of a storage."""

    def acquired(self) -> None:
        """The lock was taken, by the outermost `held`: roll back unfinished writes, follow those of other processes."""

    def released(self) -> None:
        """The lock is about to be released."""

    def rows_are_shared(self) -> bool:
        """Whether forked children see what is written into the memory of the rows."""

    def shares_in_forks(self) -> bool:
        """Whether forked children share the storage without being asked."""

    def start_sharing(self) -> None:
        """Move rows and counters to where other processes see them, and take the lock among processes from now on."""


class HasLock(Protocol):
    """A storage."""

    lock: "StorageLock"


class HasStorage(Protocol):
    """A buffer, whose storage another thread may exchange."""

    @property
    def storage(self) -> HasLock: ...

    def let_go(self) -> None:
        """Release all other locks of the buffer that this thread holds: after an interrupt."""


def locked(buffer: HasStorage) -> "Held":
    """Hold the lock of the storage of a buffer. Reentrant."""
    return Held(_storage_held(buffer))


def _storage_held(buffer: HasStorage) -> Iterator[None]:
    while True:
        lock = buffer.storage.lock
        threads, done = lock.threads, False
        if threads.is_mine():
            yield from lock.nested_steps()
            return
        try:
            with threads:
                if lock is buffer.storage.lock:  # the storage may have been exchanged while this thread waited
                    if lock.hooked:
                        yield from lock.hooked_steps()
                    else:
                        yield
                    done = True
            if done:
                return
        except BaseException:
            if done and threads.is_mine():  # an interrupt has come between the end of the `with` and the release
                threads.release()
            buffer.let_go()
            raise


class Holdable(Protocol):
    """A lock."""

    def held(self) -> "Held": ...


def each_held(locks: Sequence[Holdable]) -> "Held":
    """Hold these locks, in this order.

    An `ExitStack` would keep the last one after a signal: its frame and the exception refer to each other.
    """
    return Held(_each_held(locks))


def _each_held(locks: Sequence[Holdable]) -> Iterator[None]:
    if not locks:
        yield
        return
    with locks[0].held():
        yield from _each_held(locks[1:])


def all_locked(buffers: Sequence[HasStorage]) -> "Held":
    """Hold the locks of several buffers. All threads take them in the same order."""
    return Held(_all_locked(buffers))


def _all_locked(buffers: Sequence[HasStorage]) -> Iterator[None]:
    try:
        while True:
            locks = {id(each.storage.lock): each.storage.lock for each in buffers}
            with each_held([locks[place] for place in sorted(locks)]):
                if all(id(each.storage.lock) in locks for each in buffers):  # no storage was exchanged
                    yield
                    return
    except BaseException:
        for each in buffers:
            each.let_go()
        raise


class Held:
    """The context of a generator that yields once. Half the cost of `contextlib.contextmanager`.

    Locks that the generator holds by `with` are also released if a signal interrupts entering or leaving the context: the
    generator is then closed with this object.
    """

    __slots__ = ("_steps",)

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps: Any = steps

    def __enter__(self) -> None:
        try:
            next(self._steps)
        except BaseException:
            self._steps.close()  # now: the exception may live long, and refers to this
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            next(self._steps, None)
            return
        try:
            self._steps.throw(error)
        except BaseException as raised:
            if raised is not error:
                raise
        finally:
            del error, trace  # the error refers to this frame: with the cycle, what it holds would stay held


class StorageLock:
    """Held by buffers while they read or write a storage. Reentrant.

    Memory maps, and storages after `share()`, are shared with processes that are forked or started: these lock each other
    out. Of other storages a forked child has the rows as they were at the fork, and may only read them.

    Attributes:
        threads: the lock among threads.
        processes: the lock among processes; None as long as the storage is not shared.
        given: whether other processes may have it.
        hooked: whether the storage is told when the lock is taken and released.
        forked: whether this is the copy of a forked child.
    """

    __slots__ = ("__weakref__", "_begun", "_guard", "_unusable", "forked", "given", "hooked", "processes", "threads")

    def __init__(self, guard: Locked) -> None:
        self._guard = weakref.ref(guard)
        self._begun = self._unusable = self.given = self.hooked = self.forked = False
        self.processes: ProcessLock | None = None
        self.threads = Lock()
        _all.add(self)

    def held(self) -> "Held":
        """Hold the lock. RuntimeError in a forked child that cannot read the storage."""
        return Held(self.steps())

    def steps(self) -> Iterator[None]:
        """A generator that holds the lock at its only yield."""
        threads, done = self.threads, False
        if threads.is_mine():
            yield from self.nested_steps()
            return
        try:
            with threads:
                if self.hooked:
                    yield from self.hooked_steps()
                else:
                    yield
                done = True
        except BaseException:
            if done and threads.is_mine():  # as in `_storage_held`
                threads.release()
            raise

    def nested_steps(self) -> Iterator[None]:
        """The steps of a thread that holds the lock already, perhaps since before the storage was shared."""
        if self.hooked and not self._begun:
            yield from self.hooked_steps()
        else:
            yield

    def hooked_steps(self) -> Iterator[None]:
        """The part of `steps` that tells the storage, with the lock among threads held."""
        if self._begun:
            yield
            return
        try:
            try:
                self._begun = True
                self._begin()
                yield
            finally:
                self._end()
        except BaseException:
            if self._begun:  # an interrupt has come before, or in, `_end`
                self._end()
            raise

    def _begin(self) -> None:
        if self._unusable:
            raise RuntimeError(
                "this process was forked while another thread used the storage: what it holds may be half-written. Start "
                "workers while no other thread uses it, or call share() before"
            )
        if self.processes is not None:
            self.processes.acquire()
        if (guard := self._guard()) is not None:
            guard.acquired()

    def _end(self) -> None:
        try:
            if (guard := self._guard()) is not None and not self._unusable:
                guard.released()
        finally:
            if self.processes is not None:
                self.processes.release()
        self._begun = False

    # ------------------------------------------------------------------ processes

    def share(self) -> None:
        """Exclude other processes from now on, which none has yet. The lock is held."""
        if self.processes is None:
            self.processes = ProcessLock()
            self.hooked = True

    def unshare(self) -> None:
        """Exclude threads only, where no process was started yet."""
        with self.held():
            if not self.given:
                self.processes = None

    def give(self) -> ProcessLock:
        """The lock of a shared storage, for a process that is starting."""
        assert self.processes is not None
        self.given = True
        return self.processes

    def take(self, lock: ProcessLock) -> None:
        """Exclude the process that gave this lock."""
        self.processes, self.given, self.hooked = lock, True, True

    def prepare_fork(self) -> None:
        """Have a child that is about to be forked share the storage, where it will see its memory."""
        guard = self._guard()
        if guard is not None and guard.shares_in_forks():
            if self.processes is None:
                guard.start_sharing()
            self.given = True

    def in_child(self, whole: bool) -> None:
        """This is a forked child. `whole`: no other thread held the lock at the fork."""
        guard = self._guard()
        seen = guard is not None and guard.rows_are_shared()  # what the parent writes
        self._begun, self.forked = False, True
        self._unusable = self.processes is None and (seen or not whole)
        self.hooked = self.hooked or self._unusable


def _before_fork() -> None:
    _forking.acquire()  # one fork at a time
    until = time.monotonic() + _PATIENCE
    for lock in _living():
        if lock.threads.acquire(timeout=max(0.0, until - time.monotonic())):
            _held_for_fork.append(lock)
            with contextlib.suppress(Exception):  # no descriptor or memory is left: the child cannot use it
                lock.prepare_fork()


def _release() -> None:
    try:
        while _held_for_fork:
            _held_for_fork.pop().threads.release()
    finally:
        _forking.release()


def _in_child() -> None:
    locks = _living()
    if locks and torch.get_num_threads() > 1:
        torch.set_num_threads(1)  # GNU's OpenMP would wait for the threads of the parent
    for lock in locks:
        lock.in_child(whole=any(lock is each for each in _held_for_fork))
    _release()


def _living() -> list[StorageLock]:
    while True:
        try:
            return list(_all)
        except RuntimeError:  # another thread has made a storage meanwhile
            continue


os.register_at_fork(before=_before_fork, after_in_parent=_release, after_in_child=_in_child)
