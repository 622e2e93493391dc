"""Checkpoints of a million transitions with priorities: how long do `dumps` and `loads` take, and what does the next cost?

    python benchmarks/checkpoints.py [--folder DIR] [--quick] [--json FILE]

The rival is torchrl's `dumps` and `loads` of the same rows, in the same process and taking turns. Its priority trees do not
load beside every torch, so its buffer draws uniformly, and two files of float64 priorities are written and read beside it:
as copies of tensors that are ready, where its own dump and load go from Python to each priority of each tree. Ours is on
the disk when `dumps` returns, torchrl's in the page cache; "torchrl, flushed" is the same with an fsync of each of its
files. Every load is into a buffer that has no memory yet. Bytes are what the process handed to the file system.
"""

import gc
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import measure
import torch
from tensordict import MemoryMappedTensor, TensorDict
from torch_rows import fill, transitions

import interop

FRACTION = 100  # one row in so many is written between two dumps
MIB = 1 << 20


class Ours:
    """A prioritized buffer."""

    flushed = True

    def __init__(self, capacity: int) -> None:
        self.buffer = interop.TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=interop.LazyTensorStorage(capacity), batch_size=256
        )

    def prioritize(self, priorities: torch.Tensor) -> None:
        self.buffer.update_priority(torch.arange(priorities.numel()), priorities)

    def dump(self, folder: pathlib.Path) -> None:
        self.buffer.dumps(folder)

    def load(self, folder: pathlib.Path) -> None:
        self.buffer.loads(folder)


class Torchrl:
    """A uniform buffer, and the files of two trees."""

    flushed = False

    def __init__(self, capacity: int) -> None:
        data = measure.rival("torchrl.data")
        assert data is not None
        self.buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(capacity), batch_size=256)
        self.trees = [torch.empty(0, dtype=torch.float64)] * 2

    def prioritize(self, priorities: torch.Tensor) -> None:
        self.trees = [priorities.double(), priorities.double()]

    def dump(self, folder: pathlib.Path) -> None:
        self.buffer.dumps(folder)
        (folder / "sampler").mkdir(exist_ok=True)
        for file, tree in zip(_tree_files(folder), self.trees, strict=True):
            MemoryMappedTensor.from_tensor(tree, filename=str(file), existsok=True)
        if self.flushed:
            for each in folder.rglob("*"):
                _flush(each)

    def load(self, folder: pathlib.Path) -> None:
        self.buffer.loads(folder)
        shape = torch.Size([self.buffer._storage.max_size])
        self.trees = [
            MemoryMappedTensor.from_filename(file, torch.float64, shape).clone() for file in _tree_files(folder)
        ]


class FlushedTorchrl(Torchrl):
    flushed = True


def _tree_files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [folder / "sampler" / f"{name}.memmap" for name in ("sumtree", "mintree")]


def _flush(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def written() -> float:
    """Bytes that this process has handed to the file system so far; NaN where that is not known."""
    try:
        lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return float("nan")
    return float(dict(line.split(": ") for line in lines)["write_bytes"])


class Table:
    """What was taken, by work and contender."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, list[float]]] = {}
        self.mib: dict[str, float] = {}

    def take(self, work: str, name: str, call: Callable[[], Any]) -> None:
        gc.collect()
        os.sync()  # what the one before left to be written is not for this one to wait for
        before, start = written(), time.perf_counter()
        call()
        self.seconds.setdefault(work, {}).setdefault(name, []).append(time.perf_counter() - start)
        if work.startswith("dumps"):
            self.mib[f"{work}: MiB written by {name}"] = (written() - before) / MIB

    def add(self, work: str, name: str, parts: tuple[str, ...]) -> None:
        """What was taken last for several works together."""
        whole = sum(self.seconds[part][name][-1] for part in parts)
        self.seconds.setdefault(work, {}).setdefault(name, []).append(whole)

    def timings(self) -> list[measure.Timing]:
        return [measure.of_rounds(work, taken) for work, taken in self.seconds.items()]


def others(rows: TensorDict, turn: int) -> TensorDict:
    """Rows that differ from these, and from those of other turns, in every leaf."""
    return rows.apply(lambda leaf: ~leaf if leaf.dtype == torch.bool else leaf + turn + 1)


def main() -> int:
    parser = measure.arguments("Checkpoints of six-leaf rows with priorities: dumps, loads, and the next dump")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="on the disk to be measured; default: out/ of the repository"
    )
    options = parser.parse_args()
    capacity, rounds = (50_000, 2) if options.quick else (1_000_000, 7)
    kinds: dict[str, Any] = {measure.OURS: Ours}
    if measure.rival("torchrl.data"):
        kinds |= {"torchrl": Torchrl, "torchrl, flushed": FlushedTorchrl}
    rows, priorities = transitions(capacity // FRACTION), torch.rand(capacity) + 0.1
    sides = {name: kind(capacity) for name, kind in kinds.items()}
    for side in sides.values():
        fill(side.buffer, rows, capacity)
        side.prioritize(priorities)
    above = options.folder or measure.ROOT / "out"
    above.mkdir(parents=True, exist_ok=True)
    table = Table()
    with tempfile.TemporaryDirectory(dir=above) as scratch:
        for turn in range(rounds):
            for name in list(kinds) if turn % 2 else list(kinds)[::-1]:
                side, folder = sides[name], pathlib.Path(scratch) / f"{turn}-{list(kinds).index(name)}"
                fresh = kinds[name](capacity)
                table.take("dumps", name, lambda side=side, folder=folder: side.dump(folder))
                table.take("loads", name, lambda fresh=fresh, folder=folder: fresh.load(folder))
                table.add("dumps + loads", name, ("dumps", "loads"))
                assert len(fresh.buffer) == capacity
                del fresh
                side.buffer.extend(others(rows, turn))
                again = f"dumps again, 1 in {FRACTION} rows new"
                table.take(again, name, lambda side=side, folder=folder: side.dump(folder))
                shutil.rmtree(folder)
    title = f"Checkpoints of {capacity} rows of six leaves with priorities"
    measure.report(title, table.timings(), table.mib, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
