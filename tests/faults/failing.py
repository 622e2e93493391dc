"""Has each operation on files fail while something is saved: no space, no disk, no memory, half a write.

Then the error comes out, what was there before is there and nothing else, and what was saved is as it was and can be saved.

    python -m tests.faults.failing --points 2000 --seed 0
"""

import argparse
import contextlib
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
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
from tests.faults.children import forked, scratch
from tests.faults.file_operations import nothing, watched
from tests.faults.killing import NONE, Counts, told
from tests.faults.subjects import Subject, every

FAULTS = ("ENOSPC", "EIO", "EDQUOT", "EINTR", "MemoryError", "short")
TIDYING = (
    "unlink",
    "rmdir",
    "scandir",
    "listdir",
    "stat",
)  # what removes leftovers, which the next writer does as well


def _failing(fault: str, point: int) -> Any:
    def hook(number: int, name: str, when: str, args: tuple[Any, ...], result: Any) -> Any:
        if number != point or when != "before":
            return None
        if fault == "short":
            return _half if name == "write" else None
        error = MemoryError("none left") if fault == "MemoryError" else OSError(getattr(errno, fault), fault)
        if name == "close":  # it is closed even where it fails
            os.close(args[0])
        return _raising(error)

    return hook


def _raising(error: BaseException) -> Any:
    def call(*args: Any, **kwargs: Any) -> None:
        raise error

    return call


def _half(handle: int, content: Any) -> int:
    return os.write(handle, content[: max(1, len(content) // 2)])


def fail_subject(subject: Subject, counts: Counts, most: int, rng: random.Random) -> None:
    """Have some of its operations fail."""
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
            for number, fault in rng.sample(points, min(len(points), most // 2)):
                if not first:
                    shutil.copytree(subject.old, path)
                outcome = fail_at(subject, path, number, fault, first)
                where = f"{subject.name}, {'first' if first else 'over'}, {fault} at {number} {names[number]}"
                counts.note(outcome, ("raised", "saved"), where)
                if subject.state() != state:
                    counts.note("what was saved has changed", (), where)
                shutil.rmtree(path, ignore_errors=True)


def fail_at(subject: Subject, path: Path, number: int, fault: str, first: bool) -> str:
    """Save while one operation fails; "raised" and "saved" are right."""
    raised: BaseException | None = None
    with watched(_failing(fault, number), readings=True) as names:
        try:
            subject.save(path)
        except BaseException as error:
            raised = error
    name = names[number] if number < len(names) else "nothing"
    there = told(subject, path)
    if raised is None:
        if there != "new":
            return f"no error, but {there} is there"
    elif not isinstance(raised, OSError | MemoryError):
        return f"{type(raised).__name__}: {raised}"
    else:
        placed = "rename" in names[:number]
        if there not in ((NONE if first else "old"), *(["new"] if placed else [])):
            return f"{type(raised).__name__}, and {there} is there"
        if name not in TIDYING and not placed and (left := _left(path, first)):
            return f"{type(raised).__name__}, and {left} is left"
    subject.save(path)
    if told(subject, path) != "new" or _left(path, False):
        return f"then {told(subject, path)} is there, and {_left(path, False)} is left"
    return "saved" if raised is None else "raised"


def _left(path: Path, first: bool) -> list[str]:
    """What should not be there."""
    if first:
        return [str(path)] if path.exists() else []
    found = sorted(os.listdir(path))
    return [] if len(found) == 2 and found[0] == "MANIFEST.json" else found


def run(points: int, seed: int = 0, makers: list[Any] | None = None) -> dict[str, Any]:
    """So many failing operations, over subjects in an order of their own."""
    rng = random.Random(seed)
    counts, begun = Counts(), time.monotonic()
    makers = every(seed) if makers is None else makers
    for make in makers:
        left = points - counts["points"]
        if left <= 0:
            break
        fail_subject(make(), counts, min(max(24, points // len(makers)), left + left % 2), rng)
        counts["subjects"] += 1
    return {"test": "failing", **counts.result(), "seconds": round(time.monotonic() - begun, 1)}


# ------------------------------------------------------------------ a disk that is full


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[bool]:
    """A file system of that size in memory; False where this may not be."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", str(path)], check=True)


def run_full() -> dict[str, Any]:
    """A buffer that grows on a disk of 4 MB, until it does not fit: with a checkpoint there, and without."""
    counts = Counts()
    with scratch("full") as folder, small_disk(Path(folder), "4m") as mounted:
        if not mounted:
            return {"test": "a full disk", "skipped": "no file system can be mounted here", "wrong": 0}
        for kilobytes in range(100, 6000, 83):
            buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=4)
            path = Path(folder, "c")
            shutil.rmtree(path, ignore_errors=True)
            written = 0
            for first in (True, False):
                rows = torch.from_numpy(np.random.default_rng(written).integers(0, 256, (kilobytes, 1000), np.uint8))
                buffer.extend(TensorDict({"x": rows}, [kilobytes]))
                before = buffer[:].clone()
                where = f"{'first' if first else 'over'}, {len(buffer)} kB"
                try:
                    buffer.dumps(path)
                    written = len(buffer)
                    counts.note("saved", ("saved",), where)
                except OSError as error:
                    counts.note(errno.errorcode[error.errno or 0], ("ENOSPC",), where)
                    if path.exists() != (written > 0) or (written and _left(path, False)):
                        counts.note(f"{os.listdir(folder)} is left", (), where)
                    if not (buffer[:] == before).all():
                        counts.note("the buffer has changed", (), where)
                if written:
                    other = ReplayBuffer(storage=LazyTensorStorage(10_000))
                    other.loads(path)
                    same = len(other) == written and bool((other[:] == buffer[:written]).all())
                    counts.note("loaded" if same else "something else was loaded", ("loaded",), where)
    return {"test": "a full disk", **counts.result()}


def _ted(rows: int, seed: int) -> TensorDict:
    """One episode, 1 kB a row."""
    obs = torch.from_numpy(np.random.default_rng(seed).random((rows + 1, 250), np.float32))
    done = torch.arange(rows)[:, None] == rows - 1
    root = {"obs": obs[:-1], "done": torch.zeros(rows, 1, dtype=torch.bool)}
    after = TensorDict({"obs": obs[1:], "done": done, "reward": torch.ones(rows, 1)}, [rows])
    return TensorDict({**root, "next": after}, [rows])


def run_full_elsewhere() -> dict[str, Any]:
    """The same for checkpointers whose files others write, in children, since such code may bring a process down."""
    counts = Counts()
    with scratch("full") as folder, small_disk(Path(folder), "4m") as mounted:
        if not mounted:
            return {"test": "a full disk, other checkpointers", "skipped": "nothing can be mounted here", "wrong": 0}
        path = Path(folder, "c")
        for kind in (FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer):
            for rows in range(150, 4500, 217):
                shutil.rmtree(path, ignore_errors=True)
                kept: TensorDict | None = None
                for size in (rows // 2, rows):
                    buffer = ReplayBuffer(storage=LazyTensorStorage(size), checkpointer=kind())
                    buffer.extend(_ted(size, size))

                    def save(buffer: Any = buffer, first: bool = kept is None) -> bytes:
                        try:
                            buffer.dumps(path)
                        except OSError as error:
                            left = _left(path, first)
                            if left or not error.errno:
                                return f"OSError {error.errno} left {left}".encode()
                            return b"OSError"
                        return b"saved"

                    where = f"{kind.__name__}, {rows} rows, {'first' if kept is None else 'over'}"
                    how, told_ = forked(save)
                    counts.note(told_.decode() if how == "done" else how, ("saved", "OSError"), where)
                    kept = buffer[:] if told_ == b"saved" else kept
                    if kept is not None:
                        other = ReplayBuffer(storage=LazyTensorStorage(len(kept)), checkpointer=kind())
                        other.loads(path)
                        same = bool((other[:] == kept).all())
                        counts.note("loaded" if same else "something else was loaded", ("loaded",), where)
    return {"test": "a full disk, other checkpointers", **counts.result()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [run(options.points, options.seed), run_full(), run_full_elsewhere()]
    for each in results:
        print(json.dumps(each))
    return any(each["wrong"] for each in results)


if __name__ == "__main__":
    sys.exit(main())
