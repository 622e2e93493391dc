"""Batches drawn ahead of time by other threads."""

import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from interop import randomness
from interop.buffers.fused import epoch_of, reserved, takes_keys
from interop.samplers import Sampler
from interop.samplers.epoch import Drawn, Epoch
from interop.storages import Storage
from interop.storages.lock import renew_in_children


@dataclasses.dataclass(slots=True, eq=False)
class Ahead:
    """A batch that a thread makes, and what was settled when it was scheduled: its key, or what it is made of."""

    make: Callable[["Ahead"], Any]
    epoch: int  # of the queue
    key: Any = None
    drawn: Drawn | None = None

    @classmethod
    def of(
        cls, sampler: Sampler, storage: Storage, batch_size: int, epoch: int, make: Callable[["Ahead"], Any]
    ) -> "Ahead | None":
        """The next batch of the queue; None where it cannot be drawn, which who asks for it will be told."""
        try:
            drawn = reserved(sampler, storage, batch_size)
        except Exception:
            return None
        key = randomness.key(sampler._rng) if drawn is None and takes_keys(sampler) else None
        return cls(make, epoch, key, drawn)

    def __call__(self) -> Any:
        return self.make(self)


def goes_on(sampler: Sampler, waiting: int) -> bool:
    """Whether another batch may be drawn ahead while some wait."""
    epoch = epoch_of(sampler)
    if epoch is not None:  # of which those that wait are taken
        return not epoch.over
    return waiting < sampler._remaining_batches and not sampler.ran_out


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
        self._mutex = threading.RLock()
        self._queue: deque[Future[Any]] = deque()
        self._drawn: deque[Drawn | None] = deque()  # what these are made of, where somebody has to know
        self._pool: ThreadPoolExecutor | None = None

    def take(
        self, draw: Callable[[], Any], schedule: Callable[[int], Callable[[], Any] | None], more: Callable[[int], bool]
    ) -> Any:
        """The oldest batch, or one drawn now where none waits; then the queue is filled while `more(length)`.

        `schedule(epoch)` fixes what the next batch is (its seed) and gives what a thread runs, or None for no more. None
        comes of what it runs where the epoch was over by then. An error of a thread is raised by the call that would have
        returned its batch, once, and nothing more is drawn ahead by that call.
        """
        with self._mutex:
            epoch = self.epoch
            oldest, drawn = (self._queue.popleft(), self._drawn.popleft()) if self._queue else (None, None)
        valid = oldest is not None and self._waited(oldest, drawn, epoch)
        batch = oldest.result() if oldest is not None and valid else draw()
        with self._mutex:
            while len(self._queue) < self.depth and more(len(self._queue)):
                job = schedule(self.epoch)
                if job is None:
                    break
                self._pool = self._pool or ThreadPoolExecutor(self.depth, thread_name_prefix="replay-prefetch")
                self._queue.append(self._pool.submit(job))
                self._drawn.append(job.drawn if isinstance(job, Ahead) else None)
        return batch

    def _waited(self, oldest: Future[Any], drawn: Drawn | None, epoch: int) -> bool:
        """Wait for a batch, or its error; whether it is still to be given out."""
        valid = False
        try:
            oldest.exception()
            valid = epoch == self.epoch
        finally:  # the wait may be interrupted
            if drawn is not None:
                drawn.given() if valid else drawn.take_back()
        return valid

    def drop(self) -> None:
        """Begin another epoch: forget what was drawn ahead. To be called after the change that makes it stale.

        Does not wait: the caller may hold what the threads are waiting for.
        """
        with self._mutex:
            self.epoch += 1
            stale, self._queue = self._queue, deque()
            drawn, self._drawn = self._drawn, deque()
            for each in reversed(drawn):
                if each is not None:
                    each.take_back()
        for future in stale:
            future.cancel()

    def __len__(self) -> int:
        return len(self._queue)

    def still(self) -> Any:
        """A context in which no other thread takes a batch of the queue, or schedules one."""
        return self._mutex

    def twin(self) -> "Prefetch":
        """A queue of its own of the same batches."""
        twin = Prefetch(self.depth)
        with self._mutex:
            twin._queue.extend(self._queue)
            twin._drawn.extend(self._drawn)
        return twin

    def bind(self, epoch: Epoch | None) -> None:
        """Have a copy tell what becomes of its batches to the copy of the epoch, of which only they are still held."""
        if epoch is not None:
            numbers = [None if each is None else each.number for each in self._drawn]
            self._drawn = deque(None if each is None else Drawn(epoch, each) for each in numbers)
            epoch.keep(numbers)

    def __getstate__(self) -> dict[str, Any]:
        """The batches that wait go along; one that failed, or was dropped meanwhile, does not."""
        finished = [
            (_finished(future), None if drawn is None else drawn.number)
            for future, drawn in zip(self._queue, self._drawn, strict=True)
        ]
        return {"depth": self.depth, "waiting": [each for each in finished if each[0] is not None]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["depth"])  # type: ignore[misc]  # a fresh queue and no threads yet
        for batch, number in state["waiting"]:
            future: Future[Any] = Future()
            future.set_result(batch)
            self._queue.append(future)
            self._drawn.append(None if number is None else Drawn(None, number))


def _finished(future: Future[Any]) -> Any:
    """The batch, waited for; None where there is none."""
    try:
        return future.result() if future.exception() is None else None
    except CancelledError:
        return None
