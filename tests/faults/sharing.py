"""Buffers that processes share, under load and with workers that are killed: counts of lost, torn and stuck rows."""

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
from tests.faults.counts import Counts

STORAGES = {"tensor": LazyTensorStorage, "memmap": LazyMemmapStorage}
METHODS = ("fork", "spawn", "forkserver")
SURE = 180.0  # seconds after which something hangs: a start may take a minute on a busy machine


def rows(ids: torch.Tensor) -> TensorDict:
    """Rows in which every leaf follows from the id."""
    obs, pixels = ids[:, None].expand(-1, 16).to(torch.float64), (ids % 251).to(torch.uint8)[:, None].expand(-1, 96)
    return TensorDict({"id": ids, "obs": obs, "next": TensorDict({"pixels": pixels}, [len(ids)])}, [len(ids)])


def torn(batch: TensorDict) -> int:
    """How many rows have leaves of different ids."""
    whole = rows(batch["id"])
    good = (batch["obs"] == whole["obs"]).all(-1) & (batch["next", "pixels"] == whole["next", "pixels"]).all(-1)
    return int((~good).sum())


def made(kind: str, capacity: int, folder: str | None = None, **options: Any) -> TensorDictReplayBuffer:
    where = {"scratch_dir": folder} if folder is not None else {}
    return TensorDictReplayBuffer(storage=STORAGES[kind](capacity, **where, **options), batch_size=64, shared=True)


def counters_wrong(buffer: Any, count: int | None = None) -> int:
    """Whether length, cursor and write count contradict each other, or the count of written rows."""
    written, capacity = buffer.write_count, buffer.storage.max_size
    good = len(buffer) == min(written, capacity) and buffer.writer.cursor == written % capacity
    return int(not (good and count in (None, written)))


# ------------------------------------------------------------------ C1


def write(buffer: Any, first: int, batches: int, size: int, reads: bool = False) -> None:
    """A worker writes its ids in order."""
    for batch in range(batches):
        buffer.extend(rows(torch.arange(first + batch * size, first + (batch + 1) * size)))
        if reads and batch % 4 == 0:
            assert torn(buffer.sample(64)) == 0


def lost(ids: torch.Tensor, first: list[int], each: int, total: int, capacity: int) -> int:
    """How many of the last rows are missing; of each writer, its own last rows must be there."""
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
    """Processes extend and read one buffer while this one samples.

    `full`: there is less room than rows. `late`: the workers start before the first write.
    """
    each = batches * size
    total = processes * each + (0 if late else size)
    capacity = total // 3 + 1 if full else total + 5
    buffer = made(kind, capacity, **({"shared_init": True} if late else {}))
    if not late:
        buffer.extend(rows(torch.arange(size)))
    first = [(place + 1) * each for place in range(processes)]
    context = multiprocessing.get_context(method)
    workers = [
        context.Process(target=write, args=(buffer, start, batches, size, start == each), daemon=True)
        for start in first
    ]
    for worker in workers:
        worker.start()
    counts, deadline = Counts(cases=total), time.monotonic() + SURE + total / 500
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        if len(buffer):
            counts.fail("torn rows were drawn", torn(buffer.sample()))
            if len(buffer) >= 8 and not full:
                counts.fail("torn rows were read", torn(buffer[-8:].clone()))
            counts.outcomes["reads"] += 1
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        counts.fail(f"a worker ended with {worker.exitcode}", times=worker.exitcode != 0)
        worker.kill()
    counts.fail("torn rows are stored", torn(buffer[:]))
    counts.fail("the counters are wrong", counters_wrong(buffer, total))
    counts.fail("rows are lost", lost(buffer[:]["id"], first, each, total, capacity))
    return counts


def races(size: int) -> Counts:
    """Every race, with so many batches of each writer."""
    cells = itertools.product(STORAGES, METHODS, (2, 4, 8), (False, True), (False, True))
    return Counts.of(race(*cell, size, full=full, late=late) for *cell, full, late in cells)


# ------------------------------------------------------------------ C2 and C5


def _extend(buffer: Any, ready: Any) -> None:
    """Extend for ever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a terminal sends it, also while the worker writes
    for start in itertools.count(1 << 32, 8):
        buffer.extend(rows(torch.arange(start, start + 8)))
        if start == 1 << 32:
            ready.set()


def _extend_once(buffer: Any, ready: Any) -> None:
    buffer.extend(rows(torch.arange(8)))
    ready.set()


def _die_with_the_lock(buffer: Any, ready: Any) -> None:
    with buffer.storage.lock.held():
        os.kill(os.getpid(), signal.SIGKILL)


def _ended(buffer: Any, method: str, do: Any, number: int | None, after: float, counts: Counts) -> int | None:
    """The exit code of a worker that gets a signal some time after its first write."""
    context = multiprocessing.get_context(method)
    ready = context.Event()
    worker = context.Process(target=do, args=(buffer, ready), daemon=True)
    worker.start()
    if number is not None:
        counts.fail("a worker hangs", times=not ready.wait(SURE))
        time.sleep(after)
        until = time.monotonic() + SURE
        while worker.is_alive() and time.monotonic() < until:
            assert worker.pid is not None
            os.kill(worker.pid, number)  # again: Python drops an exception that falls into a finalizer
            worker.join(1)
    worker.join(SURE)
    return worker.exitcode


def _goes_on(buffer: Any, counts: Counts) -> bool:
    """Whether the buffer can be written to within a second. Counts wrong rows and counters."""
    thread = threading.Thread(target=lambda: buffer.extend(rows(torch.arange(3))), daemon=True)
    thread.start()
    thread.join(1.0)
    if thread.is_alive():
        counts.fail("the others hang")
        return False
    counts.cases += 1
    counts.fail("torn rows are stored", torn(buffer[:]))
    counts.fail("the counters are wrong", counters_wrong(buffer))
    return True


def kills(kind: str, method: str, count: int, seed: int, *, holding: bool = False) -> Counts:
    """Workers that extend are killed at random times, or while they hold the lock: others go on within a second."""
    chance, counts = random.Random(seed), Counts()
    buffer = made(kind, 500)
    buffer.extend(rows(torch.arange(500)))
    how = (_die_with_the_lock, None) if holding else (_extend, signal.SIGKILL)
    for _ in range(count):
        code = _ended(buffer, method, *how, chance.random() * 3e-3, counts)
        counts.fail(f"a worker ended with {code}", times=code != -signal.SIGKILL)
        if not _goes_on(buffer, counts):
            break
    return counts


def endings(method: str, count: int, seed: int) -> Counts:
    """Workers end by SIGTERM, SIGINT or by themselves: the owner's files and the lock stay."""
    chance, counts = random.Random(seed), Counts()
    ends = ((_extend, signal.SIGTERM, (-15,)), (_extend, signal.SIGINT, (1, -2)), (_extend_once, None, (0,)))
    with tempfile.TemporaryDirectory() as folder:
        buffer = made("memmap", 300, str(Path(folder) / "held"), auto_cleanup=True)
        buffer.extend(rows(torch.arange(300)))
        files = sorted(Path(folder).rglob("*.memmap"))
        for do, number, right in itertools.islice(itertools.cycle(ends), count):
            code = _ended(buffer, method, do, number, chance.random() * 3e-3, counts)
            counts.fail(f"after {number} a worker ended with {code}", times=code not in right)
            counts.fail("files are gone", times=sum(not path.exists() for path in files))
            if not _goes_on(buffer, counts):
                break
    return counts


def all_kills(size: int) -> Counts:
    """So many kills of forked workers of each kind, and a twentieth of them where a start takes seconds."""
    cells = itertools.product(STORAGES, METHODS, (False, True))
    counts = {"fork": size, "spawn": max(1, size // 20), "forkserver": max(1, size // 20)}
    return Counts.of(kills(kind, method, counts[method], 0, holding=holding) for kind, method, holding in cells)


def all_endings(size: int) -> Counts:
    """So many ends of forked workers, and an eighth of them where a start takes seconds."""
    return Counts.of(endings(method, size if method == "fork" else max(3, size // 8), 0) for method in METHODS)
