"""The log of a queue: one line an entry. A line that is complete is committed; a killed process leaves a part of one."""

import contextlib
import dataclasses
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fbuf.checkpoint import CheckpointCorrupt
from fbuf.checkpoint.files import FolderLock
from interop.host.threads import Lock
from interop.transfer_queue.queue_rows import Entry, QueueRows

_COMPACT_FROM = 1 << 20  # bytes of a log that is worth to be written anew
_LOST = (
    "Which rows are stored cannot be told. Restore the log from a copy, or begin in another folder: nothing was removed"
)


@dataclasses.dataclass
class _Followed:
    """An open file of the log, and what its first `read` bytes say."""

    file: int
    read: int = 0
    rows: QueueRows = dataclasses.field(default_factory=QueueRows)

    def is_at(self, path: Path) -> bool:
        """Whether this is the file at the path, and not shorter than what was read of it."""
        try:
            here, there = os.fstat(self.file), os.stat(path)
        except FileNotFoundError:
            return False
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino) and there.st_size >= self.read

    def follow(self, path: Path) -> None:
        """Apply the entries that were committed since."""
        size = os.fstat(self.file).st_size
        if size <= self.read:
            return
        *lines, rest = os.pread(self.file, size - self.read, self.read).split(b"\n")  # the rest is not committed
        for line in lines:
            self.rows.apply(_entry(line, path))  # after an interrupt the last one is applied again
            self.read += len(line) + 1
        if _is_whole(rest[:-1]):  # no kill leaves more than the text of an entry without its end
            raise CheckpointCorrupt(f"{path}: the end of the last entry is damaged: it was committed, or it was not")

    def drop_rest(self) -> None:
        """Remove the part of an entry that a killed process left."""
        if os.fstat(self.file).st_size > self.read:
            os.ftruncate(self.file, self.read)


class Log:
    """The log in a folder, followed by any number of processes and threads.

    The file is replaced by a shorter one when it has become long, and the disk has room for it. A process that is killed at
    any operation leaves a log that has all entries that were committed, and not the one that was not.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._threads = folder / "log", Lock()
        self._followed: _Followed | None = None
        self._compact_at = _COMPACT_FROM

    @contextlib.contextmanager
    def rows(self) -> Iterator[QueueRows]:
        """The rows after the last entry that was committed before the call. O(new entries). Do not change them."""
        with self._threads:
            followed = self._newest()
            yield followed.rows if followed else QueueRows()

    @contextlib.contextmanager
    def held(self) -> Iterator[QueueRows]:
        """The rows, while no other process and thread appends. Entries of killed processes are rolled back."""
        with self._threads:
            lock = FolderLock(self._path.parent)
            try:
                followed = self._newest()
                if followed:
                    followed.drop_rest()
                yield followed.rows if followed else QueueRows()
            finally:
                lock.release()

    def append(self, entry: Entry, flush: bool) -> None:
        """Commit an entry to a log that exists. For the holder of the lock. After an OSError it is not committed."""
        followed = self._newest()
        if followed is None:
            raise FileNotFoundError(f"{self._path}: there is no log")
        try:
            _write(followed.file, _line(entry), flush)
        except OSError:
            followed.drop_rest()
            raise
        followed.follow(self._path)
        if followed.read > self._compact_at:
            self._compact(followed, flush)

    def replace(self, rows: QueueRows, flush: bool) -> None:
        """Commit a log that says `rows`, in the place of the one there is, if any. For the holder of the lock."""
        line, staged = _line(rows.snapshot()), self._path.with_name("log.staged")
        handle = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _write(handle, line, flush)
            os.rename(staged, self._path)
        finally:
            os.close(handle)
        if flush:
            flush_folder(self._path.parent)
        self._compact_at = max(_COMPACT_FROM, 4 * len(line))
        self._newest()

    def _compact(self, followed: _Followed, flush: bool) -> None:
        """Replace the log by a shorter one, if that can be done. What it says is committed in either."""
        self._compact_at = 2 * followed.read  # of the next attempt, if this one fails
        try:
            self.replace(followed.rows, flush)
        except OSError:
            with contextlib.suppress(OSError):
                self._path.with_name("log.staged").unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. The next call opens it again."""
        with self._threads:
            followed, self._followed = self._followed, None
            if followed:
                os.close(followed.file)

    def _newest(self) -> _Followed | None:
        """The file of the log, followed to its end; None where there is none yet.

        CheckpointCorrupt for a log that is lost or says nothing: each log is renamed to its place with a first entry.
        """
        if self._followed is None or not self._followed.is_at(self._path):
            try:
                opened = _Followed(os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC))
            except FileNotFoundError:
                self._refuse_lost()
                return None
            self.close()
            self._followed = opened
        self._followed.follow(self._path)
        if not self._followed.read:
            raise CheckpointCorrupt(f"{self._path}: the log has no whole entry. {_LOST}")
        return self._followed

    def _refuse_lost(self) -> None:
        """CheckpointCorrupt where segments are in a folder without a log: the first run commits one before any put."""
        folder = self._path.with_name("segments")
        if folder.is_dir() and any(folder.iterdir()) and not self._path.exists():
            raise CheckpointCorrupt(f"{self._path}: the log of the files in {folder} is missing. {_LOST}")


def flush_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(handle: int, line: bytes, flush: bool) -> None:
    count = 0
    while count < len(line):
        count += os.write(handle, line[count:])
    if flush:
        os.fsync(handle)


def _line(entry: Entry) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _entry(line: bytes, path: Path) -> dict[str, Any]:
    if not _is_whole(line):
        raise CheckpointCorrupt(f"{path}: a committed entry is damaged. Its rows, and those after it, cannot be told")
    return json.loads(line.partition(b" ")[2])


def _is_whole(line: bytes) -> bool:
    checksum, _, text = line.partition(b" ")
    return checksum == b"%08x" % zlib.crc32(text)
