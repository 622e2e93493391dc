"""Forked children that do one thing and are killed, and folders for them."""

import contextlib
import os
import select
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def forked(do: Callable[[], Any], after: float | None = None, most: float = 60.0) -> tuple[str, bytes]:
    """Do this in a child. Returns "done", "failed", "killed" or "hung", and its answer: bytes or an error.

    Args:
        after: seconds after which it is killed.
        most: seconds after which it counts as hung.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that a child does not have
        child = os.fork()
    if not child:
        code, told = 1, b""
        try:
            os.close(reading)
            told = do() or b""
            code = 0
        except BaseException:
            told = traceback.format_exc().encode()
        finally:
            os.write(writing, told)
            os._exit(code)
    os.close(writing)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    told, ended, until = b"", False, time.monotonic() + most
    while not ended and select.select([reading], [], [], max(0, until - time.monotonic()))[0]:
        piece = os.read(reading, 1 << 16)
        told, ended = told + piece, not piece
    if not ended:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    how = "killed" if os.WIFSIGNALED(status) else "failed" if os.WEXITSTATUS(status) else "done"
    return how if ended else "hung", told


def scratch(name: str, disk: bool = False) -> tempfile.TemporaryDirectory[str]:
    """A folder in memory where there is one: a kill loses nothing that was written to either, and this is faster."""
    return tempfile.TemporaryDirectory(prefix=f"{name}-", dir=None if disk else MEMORY)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A block without threads of torch, which a forked child would miss."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
