"""Buffers that processes share, under load and with workers that are killed: counts of what was lost, torn or stuck.

`python -m tests.faults.sharing --cells all --batches 10000` runs every combination; see `--help`.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from interop import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

STORAGES = {"tensor": LazyTensorStorage, "memmap": LazyMemmapStorage}
METHODS = ("fork", "spawn", "forkserver")
SURE = 60.0  # seconds after which something hangs


def rows(ids: torch.Tensor) -> TensorDict:
    """Rows of which every leaf tells the id."""
    return TensorDict(
        {
            "id": ids,
            "obs": ids[:, None].expand(-1, 16).to(torch.float64),
            "next": TensorDict({"pixels": (ids % 251).to(torch.uint8)[:, None].expand(-1, 96)}, [len(ids)]),
        },
        [len(ids)],
    )


def torn(batch: TensorDict) -> int:
    """How many rows have leaves of different ids."""
    whole = rows(batch["id"])
    good = (batch["obs"] == whole["obs"]).all(-1) & (batch["next", "pixels"] == whole["next", "pixels"]).all(-1)
    return int((~good).sum())


@dataclasses.dataclass
class Counts:
    """What went wrong: nothing, where all are 0. `reads` and `tried` say how much was."""

    lost: int = 0
    torn: int = 0
    wrong: int = 0  # length, cursor or write count
    hung: int = 0
    failed: int = 0  # workers
    reads: int = 0
    tried: int = 0  # rows that were written, or workers that ended

    def __add__(self, other: "Counts") -> "Counts":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Counts(*(mine + its for mine, its in pairs))

    @property
    def bad(self) -> int:
        return self.lost + self.torn + self.wrong + self.hung + self.failed


def write(buffer: Any, first: int, batches: int, size: int, reads: bool = False) -> None:
    """What a worker does: its ids in order."""
    for batch in range(batches):
        buffer.extend(rows(torch.arange(first + batch * size, first + (batch + 1) * size)))
        if reads and batch % 4 == 0:
            assert torn(buffer.sample(64)) == 0


def made(kind: str, capacity: int, folder: str | None = None, **options: Any) -> TensorDictReplayBuffer:
    where = {"scratch_dir": folder} if folder is not None else {}
    return TensorDictReplayBuffer(storage=STORAGES[kind](capacity, **where, **options), batch_size=64, shared=True)


def counters_wrong(buffer: Any, count: int | None = None) -> int:
    """Whether length, cursor and write count contradict each other, or what was written."""
    written, capacity = buffer.write_count, buffer.storage.max_size
    good = len(buffer) == min(written, capacity) and buffer.writer._cursor == written % capacity
    return int(not (good and count in (None, written)))


def lost(ids: torch.Tensor, first: list[int], each: int, total: int, capacity: int) -> int:
    """Of all that writers wrote in order, how many of the last rows are not there: each has its own last ones."""
    stored = ids.sort().values
    missing = min(total, capacity) - stored.unique().numel()
    for start in first:
        its = stored[(stored >= start) & (stored < start + each)]
        if len(its):
            missing += start + each - int(its[0]) - len(its)
    return missing


def race(
    kind: str, method: str, processes: int, batches: int, size: int = 4, *, full: bool = False, late: bool = False
) -> Counts:
    """Processes extend one buffer, and read it, while this one samples. `full`: less room than rows; `late`: nobody has
    written when they start."""
    each = batches * size
    total = processes * each + (0 if late else size)
    capacity = total // 3 + 1 if full else total + 5
    buffer = made(kind, capacity, **({"shared_init": True} if late else {}))
    first = [(place + 1) * each for place in range(processes)]
    if not late:
        buffer.extend(rows(torch.arange(size)))
    context = multiprocessing.get_context(method)
    workers = [
        context.Process(target=write, args=(buffer, start, batches, size, place == 0), daemon=True)
        for place, start in enumerate(first)
    ]
    for worker in workers:
        worker.start()
    counts = Counts(tried=total)
    deadline = time.monotonic() + SURE + total / 500
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        if len(buffer):
            counts.torn += torn(buffer.sample())
            counts.torn += torn(buffer[-8:].clone()) if len(buffer) >= 8 and not full else 0
            counts.reads += 1
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        counts.hung += worker.is_alive()
        counts.failed += worker.exitcode not in (0, None)
        worker.kill()
    held = buffer[:]
    counts.torn += torn(held)
    counts.wrong += counters_wrong(buffer, total)
    counts.lost += lost(held["id"], first, each, total, capacity)
    return counts


def _extend_for_ever(buffer: Any, size: int) -> None:
    for start in itertools.count(1 << 32, size):
        buffer.extend(rows(torch.arange(start, start + size)))


def _die_in_turn(buffer: Any) -> None:
    with buffer.storage.lock.turn():
        os.kill(os.getpid(), signal.SIGKILL)


def _within(call: Any, seconds: float) -> bool:
    """Whether a call comes back in time."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _goes_on(buffer: Any, counts: Counts) -> bool:
    """Whether the buffer can be written to within a second; what is wrong with it then is counted."""
    if not _within(lambda: buffer.extend(rows(torch.arange(3))), 1.0):
        counts.hung += 1
        return False
    counts.tried += 1
    counts.torn += torn(buffer[:])
    counts.wrong += counters_wrong(buffer)
    return True


def kills(kind: str, method: str, count: int, seed: int, *, holding: bool = False) -> Counts:
    """Workers that extend are killed at random times, or while they hold the lock: then others go on within a second."""
    chance = random.Random(seed)
    buffer = made(kind, 500)
    buffer.extend(rows(torch.arange(500)))
    context = multiprocessing.get_context(method)
    counts = Counts()
    for _ in range(count):
        arguments = (buffer,) if holding else (buffer, 48)
        worker = context.Process(target=_die_in_turn if holding else _extend_for_ever, args=arguments, daemon=True)
        before = buffer.write_count
        worker.start()
        if not holding:
            until = time.monotonic() + SURE
            while buffer.write_count == before and time.monotonic() < until and worker.is_alive():
                time.sleep(1e-4)
            time.sleep(chance.random() * 3e-3)
            worker.kill()
        worker.join()
        counts.failed += worker.exitcode != -signal.SIGKILL
        if not _goes_on(buffer, counts):
            return counts
    return counts


def _extend_and_end(buffer: Any, how: str, ready: Any) -> None:
    if how == "interrupt":  # as a terminal sends it, also while the worker writes
        signal.signal(signal.SIGINT, signal.default_int_handler)
    start = itertools.count(1 << 32, 8)
    buffer.extend(rows(torch.arange(next(start), 8 + (1 << 32))))
    ready.set()
    if how == "exit":
        raise SystemExit(0)
    while True:
        first = next(start)
        buffer.extend(rows(torch.arange(first, first + 8)))


def endings(method: str, count: int, seed: int) -> Counts:
    """Workers end by SIGTERM, SIGINT or by themselves: the owner's files and the lock stay."""
    chance = random.Random(seed)
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        buffer = made("memmap", 300, str(Path(folder) / "held"), auto_cleanup=True)
        buffer.extend(rows(torch.arange(300)))
        files = sorted(path for path in Path(folder).rglob("*") if path.suffix == ".memmap")
        context = multiprocessing.get_context(method)
        for how in itertools.islice(itertools.cycle(("terminate", "interrupt", "exit")), count):
            ready = context.Event()
            worker = context.Process(target=_extend_and_end, args=(buffer, how, ready), daemon=True)
            worker.start()
            counts.hung += not ready.wait(SURE)
            time.sleep(chance.random() * 3e-3)
            if how != "exit":
                assert worker.pid is not None
                number = signal.SIGTERM if how == "terminate" else signal.SIGINT
                until = time.monotonic() + SURE
                while worker.is_alive() and time.monotonic() < until:
                    os.kill(worker.pid, number)  # once more: Python drops an exception that falls into a finalizer
                    worker.join(1)
            worker.join(SURE)
            counts.failed += worker.exitcode not in {"terminate": (-15,), "interrupt": (1, -2), "exit": (0,)}[how]
            counts.lost += sum(not path.exists() for path in files)
            if not _goes_on(buffer, counts):
                return counts
    return counts


CELLS = ("race", "kills", "endings")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default="all", help=f"all, or some of {', '.join(CELLS)}, with commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="how processes start")
    parser.add_argument("--processes", default="2,4,8", help="writers of a race")
    parser.add_argument("--batches", type=int, default=10000, help="of each writer")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = CELLS if options.cells == "all" else options.cells.split(",")
    whole = Counts()

    def told(name: str, counts: Counts) -> None:
        nonlocal whole
        whole += counts
        print(f"{name:44s} {counts}", flush=True)

    for method in options.methods.split(","):
        if "race" in chosen:
            for kind, processes, full, late in itertools.product(
                STORAGES, map(int, options.processes.split(",")), (False, True), (False, True)
            ):
                name = f"race {kind} {method} x{processes}{' full' if full else ''}{' unwritten' if late else ''}"
                told(name, race(kind, method, processes, options.batches, full=full, late=late))
        if "kills" in chosen:
            count = options.kills if method == "fork" else max(1, options.kills // 20)  # seconds to start one
            for kind, holding in itertools.product(STORAGES, (False, True)):
                name = f"kills {kind} {method}{' holding' if holding else ''}"
                told(name, kills(kind, method, count, options.seed, holding=holding))
        if "endings" in chosen:
            told(f"endings {method}", endings(method, 48 if method == "fork" else 6, options.seed))
    print("all", whole)
    return int(whole.bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
