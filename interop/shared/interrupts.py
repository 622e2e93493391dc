"""Signals that would break off what has to be done as a whole."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_BREAKING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)


class _Waiting:
    """What handles signals meanwhile: it keeps them for the end. Once that has come it is what was there before."""

    def __init__(self) -> None:
        self.before: dict[int, Callable[[Any, Any], Any]] = {}
        self.over = False
        self.came: list[tuple[Any, Any]] = []
        for number in _BREAKING:
            handler: Any = signal.getsignal(number)
            if isinstance(handler, _Waiting) and handler.over:  # its end was broken off
                handler = handler.before[number]
            if callable(handler):
                self.before[number] = handler

    def __call__(self, number: Any, frame: Any) -> None:
        if self.over:
            self.before[number](number, frame)
        else:
            self.came.append((number, frame))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Have functions that handle signals, which may raise, wait for the end. They only ever run in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting = _Waiting()
    try:
        for number in waiting.before:
            signal.signal(number, waiting)
        yield
    finally:
        waiting.over = True  # from here on it hands signals on, where it is not replaced below
        for number, handler in waiting.before.items():
            signal.signal(number, handler)
        for number, frame in waiting.came:
            waiting.before[number](number, frame)
