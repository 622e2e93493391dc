"""Work that another thread does: begun at most once, and neither lost nor waited for in vain after a signal.

The classes of `threading`, `queue` and `concurrent.futures` are written in Python. A signal handler that raises between
their lines leaves a lock taken or a job lost, and the next call waits for ever. Here each step is one call of C: it has
happened or not, and can be tried again.
"""

import _thread
import threading
from collections.abc import Callable
from typing import Any


class Task:
    """A piece of work: the thread that claims it does it, and any thread can wait for its end.

    Attributes:
        ended: whether the work has ended.
        result: what the work returned.
        error: what it raised.
    """

    __slots__ = ("_claim", "_end", "ended", "error", "result")

    def __init__(self) -> None:
        self._claim, self._end = _thread.allocate_lock(), _thread.allocate_lock()
        self._end.acquire()
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None

    def claim(self) -> bool:
        """Whether the work is the caller's: True once."""
        return self._claim.acquire(False)

    @property
    def claimed(self) -> bool:
        """Whether a thread has claimed the work."""
        return self._claim.locked()

    def run(self, work: Callable[[], Any]) -> None:
        """Do the work that this thread has claimed. Its error is kept, not raised."""
        try:
            self.result = work()
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True  # first: an interrupted `wait` may keep the lock
            self._end.release()

    def wait(self) -> None:
        """Wait for the end of the work, which some thread has claimed. A signal handler may raise meanwhile."""
        if not self.ended:
            with self._end:
                pass

    def has_ended(self, within: float) -> bool:
        """Whether the work ends within so many seconds."""
        if not self.ended and self._end.acquire(True, within):
            self._end.release()
        return self.ended


def begin(task: Task, work: Callable[[], Any]) -> None:
    """Do the work of a task in a new thread, unless another thread has claimed it before that begins."""

    def run() -> None:
        if task.claim():
            task.run(work)

    _thread.start_new_thread(run, ())


def start_daemon(work: Callable[[], Any], name: str) -> None:
    """Start a daemon thread of this name. `Thread.start` waits in Python, so another thread calls it."""

    def start() -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    _thread.start_new_thread(start, ())
