"""Kills whoever saves, before and after each of its operations on files, and looks at what is there then.

It must be the old checkpoint or the new one, whole; of a first one nothing or the new one. And who comes next must be able
to save without anybody tidying up.

    python -m tests.faults.killing --points 3000 --seed 0
    python -m tests.faults.killing --random 500  # at random times, of 200 MB
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from fbuf.checkpoint import load
from interop import LazyTensorStorage, ReplayBuffer
from tests.faults.children import forked, scratch
from tests.faults.file_operations import CHANGING, nothing, watched
from tests.faults.signatures import signature
from tests.faults.subjects import Subject, every, states_of

NONE = "no checkpoint"
PARTS = 24  # points of one subject, in a run that does not do all


def told(subject: Subject, path: Path) -> str:
    """What is there: "old", "new", "none" or what is wrong."""
    try:
        found = subject.signature(path)
    except FileNotFoundError:
        return NONE
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return {subject.old_signature: "old", subject.new_signature: "new"}.get(found, "a mixture")


def count_operations(subject: Subject, path: Path) -> list[str]:
    """The operations of saving to that path, in a child."""

    def do() -> bytes:
        with watched(nothing) as names:
            subject.save(path)
        return json.dumps(names).encode()

    how, content = forked(do)
    assert how == "done", (subject.name, how, content.decode())
    return json.loads(content)


def killed_at(subject: Subject, path: Path, point: int, when: str) -> str:
    """Save in a child that is killed there; how it ended."""

    def hook(number: int, name: str, moment: str, args: Any, result: Any) -> None:
        if number == point and moment == when:
            os.kill(os.getpid(), signal.SIGKILL)

    def do() -> None:
        with watched(hook):
            subject.save(path)

    how, content = forked(do)
    return how if how != "failed" else content.decode()


class Counts(collections.Counter[str]):
    """How often what came out, and the first points where it was wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def note(self, what: str, good: Iterable[str], where: str) -> None:
        self["points"] += 1
        if what in good:
            self[what] += 1
        else:
            self["wrong"] += 1
            self.wrong += [f"{where}: {what}"] if len(self.wrong) < 5 else []

    def result(self) -> dict[str, Any]:
        return {**self, "wrong": self["wrong"], "first wrong": self.wrong}


def kill_subject(subject: Subject, counts: Counts, most: int | None, rng: random.Random) -> None:
    """Kill it at some of its points, or at all."""
    with scratch("killing") as folder:
        for first in (False, True):
            path = Path(folder, "first" if first else "over")
            if not first:
                shutil.copytree(subject.old, path)
            names = count_operations(subject, path)
            shutil.rmtree(path)
            points = [(number, when) for number in range(len(names)) for when in ("before", "after")]
            if most is not None and len(points) > most // 2:
                points = rng.sample(points, most // 2)
            for number, when in points:
                if not first:
                    shutil.copytree(subject.old, path)
                where = f"{subject.name}, {'first' if first else 'over'}, {when} {number} {names[number]}"
                how = killed_at(subject, path, number, when)
                good = (NONE, "new") if first else ("old", "new")
                if how == "done":  # an operation that raised has no "after"
                    counts.note(told(subject, path), ("new",), where)
                else:
                    counts.note(told(subject, path) if how == "killed" else how, good, where)
                if rng.random() < 0.25:
                    subject.save(path)  # who comes next
                    left = sorted(os.listdir(path))
                    if len(left) != 2 or left[0] != "MANIFEST.json" or told(subject, path) != "new":
                        counts.note(f"the next one left {left}", (), where)
                    counts["restarts"] += 1
                shutil.rmtree(path, ignore_errors=True)


def run(points: int, seed: int = 0, makers: list[Any] | None = None) -> dict[str, Any]:
    """So many kills, over subjects in an order of their own; -1 for every point of every subject."""
    rng = random.Random(seed)
    counts, begun = Counts(), time.monotonic()
    makers = every(seed) if makers is None else makers
    for make in makers:
        left = points - counts["points"]
        if points >= 0 and left <= 0:
            break
        kill_subject(
            make(), counts, None if points < 0 else min(max(PARTS, points // len(makers)), left + left % 2), rng
        )
        counts["subjects"] += 1
    return {"test": "killing", **counts.result(), "seconds": round(time.monotonic() - begun, 1)}


# ------------------------------------------------------------------ at random times


def _buffer(rows: int) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(rows), batch_size=4, generator=torch.Generator("cpu").manual_seed(0))


def run_random(points: int, megabytes: int = 200, seed: int = 0) -> dict[str, Any]:
    """Two large states take turns at one path; whoever saves is killed at a random time."""
    rng = random.Random(seed)
    counts, begun = Counts(), time.monotonic()
    rows = megabytes * 1000 // 10
    with scratch("killing") as folder:
        path = Path(folder, "c")
        buffers = [_buffer(rows), _buffer(rows)]
        for place, buffer in enumerate(buffers):
            noise = torch.from_numpy(np.random.default_rng(place).integers(0, 256, (rows, 10_000), np.uint8))
            buffer.extend(TensorDict({"id": torch.arange(rows) + place, "noise": noise}, [rows]))
        known = {}
        for place, buffer in enumerate(buffers):
            buffer.dumps(path)
            known[_content(path)] = place
            buffer._latest_checkpoint = None
        target, took = _buffer(rows), 1.0
        for number in range(points + 3):
            there = known[_content(path)]
            after = None if number < 3 else rng.random() * 1.1 * took
            started = time.monotonic()
            how, content = forked(lambda there=there: buffers[1 - there].dumps(path), after)
            if after is None:  # it is only timed
                took = min(took, time.monotonic() - started)
                continue
            if how == "failed":
                counts.note(content.decode(), (), "a random time")
                continue
            found = known.get(_content(path))
            what = "mixed" if found is None else "old" if found == there else "new"
            counts.note(what, ("old", "new"), "a random time")
            counts[how] += 1
        target.loads(path)
        same = signature(states_of(target)) == signature(states_of(buffers[known[_content(path)]]))
        counts["wrong"] += not same
    seconds = round(time.monotonic() - begun, 1)
    return {"test": "killing at random", "megabytes": megabytes, **counts.result(), "seconds": seconds}


def _content(path: Path) -> str:
    """A digest of what can be loaded."""

    def use(source: Any) -> str:
        columns = source.tree["storage"]["content"]["rows"]["columns"].read()
        return f"{columns[0][0]} {columns[1].sum(dtype=np.int64)} {source.tree['storage']['content']['rows']['ring']}"

    return load(path, use)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=3000, help="kills; -1 for every point of every subject")
    parser.add_argument("--random", type=int, default=0, help="kills at random times instead")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a child has none of them
    if options.random:
        result = run_random(options.random, options.megabytes, options.seed)
    else:
        result = run(options.points, options.seed)
    print(json.dumps({**result, "operations": len(CHANGING)}))
    return bool(result["wrong"])


if __name__ == "__main__":
    sys.exit(main())
