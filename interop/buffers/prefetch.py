"""Batches drawn ahead of time by other threads."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from interop.buffers.ahead import Ahead, restored_jobs
from interop.buffers.fused import epoch_of
from interop.checkpoint.rule import EXACT, Rule
from interop.samplers import Sampler
from interop.samplers.epoch import Epoch
from interop.shared.processes import starting_a_worker
from interop.shared.thread_lock import renew_in_children

_NOTHING = nullcontext()


def goes_on(sampler: Sampler) -> bool:
    """Whether another batch may be drawn ahead: not past the end of an epoch, of which those that wait were drawn."""
    epoch = epoch_of(sampler)
    return not (sampler.ran_out if epoch is None else epoch.over)


class Prefetch:
    """A queue of up to `depth` batches, first in first out.

    What is drawn ahead belongs to an epoch. A change of what batches are drawn from begins another one, after which no
    batch of an older epoch is given out. A batch is known by what was settled when it was scheduled, and can be made anew
    of that at any time: by the next call after a thread failed to make it, once, and after a checkpoint, of what is stored
    by then.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.epoch = 0
        self._renew()
        renew_in_children(self)

    def _renew(self) -> None:
        # Of the queue alone: nobody waits for a batch, or for a buffer, while holding it.
        self._mutex = threading.RLock()
        self._queue: deque[Ahead] = deque()
        self._taking: list[Ahead] = []  # whom somebody waits for
        self._error: Exception | None = None  # of the batch after those
        self._pool: ThreadPoolExecutor | None = None

    def take(
        self,
        draw: Callable[[], Any],
        schedule: Callable[[int], Ahead | None],
        more: Callable[[], bool],
        make: Callable[[Ahead], Any],
        turn: AbstractContextManager[Any] = _NOTHING,
    ) -> Any:
        """The oldest batch, or one drawn now where none waits; then the queue is filled while `more()`.

        `schedule(epoch)` fixes what the next batch is made of, or gives None for no more; `make` is what threads run. None
        comes of it where the epoch was over by then. An error of a thread is raised by the call that would have returned
        its batch; the next one makes the batch again. If that raises too, the batch is given up. Nothing more is drawn ahead
        by a call that raises. `turn` is what batches are scheduled in. An error of `schedule` is raised by the call that
        finds the queue empty.
        """
        with self._mutex:
            epoch = self.epoch
            oldest = self._queue.popleft() if self._queue else None
            if oldest is not None:
                self._taking.append(oldest)
                self._start(oldest, make)
                for job in self._queue:
                    self._start(job, make)
            future = None if oldest is None else oldest.future
            if oldest is None and self._error is not None:
                error, self._error = self._error, None
                raise error
        valid = oldest is not None and self._waited(oldest, future, epoch)
        batch = future.result() if future is not None and valid else draw()
        with turn, self._mutex:  # in this order: who writes has the turn, and then drops what waits
            while len(self._queue) < self.depth and self._error is None and more():
                try:
                    scheduled = schedule(self.epoch)
                except Exception as error:
                    self._error = error
                    break
                if scheduled is None:
                    break
                self._start(scheduled, make)
                self._queue.append(scheduled)
        return batch

    def _start(self, job: Ahead, make: Callable[[Ahead], Any]) -> None:
        if job.future is None:
            self._pool = self._pool or ThreadPoolExecutor(max(self.depth, 1), thread_name_prefix="replay-prefetch")
            job.was_read = False
            job.future = self._pool.submit(make, job)

    def _waited(self, oldest: Ahead, future: Any, epoch: int) -> bool:
        """Wait for a batch, or its error; whether it is still to be given out."""
        error: BaseException | None = None
        finished = False
        try:
            error = future.exception()
            finished = True
        finally:  # the wait may be interrupted
            with self._mutex:
                self._taking = [job for job in self._taking if job is not oldest]
                valid = epoch == self.epoch and oldest.is_held  # not where a state was put into the sampler
                if not valid:
                    oldest.take_back()
                elif not finished or (error is not None and not oldest.failed):
                    oldest.failed = finished
                    oldest.future = None if finished else oldest.future
                    self._queue.appendleft(oldest)
                elif error is None or oldest.was_read:
                    oldest.given()
                else:
                    oldest.take_back()
        return valid

    def drop(self) -> None:
        """Begin another epoch: forget what was drawn ahead. To be called after the change that makes it stale.

        Does not wait: the caller may hold what the threads are waiting for.
        """
        with self._mutex:
            self.epoch += 1
            stale, self._queue, self._error = self._queue, deque(), None
            for job in reversed(stale):
                job.take_back()
        for job in stale:
            job.cancel()

    def __len__(self) -> int:
        return len(self._queue)

    def still(self) -> Any:
        """A context in which no other thread takes a batch of the queue, or schedules one."""
        return self._mutex

    # ------------------------------------------------------------------ checkpoints

    def _waiting(self) -> list[Ahead]:
        """Batches that nobody has yet, the oldest first."""
        return [job for job in (*self._taking, *self._queue) if job.epoch == self.epoch]

    def _saved(self) -> dict[str, Any]:
        """A saved tree of what the waiting batches will be made of; waits for none. To be followed by `redraw`."""
        with self._mutex:
            return {"waiting": [job.saved() for job in self._waiting()]}

    def redraw(self, buffer: Any = None) -> None:
        """Have the waiting batches made anew, of what is stored at the next call, as they will be where this was loaded."""
        with self._mutex:
            for job in self._queue:
                job.cancel()

    def _restoring(self, saved: Any, rule: Rule = EXACT, members: Sequence[Any] = ()) -> Callable[[], None]:
        """Check a saved tree; what is returned puts it in. Then `settle` is to be called.

        Args:
            saved: the tree.
            rule: not used.
            members: the buffer itself; for an ensemble its members.
        """
        jobs = restored_jobs(saved, len(members))

        def put() -> None:
            self.drop()
            with self._mutex:
                for job in jobs:
                    job.epoch = self.epoch
                self._queue = deque(jobs)
                self.bind(members)

        return put

    def held(self, epoch: Epoch) -> Iterator[int]:
        """The numbers of draws of an epoch that the waiting batches are made of."""
        return (number for job in self._waiting() for number in job.held(epoch))

    # ------------------------------------------------------------------ copies

    def twin(self) -> "Prefetch":
        """A queue of its own of the same batches, which are made anew; of none for a worker that is starting."""
        twin = Prefetch(self.depth)
        if not starting_a_worker():
            with self._mutex:
                twin._queue.extend(job.twin() for job in self._waiting())
        return twin

    def bind(self, members: Sequence[Any]) -> None:
        """Tell what becomes of batches that were copied to the epochs of these buffers; drop those that they do not hold."""
        epochs = [epoch_of(member._sampler) for member in members]
        for job in self._queue:
            job.bind(epochs)
        stale = [job for job in self._queue if not job.fits(members)]
        self._queue = deque(job for job in self._queue if job not in stale)
        for job in reversed(stale):
            job.take_back()

    def __getstate__(self) -> dict[str, Any]:
        with self._mutex:
            return {"depth": self.depth, "waiting": [job.twin() for job in self._waiting()]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["depth"])  # type: ignore[misc]  # a fresh queue and no threads yet
        self._queue.extend(state["waiting"])


def settle(members: Sequence[Any], queues: Sequence["Prefetch | None"]) -> None:
    """After all was loaded: what is held of the epochs of these buffers and is in none of the queues remains to be drawn."""
    for member in members:
        epoch = epoch_of(member._sampler)
        if epoch is not None:
            every = (*queues, member._prefetch)
            epoch.keep({number for queue in every if queue is not None for number in queue.held(epoch)})
