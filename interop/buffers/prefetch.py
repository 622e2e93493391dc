"""The prefetch queue: batches that threads make ahead of time."""

import _thread
import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from fbuf.tasks import start_daemon
from interop.buffers.requested_batch import RequestedBatch
from interop.host.threads import Lock, came_from_a_signal, finished, hold_in_forks, renew_in_children
from interop.shared.storage_lock import Held

_T = TypeVar("_T")

_NAME = "replay-prefetch"
_SLOW = 1.0  # seconds without a batch after which a call looks whether a thread makes it
_PATIENCE = 10.0  # seconds that the end of the program waits for threads
_LONG = 0.001  # seconds: threads begin at once if a batch takes longer,
_AWAY = 0.0001  # or if the caller was away for longer before its last call
_WATCHED = 0.002  # seconds without a call after which a thread begins anyhow


class Prefetch:
    """A FIFO queue of up to `depth` requested batches; threads make the batches while the caller does something else.

    A batch is made by the call that returns it, if no thread has begun it. In a loop that does nothing but draw, threads
    begin none of the short ones: a thread of Python that wakes up during a call delays it by more than the batch takes.

    The queue is not part of the state: the requests of dropped batches are undone, and the next calls draw them again. A
    buffer drops its queue after a change, and before it is saved or copied. Copies and forked children begin with an empty
    queue, and without the draws of the batches that were in it.

    A signal handler may raise at any time. A requested batch is in the queue before it draws anything, and until it is
    returned: so what an interrupted call has left can be undone. A thread is only told that there is something to make. It
    looks for it in the queue, and a call makes a batch itself that no thread begins: so none is waited for in vain.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._begin()
        renew_in_children(self.renew)
        hold_in_forks(self)
        _living.add(self)

    def _begin(self) -> None:
        # Guards the queue only: no thread waits for a batch or a buffer while it holds this lock.
        self.mutex = Lock()
        self._queue: list[RequestedBatch] = []  # the oldest first; those that calls wait for are `awaited`
        self._error: Exception | None = None  # of the batch after these
        self._calls: SimpleQueue[Any] = SimpleQueue()  # what threads do; None ends a thread
        self._threads = 0
        self._watched = False  # whether a thread waits for the caller to be away
        self._called = time.monotonic()  # when a call began or ended
        self._away = self._cost = 0.0  # seconds between the last two calls, and of the last batch
        weakref.finalize(self, _end, self._calls, self.depth).atexit = False

    def renew(self) -> None:
        """In a forked child: undo the batches, which the parent returns. Epochs undo their requests themselves."""
        left = self._queue
        self._begin()
        for pending in left[::-1]:
            pending.restore_generators()

    def take(
        self,
        draw: Callable[[], Any],
        begin: Callable[[], RequestedBatch],
        fill: Callable[[RequestedBatch], bool],
        more: Callable[[], bool],
        make: Callable[[RequestedBatch], Any],
        lock: AbstractContextManager[Any],
        settings: tuple[Any, ...],
    ) -> Any:
        """Return the oldest batch, or draw one if the queue is empty. Then fill the queue while `more()`.

        The error of a thread is raised by the call that would have returned its batch, and drops the queue: the next call
        draws that batch again. So does an interrupt.

        Args:
            draw: draws and makes a batch.
            begin: returns a requested batch that has drawn nothing.
            fill: draws what it needs; False for no more batches. The call that finds the queue empty raises its
                error.
            more: whether the epoch has another batch.
            make: makes a batch, in a thread; None for a stale one.
            lock: held while batches are requested. It is taken before the lock of the queue, as in writes that drop the
                queue.
            settings: of the samplers. Batches of other settings are undone, and drawn anew.
        """
        pending = None
        call = object()
        now = time.monotonic()
        self._away = now - self._called
        self._called = now
        try:
            with self.mutex:
                if self._queue and not self._queue[0].has(settings):
                    self.drop()
                pending = self._oldest(call)
                if pending is None and self._error is not None:
                    error = self._error
                    self._error = None
                    raise error
            batch = self._timed(draw) if pending is None else self._await(pending, draw)
        except BaseException:
            if pending is None:  # perhaps it was interrupted before it knew its batch
                pending = next((batch for batch in self._queue if batch.awaited is call), None)
            if pending is not None and not pending.returned:
                self.drop()
            raise
        with lock, self.mutex:
            while len(self) < self.depth and self._error is None and more():
                if not self._request(begin, fill, make, settings):
                    break
        self._called = time.monotonic()
        return batch

    def _timed(self, make: Callable[[], _T]) -> _T:
        begun = time.monotonic()
        batch = make()
        self._cost = time.monotonic() - begun
        return batch

    def _oldest(self, call: object) -> RequestedBatch | None:
        """The oldest batch that no call waits for. This call waits for it from now on."""
        for batch in self._queue:
            if batch.awaited is None:
                batch.awaited = call
                return batch
        return None

    def _request(
        self,
        begin: Callable[[], RequestedBatch],
        fill: Callable[[RequestedBatch], bool],
        make: Callable[[RequestedBatch], Any],
        settings: tuple[Any, ...],
    ) -> bool:
        """Request a batch, for the threads. False if there is none."""
        pending = begin()
        try:
            self._queue.append(pending)
            if fill(pending):
                pending.close(partial(make, pending), settings)
                self._call_threads()
                return True
            self._queue.remove(pending)
        except BaseException as error:
            if isinstance(error, Exception) and not came_from_a_signal(error):
                self._queue.remove(pending)  # it is undone
                self._error = error
                return False
            self.drop()
            raise
        return False

    @property
    def _begins_at_once(self) -> bool:
        """Whether threads make a batch when it is asked for, by what the last calls were like."""
        return self._cost > _LONG or self._away > _AWAY

    def _call_threads(self) -> None:
        """Have the newest batch made by a thread: at once, or when no call has come for a while."""
        if self._begins_at_once:
            self._call_a_thread(Prefetch.make_next)
        elif not self._watched:
            self._call_a_thread(Prefetch.make_meanwhile)
            self._watched = True  # after an interrupt two threads watch, which does no harm

    def _call_a_thread(self, act: "Callable[[Prefetch], float | None]") -> None:
        if self._threads < self.depth:
            self._threads += 1  # first: after an interrupt there is one less, and none that nobody ends
            try:
                start_daemon(partial(_work, self._calls), f"{_NAME}_{self._threads - 1}")
            except RuntimeError:  # the system has no thread left: calls make their batches
                self._threads -= 1
        self._calls.put((weakref.ref(self), act))

    def _await(self, pending: RequestedBatch, draw: Callable[[], Any]) -> Any:
        task = pending.task
        while True:
            if task.claim():  # no thread has begun it
                task.run(partial(self._timed, pending.make))
            if task.has_ended(_SLOW):
                break
        with self.mutex:
            if task.error is not None and (not pending.dropped or came_from_a_signal(task.error)):
                raise task.error
            if not pending.dropped:
                if pending.is_current:
                    finished(partial(self._return, pending))
                    return task.result
                finished(partial(self._remove, pending))
        return draw()

    def _return(self, pending: RequestedBatch) -> None:
        pending.commit()
        pending.tell_observers()
        if pending in self._queue:
            self._queue.remove(pending)

    def _remove(self, pending: RequestedBatch) -> None:
        pending.drop()
        if pending in self._queue:
            self._queue.remove(pending)

    def drop(self) -> None:
        """Undo all batches that were not returned. Call it after the change that makes them stale.

        It does not wait, because the caller may hold a lock that the threads need.
        """
        with self.mutex:
            finished(self._drop)

    def _drop(self) -> None:
        while self._queue:  # the newest first: it has drawn last
            self._queue[-1].drop()
            self._queue.pop()
        self._error = None

    def make_next(self) -> None:
        """Make the oldest batch that nobody has begun."""
        with self.mutex:
            pending = next((batch for batch in self._queue if batch.closed and batch.task.claim()), None)
        if pending is not None:
            pending.task.run(partial(self._timed, pending.make))

    def make_meanwhile(self) -> float | None:
        """Make batches if no call has come for a while. Returns the seconds until the next look; None for no more.

        It ends where all are begun, and where threads begin at once again, which this thread would keep from doing so.
        """
        quiet = time.monotonic() - self._called
        at_once = self._begins_at_once
        if quiet < _WATCHED and not at_once:
            return _WATCHED - quiet
        with self.mutex:
            left = sum(batch.closed and not batch.task.claimed for batch in self._queue)
            if at_once or not left:
                self._watched = False
            for _ in range(left if at_once else left - 1):
                self._call_a_thread(Prefetch.make_next)
        if at_once or not left:
            return None
        self.make_next()
        return 0.0

    def end(self) -> None:
        """End the threads."""
        _end(self._calls, self.depth)

    def held(self) -> Held:
        """A context in which no other thread takes a batch from the queue or requests one."""
        return Held(self._held())

    def _held(self) -> Iterator[None]:
        with self.mutex:  # an `ExitStack` could keep a plain lock after a signal
            yield

    def __len__(self) -> int:
        return sum(batch.awaited is None for batch in self._queue)

    def __reduce__(self) -> Any:
        return Prefetch, (self.depth,)


_living: "weakref.WeakSet[Prefetch]" = weakref.WeakSet()


def _work(calls: "SimpleQueue[Any]") -> None:
    """Make batches, until None comes."""
    while (call := calls.get()) is not None:
        reference, act = call
        pause = 0.0
        while pause is not None and (prefetch := reference()) is not None:
            pause = act(prefetch)
            del prefetch  # or it would live until the next call
            if pause:
                time.sleep(pause)


def _end(calls: "SimpleQueue[Any]", threads: int) -> None:
    for _ in range(threads):
        calls.put(None)


def _end_all() -> None:
    """At the end of the program: threads that run programs of torch or JAX then may end in a crash."""
    until = time.monotonic() + _PATIENCE
    for prefetch in list(_living):
        with contextlib.suppress(Exception):
            prefetch.drop()
            prefetch.end()
    for thread in threading.enumerate():
        if thread.name.startswith(_NAME) and thread.ident != _thread.get_ident():
            thread.join(max(0.0, until - time.monotonic()))


atexit.register(_end_all)
