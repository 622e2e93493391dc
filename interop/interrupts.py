"""Signals that would break off what has to be done as a whole."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_BREAKING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Have functions that handle signals, which may raise, wait for the end. They only ever run in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[Any, Any]] = []
    handlers = {number: handler for number in _BREAKING if callable(handler := signal.getsignal(number))}
    try:
        for number in handlers:
            signal.signal(number, lambda *what: came.append(what))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)
