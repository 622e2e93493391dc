"""Kills a save before and after each of its operations on files (K1), or at random times (K2).

The path must hold the old checkpoint or the new one, complete; after a first save none or the new one. The next save must
work and leave nothing else behind.
"""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from fbuf.checkpoint import load
from interop import LazyTensorStorage, ReplayBuffer
from tests.faults.children import forked, one_thread, scratch
from tests.faults.counts import Counts
from tests.faults.file_operations import nothing, watched
from tests.faults.subjects import NONE, Maker, Subject, with_subjects


def _operations(subject: Subject, path: Path) -> list[str]:
    """The operations of saving to a path, in a child."""

    def do() -> bytes:
        with watched(nothing) as names:
            subject.save(path)
        return json.dumps(names).encode()

    how, content = forked(do)
    assert how == "done", (subject.name, how, content.decode())
    return json.loads(content)


def _killed_at(subject: Subject, path: Path, point: int, when: str) -> str:
    """Save in a child that is killed there; how it ended."""

    def hook(number: int, name: str, moment: str, args: Any, result: Any) -> None:
        if number == point and moment == when:
            os.kill(os.getpid(), signal.SIGKILL)

    def do() -> None:
        with watched(hook):
            subject.save(path)

    how, content = forked(do)
    return how if how != "failed" else content.decode()


def _kill(subject: Subject, counts: Counts, most: int, rng: random.Random) -> None:
    """Kill saves of a subject at some of their operations."""
    with scratch("killing") as folder:
        for first in (False, True):
            path = Path(folder, "first" if first else "over")
            if not first:
                shutil.copytree(subject.old, path)
            names = _operations(subject, path)
            shutil.rmtree(path)
            points = [(number, when) for number in range(len(names)) for when in ("before", "after")]
            for number, when in rng.sample(points, min(len(points), max(1, most // 2))):
                if not first:
                    shutil.copytree(subject.old, path)
                where = f"{subject.name}, {'first' if first else 'over'}, {when} {number} {names[number]}"
                how = _killed_at(subject, path, number, when)
                good = {"killed": (NONE if first else "old", "new"), "done": ("new",)}.get(how, ())
                counts.note(subject.found(path) if good else how, good, where)
                if rng.random() < 0.25:
                    subject.save(path)
                    left = sorted(os.listdir(path))
                    clean = len(left) == 2 and left[0] == "MANIFEST.json" and subject.found(path) == "new"
                    counts.fail(f"{where}: the next save left {left}", times=not clean)
                    counts.outcomes["restarts"] += 1
                shutil.rmtree(path, ignore_errors=True)


def at_operations(size: int, seed: int = 0, makers: list[Maker] | None = None) -> Counts:
    """So many kills at operations on files."""
    with one_thread():
        return with_subjects(_kill, size, seed, makers, least=24)


def at_random_times(size: int, megabytes: int = 200, seed: int = 0) -> Counts:
    """Two large states are saved to one path in turn; so many saves are killed at a random time."""
    rng, counts, rows = random.Random(seed), Counts(), megabytes * 1000 // 10
    with scratch("killing") as folder, one_thread():
        path, known = Path(folder, "c"), {}
        buffers = [ReplayBuffer(storage=LazyTensorStorage(rows), batch_size=4) for _ in range(2)]
        for place, buffer in enumerate(buffers):
            noise = torch.from_numpy(np.random.default_rng(place).integers(0, 256, (rows, 10_000), np.uint8))
            buffer.extend(TensorDict({"id": torch.arange(rows) + place, "noise": noise}, [rows]))
            took = float(_seconds(buffer, Path(folder, "other")))
            Path(folder, "other").rename(Path(folder, f"saved {place}"))
            known[_content(Path(folder, f"saved {place}"))] = place
        buffers[1].dumps(path)
        shutil.rmtree(Path(folder, "saved 0")), shutil.rmtree(Path(folder, "saved 1"))
        for _ in range(size):
            there = known[_content(path)]
            how, content = forked(lambda there=there: _seconds(buffers[1 - there], path), rng.random() * 1.1 * took)
            took = float(content) if how == "done" else 1.02 * took  # the next save may be slower or faster
            found = known.get(_content(path))
            outcome = "mixed" if found is None else "old" if found == there else "new"
            counts.note(content.decode() if how == "failed" else outcome, ("old", "new"), "a random time")
            counts.outcomes[how] += 1
        target = ReplayBuffer(storage=LazyTensorStorage(rows), batch_size=4)
        target.loads(path)
        same = bool((target[:] == buffers[known[_content(path)]][:]).all())
        counts.fail("something else was loaded", times=not same)
    return counts


def _seconds(buffer: ReplayBuffer, path: Path) -> bytes:
    """Save, and say how long it took."""
    begun = time.monotonic()
    buffer.dumps(path)
    return repr(time.monotonic() - begun).encode()


def _content(path: Path) -> str:
    """A digest of what can be loaded."""

    def use(source: Any) -> str:
        columns = source.tree["storage"]["content"]["rows"]["columns"].read()
        return f"{columns[0][0]} {columns[1].sum(dtype=np.int64)} {source.tree['storage']['content']['rows']['ring']}"

    return load(path, use)
