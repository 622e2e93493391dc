"""Batches drawn ahead of time by other threads."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Prefetch:
    """A queue of up to `depth` batches, first in first out."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._queue: deque[Future[Any]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def take(
        self, draw: Callable[[], Any], schedule: Callable[[], Callable[[], Any]], more: Callable[[int], bool]
    ) -> Any:
        """The oldest batch, or one drawn now where none waits; then the queue is filled while `more(length)`.

        `schedule` fixes what the next batch is (its seed) and gives what a thread runs. An error of a thread is raised
        by the call that would have returned its batch, once, and nothing more is drawn ahead by that call.
        """
        batch = self._queue.popleft().result() if self._queue else draw()
        while len(self._queue) < self.depth and more(len(self._queue)):
            self._pool = self._pool or ThreadPoolExecutor(self.depth, thread_name_prefix="replay-prefetch")
            self._queue.append(self._pool.submit(schedule()))
        return batch

    def drop(self) -> None:
        """Forget what was drawn ahead. Does not wait: the caller may hold what the threads are waiting for."""
        for future in self._queue:
            future.cancel()
        self._queue.clear()

    def __len__(self) -> int:
        return len(self._queue)

    def __getstate__(self) -> dict[str, Any]:
        """The batches that wait go along; one that failed does not."""
        done = [future for future in list(self._queue) if future.exception() is None]
        return {"depth": self.depth, "waiting": [future.result() for future in done]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["depth"])  # type: ignore[misc]  # a fresh queue and no threads yet
        for batch in state["waiting"]:
            future: Future[Any] = Future()
            future.set_result(batch)
            self._queue.append(future)
