"""The write-ahead log of one shard: durable writes, kept on disk until a checkpoint holds their rows."""

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from fbuf.checkpoint import Writing, load
from fbuf.checkpoint.files import FolderLock
from interop.checkpoint.values import NO_PICKLE, decode, encode
from interop.remote.errors import RemoteError

_ENTRY = re.compile(r"\d{12}")


class WriteLog:
    """A log of numbered folders, one per write, each committed like a checkpoint: flushed, checksummed, atomic.

    `checkpoint` is the path of the checkpoint before the log, or None; `cut` is the number of the last write in it. One
    process at a time owns the log of a shard.
    """

    def __init__(self, folder: Path, wait: float = 10.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, until = folder, time.monotonic() + wait

        def wait_for_the_killed_one() -> None:
            raise BlockingIOError

        while True:  # a killed process frees its lock at once, an ending process soon
            try:
                self._lock = FolderLock(folder, wait_for_the_killed_one)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RemoteError(f"{folder} is in use by another buffer: give each a recovery_dir") from None
                time.sleep(0.1)
        self.checkpoint: str | None = None
        self.cut = 0
        if (saved := folder / "checkpoint").exists():
            self.checkpoint, self.cut = load(saved, lambda source: (source.tree["path"], source.tree["cut"]))
        self._remove_old()
        self.last = max([self.cut, *self._numbers()])

    @classmethod
    def of_shard(cls, folder: Path, number: int, count: int) -> Self:
        """The log of one of `count` shards. ValueError if the folder has more shards, whose rows would be lost."""
        found = [int(each.name.removeprefix("shard-")) for each in folder.glob("shard-*")]
        if found and max(found) >= count:
            raise ValueError(
                f"recovery_dir={str(folder)!r} has the rows of {max(found) + 1} shards, num_shards is {count}: build as "
                "many shards, save them by dumps(), and load the checkpoint into another number"
            )
        return cls(folder / f"shard-{number}")

    def release(self) -> None:
        """Release the lock of the log."""
        self._lock.release()

    def append(self, call: tuple[str, Any, Any]) -> None:
        """Log a write, (method, args, kwargs), to disk. TypeError for a value that would need pickle."""
        with Writing(self._entry(self.last + 1)) as out:
            out.write(encode(call, "a durable write", remedy=NO_PICKLE))
        self.last += 1

    def drop_last(self) -> None:
        """Remove the last write, after the buffer rejected it."""
        shutil.rmtree(self._entry(self.last).rename(self._folder / "dropped"))
        self.last -= 1

    def replay(self, write: Callable[[str, Any, Any], Any]) -> None:
        """Replay the writes after the checkpoint, in order.

        Uncommitted writes, and a last write rejected by the buffer, were never acknowledged: they are dropped.
        """
        for number in self._numbers():
            try:
                call = load(self._entry(number), lambda source: decode(source.tree, where="a durable write"))
            except FileNotFoundError:
                shutil.rmtree(self._entry(number))
                continue
            try:
                write(*call)
            except (OSError, MemoryError):  # a fault of this machine: the write may have been acknowledged
                raise
            except Exception:
                if number < self.last:
                    raise
                self.drop_last()

    def committed(self, checkpoint: str | None, cut: int) -> None:
        """Record a new checkpoint, which holds the writes up to `cut`, and remove these writes."""
        with Writing(self._folder / "checkpoint") as out:
            out.write({"path": checkpoint, "cut": cut})
        self.checkpoint, self.cut = checkpoint, cut
        self._remove_old()

    def _entry(self, number: int) -> Path:
        return self._folder / f"{number:012d}"

    def _numbers(self) -> list[int]:
        found = (each.name for each in self._folder.iterdir() if _ENTRY.fullmatch(each.name))
        return sorted(number for number in map(int, found) if number > self.cut)

    def _remove_old(self) -> None:
        for each in self._folder.iterdir():
            if each.name == "dropped" or (_ENTRY.fullmatch(each.name) and int(each.name) <= self.cut):
                shutil.rmtree(each)
