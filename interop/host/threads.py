"""Threads, signals and forks of one process: a lock that a forked child can use, and signal handlers that wait."""

import _thread
import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)


class Renewed(Protocol):
    def renew(self) -> None:
        """Begin anew in a forked child."""


_renewed: weakref.WeakSet[Renewed] = weakref.WeakSet()


def renew_in_children(each: Renewed) -> None:
    """Call `each.renew()` in every child that is forked while `each` lives."""
    _renewed.add(each)


def _in_child() -> None:
    for each in list(_renewed):
        each.renew()


os.register_at_fork(after_in_child=_in_child)


class Lock(_thread.RLock):  # type: ignore[misc]  # final in its stubs, not in C
    """A reentrant lock. It is free in copies, pickles and forked children, unless the forking thread held it.

    Its `with` is implemented in C, so no signal handler runs between taking the lock and the body.
    """

    __slots__ = ()

    def __init__(self) -> None:
        renew_in_children(self)

    def renew(self) -> None:
        if self.acquire(blocking=False):  # free, or held by the thread that forked
            self.release()
        else:
            self._at_fork_reinit()  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        return Lock, ()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signal handlers, which may raise, until the end of the block. Handlers run in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {each: held for each in _SIGNALS if callable(held := signal.getsignal(each))}
    came: list[tuple[int, Any]] = []
    over = False

    def delay(number: int, frame: Any) -> None:
        if over:  # a handler has raised below, before this one was replaced
            handlers[number](number, frame)
        else:
            came.append((number, frame))

    try:
        for number in handlers:
            signal.signal(number, delay)
        yield
    finally:
        over = True
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)
