"""Makes operations on files fail during a save (K3): no space, no disk, no memory, half a write; also on a full disk (K6).

The error must be raised. The old checkpoint is there and nothing else; the subject is unchanged and can be saved.
"""

import contextlib
import errno
import itertools
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from interop import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
)
from tests.faults.children import forked, one_thread, scratch
from tests.faults.counts import Counts
from tests.faults.file_operations import nothing, watched
from tests.faults.subjects import NONE, Maker, Subject, with_subjects

FAULTS = ("ENOSPC", "EIO", "EDQUOT", "EINTR", "MemoryError", "short")
TIDYING = ("unlink", "rmdir", "scandir", "listdir", "stat")  # remove leftovers, which the next save does as well


def _failing(fault: str, point: int) -> Any:
    """A hook that makes one operation fail."""

    def hook(number: int, name: str, when: str, args: tuple[Any, ...], result: Any) -> Any:
        if number != point or when != "before":
            return None
        if fault == "short":
            return _half if name == "write" else None
        if name == "close":  # it is closed even where it fails
            os.close(args[0])
        return _raising(MemoryError("none left") if fault == "MemoryError" else OSError(getattr(errno, fault), fault))

    return hook


def _raising(error: BaseException) -> Any:
    def call(*args: Any, **kwargs: Any) -> None:
        raise error

    return call


def _half(handle: int, content: Any) -> int:
    return os.write(handle, content[: max(1, len(content) // 2)])


def _fail(subject: Subject, counts: Counts, most: int, rng: random.Random) -> None:
    """Make some operations of saves of a subject fail."""
    with scratch("failing", disk=True) as folder:
        for first in (False, True):
            path = Path(folder, "c")
            if not first:
                shutil.copytree(subject.old, path)
            with watched(nothing, readings=True) as names:
                subject.save(path)
            shutil.rmtree(path)
            state = subject.state()
            points = [(number, fault) for number in range(len(names)) for fault in FAULTS]
            for number, fault in rng.sample(points, min(len(points), max(1, most // 2))):
                if not first:
                    shutil.copytree(subject.old, path)
                where = f"{subject.name}, {'first' if first else 'over'}, {fault} at {number} {names[number]}"
                counts.note(_failed_at(subject, path, number, fault, first), ("raised", "saved"), where)
                counts.fail(f"{where}: what was saved has changed", times=subject.state() != state)
                shutil.rmtree(path, ignore_errors=True)


def _failed_at(subject: Subject, path: Path, number: int, fault: str, first: bool) -> str:
    """Save while one operation fails; "raised" and "saved" are right."""
    raised: BaseException | None = None
    with watched(_failing(fault, number), readings=True) as names:
        try:
            subject.save(path)
        except BaseException as error:
            raised = error
    there = subject.found(path)
    if raised is None:
        if there != "new":
            return f"no error, but {there} is there"
    elif not isinstance(raised, OSError | MemoryError):
        return f"{type(raised).__name__}: {raised}"
    else:
        placed = "rename" in names[:number]
        if there not in ((NONE if first else "old"), *(["new"] if placed else [])):
            return f"{type(raised).__name__}, and {there} is there"
        tidying = number < len(names) and names[number] in TIDYING
        if not tidying and not placed and (left := _left(path, first)):
            return f"{type(raised).__name__}, and {left} is left"
    subject.save(path)
    if subject.found(path) != "new" or _left(path, False):
        return f"then {subject.found(path)} is there, and {_left(path, False)} is left"
    return "saved" if raised is None else "raised"


def _left(path: Path, first: bool) -> list[str]:
    """Leftovers: all files after a failed first save, else all but one complete checkpoint."""
    if first:
        return [str(path)] if path.exists() else []
    found = sorted(os.listdir(path))
    return [] if len(found) == 2 and found[0] == "MANIFEST.json" else found


def operations(size: int, seed: int = 0, makers: list[Maker] | None = None) -> Counts:
    """So many failing operations."""
    with one_thread():
        return with_subjects(_fail, size, seed, makers, least=24)


# ------------------------------------------------------------------ a disk that is full


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[bool]:
    """A file system of that size in memory; False where none can be mounted."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", str(path)], check=True)


def ted(rows: int, seed: int) -> TensorDict:
    """One episode, 1 kB a row."""
    obs = torch.from_numpy(np.random.default_rng(seed).random((rows + 1, 250), np.float32))
    done = torch.arange(rows)[:, None] == rows - 1
    root = {"obs": obs[:-1], "done": torch.zeros(rows, 1, dtype=torch.bool)}
    after = TensorDict({"obs": obs[1:], "done": done, "reward": torch.ones(rows, 1)}, [rows])
    return TensorDict({**root, "next": after}, [rows])


def full_disk(size: int) -> Counts:
    """So many sizes of a first and of a second checkpoint, on a disk of 4 MB: each is saved, or raises and is not there.

    In children, since the code of other libraries may bring a process down.
    """
    counts = Counts()
    kinds = itertools.cycle((lambda: None, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer))
    with scratch("full") as folder, small_disk(Path(folder), "4m") as mounted, one_thread():
        path = Path(folder, "c")
        for rows, kind in zip(np.linspace(100, 6000, size, dtype=int).tolist() if mounted else (), kinds, strict=False):
            kept: TensorDict | None = None
            for part in (rows // 2, rows):
                buffer = ReplayBuffer(storage=LazyTensorStorage(part), checkpointer=kind())
                buffer.extend(ted(part, part))

                def save(buffer: Any = buffer, first: bool = kept is None) -> bytes:
                    try:
                        buffer.dumps(path)
                    except OSError as error:
                        left = _left(path, first)
                        return f"{error}, left {left}".encode() if left or not error.errno else b"OSError"
                    return b"saved"

                where = (
                    f"{type(buffer.storage.checkpointer).__name__}, {part} rows, {'first' if kept is None else 'over'}"
                )
                how, content = forked(save)
                counts.note(content.decode() if how == "done" else how, ("saved", "OSError"), where)
                kept = buffer[:] if content == b"saved" else kept
                if kept is not None:
                    other = ReplayBuffer(storage=LazyTensorStorage(len(kept)), checkpointer=kind())
                    other.loads(path)
                    counts.fail(f"{where}: something else was loaded", times=not (other[:] == kept).all())
            shutil.rmtree(path, ignore_errors=True)
    return counts
