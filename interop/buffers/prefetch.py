"""The prefetch queue: batches that threads make ahead of time."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from interop.buffers.request import Request
from interop.host.threads import renew_in_children
from interop.shared.storage_lock import Held


class Prefetch:
    """A FIFO queue of up to `depth` requests for batches; threads make the batches.

    The queue is not part of the state: dropped requests are undone, and the next calls draw them again. A buffer drops its
    queue after a change, and before it is saved or copied. Copies and forked children begin with an empty queue.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        # Guards the queue only: no thread waits for a batch or a buffer while it holds this lock.
        self.mutex = threading.RLock()
        self._queue: deque[Request] = deque()
        self._awaited: list[Request] = []  # requests that calls of other threads wait for
        self._error: Exception | None = None  # of the request after these
        self._pool: ThreadPoolExecutor | None = None

    def take(
        self,
        draw: Callable[[], Any],
        request: Callable[[], Request | None],
        more: Callable[[], bool],
        make: Callable[[Request], Any],
        lock: AbstractContextManager[Any],
    ) -> Any:
        """Return the oldest batch, or draw one if the queue is empty. Then fill the queue while `more()`.

        The error of a thread is raised by the call that would have returned its batch, and drops the queue: the next call
        draws that batch again.

        Args:
            draw: draws and makes a batch.
            request: returns the next request, or None for no more; the call that finds the queue empty raises its error.
            more: whether the epoch has another batch.
            make: makes a batch, in a thread; None for a stale request.
            lock: held while requests are made. It is taken before the lock of the queue, as in writes that drop the queue.
        """
        with self.mutex:
            oldest = self._queue.popleft() if self._queue else None
            if oldest is not None:
                self._awaited.append(oldest)
            elif self._error is not None:
                error, self._error = self._error, None
                raise error
        batch = draw() if oldest is None else self._await(oldest, draw)
        with lock, self.mutex:
            while len(self._queue) < self.depth and self._error is None and more():
                try:
                    pending = request()
                except Exception as error:
                    self._error = error
                    break
                if pending is None:
                    break
                self._pool = self._pool or ThreadPoolExecutor(self.depth, thread_name_prefix="replay-prefetch")
                pending.future = self._pool.submit(make, pending)
                self._queue.append(pending)
        return batch

    def _await(self, pending: Request, draw: Callable[[], Any]) -> Any:
        assert pending.future is not None
        try:
            batch = pending.future.result()
        except BaseException as error:
            with self.mutex:
                if not (pending.dropped and isinstance(error, Exception)):
                    self.drop()
                    raise
        else:
            with self.mutex:
                if not pending.dropped:
                    self._awaited.remove(pending)
                    if pending.is_current:
                        pending.commit()
                        return batch
                    pending.drop()
        return draw()

    def drop(self) -> None:
        """Undo all requests whose batches were not returned. Call it after the change that makes them stale.

        It does not wait, because the caller may hold a lock that the threads need.
        """
        with self.mutex:
            stale = [*self._awaited, *self._queue]
            self._awaited, self._queue, self._error = [], deque(), None
            for pending in stale[::-1]:
                pending.drop()

    def held(self) -> Held:
        """A context in which no other thread takes a batch from the queue or makes a request."""
        return Held(self._held())

    def _held(self) -> Iterator[None]:
        with self.mutex:  # an `ExitStack` could keep a plain lock after a signal
            yield

    def __len__(self) -> int:
        return len(self._queue)

    def __reduce__(self) -> Any:
        return Prefetch, (self.depth,)
