"""Batches drawn ahead of time by other threads."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from interop.storages.lock import renew_in_children


class Prefetch:
    """A queue of up to `depth` batches, first in first out.

    What is drawn ahead belongs to an epoch. A change of what batches are drawn from begins another one, after which no
    batch of an older epoch is given out.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.epoch = 0
        self._renew()
        renew_in_children(self)

    def _renew(self) -> None:
        # Of the queue alone: nobody waits for a batch, or for a buffer, while holding it.
        self._mutex = threading.Lock()
        self._queue: deque[Future[Any]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def take(
        self, draw: Callable[[], Any], schedule: Callable[[int], Callable[[], Any]], more: Callable[[int], bool]
    ) -> Any:
        """The oldest batch, or one drawn now where none waits; then the queue is filled while `more(length)`.

        `schedule(epoch)` fixes what the next batch is (its seed) and gives what a thread runs; None comes of it where the
        epoch was over by then. An error of a thread is raised by the call that would have returned its batch, once, and
        nothing more is drawn ahead by that call.
        """
        with self._mutex:
            epoch = self.epoch
            oldest = self._queue.popleft() if self._queue else None
        if oldest is not None:
            oldest.exception()  # waits
        batch = oldest.result() if oldest is not None and epoch == self.epoch else draw()
        with self._mutex:
            while len(self._queue) < self.depth and more(len(self._queue)):
                self._pool = self._pool or ThreadPoolExecutor(self.depth, thread_name_prefix="replay-prefetch")
                self._queue.append(self._pool.submit(schedule(self.epoch)))
        return batch

    def drop(self) -> None:
        """Begin another epoch: forget what was drawn ahead. To be called after the change that makes it stale.

        Does not wait: the caller may hold what the threads are waiting for.
        """
        with self._mutex:
            self.epoch += 1
            stale, self._queue = self._queue, deque()
        for future in stale:
            future.cancel()

    def __len__(self) -> int:
        return len(self._queue)

    def twin(self) -> "Prefetch":
        """A queue of its own of the same batches."""
        twin = Prefetch(self.depth)
        with self._mutex:
            twin._queue.extend(self._queue)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """The batches that wait go along; one that failed, or was dropped meanwhile, does not."""
        finished = [_finished(future) for future in list(self._queue)]
        return {"depth": self.depth, "waiting": [batch for batch in finished if batch is not None]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["depth"])  # type: ignore[misc]  # a fresh queue and no threads yet
        for batch in state["waiting"]:
            future: Future[Any] = Future()
            future.set_result(batch)
            self._queue.append(future)


def _finished(future: Future[Any]) -> Any:
    """The batch, waited for; None where there is none."""
    try:
        return future.result() if future.exception() is None else None
    except CancelledError:
        return None
