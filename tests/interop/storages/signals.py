"""A signal at any line of a call: its handler raises there, unless the signal has to wait."""

import gc
import linecache
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import interop

_HERE = os.path.dirname(interop.__file__) + os.sep


@contextmanager
def raising(number: int = signal.SIGINT) -> Iterator[None]:
    """Have the signal raise KeyboardInterrupt, whatever the tests are run by."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def sent(call: Callable[[], Any], moment: int, within: tuple[str, ...] = ("",)) -> str | None:
    """Send a SIGINT at a line of the library that `call` comes to, counted from 1, in files whose path begins like this.

    The line; None where the call ends before. Whatever came of it, the signal was heard by the end of the call.
    """
    left, line = moment, None

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left, line
        name = frame.f_code.co_filename
        if not name.startswith(_HERE) or not name[len(_HERE) :].startswith(within):
            return None
        unheard = (
            linecache.getline(name, frame.f_lineno).strip().startswith(("try:", "with "))
        )  # Python looks elsewhere
        if event == "line" and not unheard:
            left -= 1
            if not left:
                line = f"{name[len(_HERE) :]}:{frame.f_lineno}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    heard = False
    gc.disable()  # or it may come where storages of before are closed
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        heard = True
    finally:
        sys.settrace(None)
        gc.enable()
    assert heard == (line is not None), f"a signal at {line} was lost"
    return line


def standing(buffer: Any) -> tuple[Any, ...]:
    """Rows, cursor, count and, where there are any, priorities."""
    rows = buffer[:].tolist() if len(buffer) else []
    sampler = buffer.sampler
    if not hasattr(sampler, "priorities"):
        return rows, buffer.writer.cursor, buffer.write_count
    sampler.item_values.take_over(buffer.storage)
    return rows, buffer.writer.cursor, buffer.write_count, sampler.priorities.tolist(), sampler.default_priority
