"""Functions that run side by side in a few threads."""

import _thread
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from queue import SimpleQueue
from typing import TypeVar

_T = TypeVar("_T")


def at_once(jobs: Sequence[Callable[[], _T]], threads: int = 4) -> list[_T]:
    """Run the jobs, which share no memory that they change, and return their results in order. 4 threads suit a disk.

    The first error is raised when no job runs any more; the jobs that were not begun by then are left out. An exception
    from a signal handler, which may come between any two steps of the calling thread, blocks no thread: there are no locks
    of Python here, as there are in `concurrent.futures`.
    """
    waiting, results = iter(enumerate(jobs)), dict[int, _T]()
    started, done, ended = list[int](), SimpleQueue[BaseException | None](), list[BaseException | None]()

    def work() -> None:
        error = None
        try:
            for place, job in waiting:
                results[place] = job()
        except BaseException as raised:
            error = raised
            deque(waiting, 0)
        done.put(error)

    try:  # each step that counts is one of C: it is done, or was not begun
        started.extend(map(_thread.start_new_thread, repeat(work, min(threads, len(jobs))), repeat(())))
        ended.extend(map(done.get, repeat(True, len(started))))
    finally:
        deque(waiting, 0)
        ended.extend(map(done.get, repeat(True, len(started) - len(ended))))
    for error in filter(None, ended):
        raise error
    return [results[place] for place in range(len(jobs))]
