"""Large files to and from the disk, past the page cache where the file system allows that.

What is written has to be on the disk anyway before it counts. On the way through the page cache it would be copied once
more and push out what training reads.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_FLAG = getattr(os, "O_DIRECT", 0)  # Linux only
_ALIGNED = 4096  # bytes: of memory, of places in files and of sizes
_LEAST = 1 << 16  # bytes from which it pays
_CHUNK = 1 << 20


class _Scratch(threading.local):
    """Memory of a thread that is used again: fresh memory costs more than what is done with it."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def of(self, purpose: str, size: int) -> np.ndarray:
        """Aligned memory, [size] uint8, until this thread asks again for that purpose."""
        held = self._held.get(purpose)
        if held is None or held.size < size:
            held = self._held[purpose] = np.frombuffer(mmap.mmap(-1, max(size, _CHUNK)), np.uint8)
        return held[:size]


_scratch = _Scratch()


def joined(pieces: list[np.ndarray]) -> np.ndarray:
    """A copy of all bytes one after the other, until this thread asks again."""
    memory = _scratch.of("joined", sum(piece.size for piece in pieces))
    at = 0
    for piece in pieces:
        memory[at : at + piece.size] = piece
        at += piece.size
    return memory


def write_new(path: Path, content: np.ndarray, flushed: bool = False) -> None:
    """Make a read-only file of bytes, [n] uint8. FileExistsError if there is one."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444)
    try:
        whole = content.size // _ALIGNED * _ALIGNED
        aligned = whole >= _LEAST and content.ctypes.data % _ALIGNED == 0 and _switched(handle, True)
        at = 0
        while at < content.size:
            part = content[at:whole] if aligned and at < whole else content[at:]
            try:
                at += os.write(handle, part.data)
            except OSError as error:
                if not aligned or error.errno != errno.EINVAL:
                    raise
                whole = at
            if aligned and (at >= whole or at % _ALIGNED):
                aligned = not _switched(handle, False)
        if flushed:
            os.fsync(handle)
    finally:
        os.close(handle)


def read(handle: int, size: int) -> Iterator[np.ndarray]:
    """The bytes of a file from where it stands, in pieces that are good until the next one. Fewer where it ends."""
    memory = _scratch.of("read", _CHUNK)
    aligned = size >= _LEAST and _switched(handle, True)
    while True:
        try:
            count = os.readv(handle, [memory.data])
        except OSError as error:
            if not aligned or error.errno != errno.EINVAL:
                raise
            aligned = not _switched(handle, False)
            continue
        if not count:
            return
        yield memory[:count]


def _switched(handle: int, on: bool) -> bool:
    """Turn direct input and output on or off; whether that succeeded."""
    if not _FLAG:
        return not on
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | _FLAG if on else flags & ~_FLAG)
    except OSError:  # not on this file system
        return False
    return True
