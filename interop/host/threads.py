"""Threads, signals and forks of one process: locks, changes and hand-offs that no signal handler leaves half done.

A signal handler runs in the main thread, between any two steps, and may raise. So a change is prepared aside and then made
by steps that can be repeated: `finished` makes them again if they were interrupted. Where steps cannot be repeated,
`uninterrupted` delays the handlers. Other threads get work by hand-offs that may be done twice or not at all: see `Worked`.
"""

import _signal  # type: ignore[import-not-found]  # `signal` wraps its functions to return enums, in ten times as long
import _thread
import contextlib
import os
import signal
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

_T = TypeVar("_T")

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)


_renewals: weakref.WeakKeyDictionary[object, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def renew_in_children(renew: Callable[[], None]) -> None:
    """Call a method in every child that is forked while its object lives: one method for each object."""
    method = cast(types.MethodType, renew)
    _renewals[method.__self__] = method.__func__


class HasMutex(Protocol):
    mutex: Any  # a lock


_PATIENCE = 1.0  # seconds that a fork waits for other threads
_whole: weakref.WeakSet[HasMutex] = weakref.WeakSet()
_held: list[Any] = []


def hold_in_forks(each: HasMutex) -> None:
    """Hold `each.mutex` during forks while `each` lives, so that children find what it guards whole."""
    _whole.add(each)


def _before_fork() -> None:
    until = time.monotonic() + _PATIENCE
    for each in list(_whole):
        mutex = each.mutex
        if mutex.acquire(timeout=max(0.0, until - time.monotonic())):
            _held.append(mutex)


def _in_parent() -> None:
    while _held:
        _held.pop().release()


def _in_child() -> None:
    _in_parent()
    for each, renew in list(_renewals.items()):
        renew(each)


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


class Lock(_thread.RLock):  # type: ignore[misc]  # final in its stubs, not in C
    """A reentrant lock. It is free in copies, pickles and forked children, unless the forking thread held it.

    Its `with` is implemented in C, so no signal handler runs between taking the lock and the body.
    """

    __slots__ = ()

    is_mine: Callable[[], bool] = vars(_thread.RLock)["_is_owned"]  # whether this thread holds it

    def __init__(self) -> None:
        renew_in_children(self.renew)

    def renew(self) -> None:
        if self.acquire(blocking=False):  # free, or held by the thread that forked
            self.release()
        else:
            self._at_fork_reinit()  # type: ignore[attr-defined]

    def let_go(self) -> None:
        """Release it as often as this thread holds it: after an interrupt between the end of a `with` and its release."""
        while self.is_mine():
            self.release()

    def __reduce__(self) -> Any:
        return Lock, ()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signal handlers, which may raise, until the end of the block. Handlers run in the main thread only."""
    if _thread.get_ident() != threading.main_thread().ident:
        yield
        return
    known = zip(_SIGNALS, map(_signal.getsignal, _SIGNALS), strict=True)
    handlers: dict[int, Any] = {each: held for each, held in known if held is not None and type(held) is not int}
    came: list[tuple[int, Any]] = []
    over = False

    def delay(number: int, frame: Any) -> None:
        if over:  # a handler has raised below, before this one was replaced
            handlers[number](number, frame)
        else:
            came.append((number, frame))

    def restore() -> None:
        for number, handler in handlers.items():
            _signal.signal(number, handler)

    try:
        for number in handlers:
            _signal.signal(number, delay)
        yield
    finally:
        try:
            restore()
        except BaseException:  # of the handler of another signal, which is in its place again
            over = True
            restore()
            raise
        over = True
        for number, frame in came:
            handlers[number](number, frame)


def finished(change: Callable[[], _T]) -> _T:
    """Make a change whole that may be made twice: where an exception interrupts it, it is made again before that is raised.

    The exception is that of a signal handler; the second time signals wait. An error of the change itself comes again: so
    everything that can be refused is refused before.
    """
    try:
        return change()
    except BaseException:
        with uninterrupted():
            change()
        raise


def came_from_a_signal(error: BaseException) -> bool:
    """Whether the handler of a signal has raised this: an interrupt, not an error of what it interrupted."""
    if not isinstance(error, Exception):
        return True
    codes = set[Any]()
    for each in _SIGNALS:
        handler: Any = signal.getsignal(each)
        function = getattr(handler, "__func__", handler)
        if not isinstance(function, types.FunctionType) and callable(handler):
            function = getattr(type(handler).__call__, "__func__", type(handler).__call__)
        codes.add(getattr(function, "__code__", None))
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
