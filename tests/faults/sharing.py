"""Buffers that processes share, under load and with workers that are killed: counts of what was lost, torn or stuck."""

import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from interop import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from tests.faults.counts import Counts

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
    good = len(buffer) == min(written, capacity) and buffer.writer.cursor == written % capacity
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
    counts = Counts(cases=total)
    deadline = time.monotonic() + SURE + total / 500
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
    held = buffer[:]
    counts.fail("torn rows are stored", torn(held))
    counts.fail("the counters are wrong", counters_wrong(buffer, total))
    counts.fail("rows are lost", lost(held["id"], first, each, total, capacity))
    return counts


def _extend_for_ever(buffer: Any, size: int) -> None:
    for start in itertools.count(1 << 32, size):
        buffer.extend(rows(torch.arange(start, start + size)))


def _die_in_turn(buffer: Any) -> None:
    with buffer.storage.lock.held():
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
        counts.fail("the others hang")
        return False
    counts.cases += 1
    counts.fail("torn rows are stored", torn(buffer[:]))
    counts.fail("the counters are wrong", counters_wrong(buffer))
    return True


def kills(kind: str, method: str, count: int, seed: int, *, holding: bool = False) -> Counts:
    """Workers that extend are killed at random times, or while they hold the lock: then others go on within a second."""
    chance, counts = random.Random(seed), Counts()
    buffer = made(kind, 500)
    buffer.extend(rows(torch.arange(500)))
    context = multiprocessing.get_context(method)
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
        counts.fail(f"a worker ended with {worker.exitcode}", times=worker.exitcode != -signal.SIGKILL)
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
    chance, counts = random.Random(seed), Counts()
    with tempfile.TemporaryDirectory() as folder:
        buffer = made("memmap", 300, str(Path(folder) / "held"), auto_cleanup=True)
        buffer.extend(rows(torch.arange(300)))
        files = sorted(path for path in Path(folder).rglob("*") if path.suffix == ".memmap")
        context = multiprocessing.get_context(method)
        for how in itertools.islice(itertools.cycle(("terminate", "interrupt", "exit")), count):
            ready = context.Event()
            worker = context.Process(target=_extend_and_end, args=(buffer, how, ready), daemon=True)
            worker.start()
            counts.fail("a worker hangs", times=not ready.wait(SURE))
            time.sleep(chance.random() * 3e-3)
            if how != "exit":
                assert worker.pid is not None
                number = signal.SIGTERM if how == "terminate" else signal.SIGINT
                until = time.monotonic() + SURE
                while worker.is_alive() and time.monotonic() < until:
                    os.kill(worker.pid, number)  # once more: Python drops an exception that falls into a finalizer
                    worker.join(1)
            worker.join(SURE)
            right = {"terminate": (-15,), "interrupt": (1, -2), "exit": (0,)}[how]
            counts.fail(f"after {how} a worker ended with {worker.exitcode}", times=worker.exitcode not in right)
            counts.fail("files are gone", times=sum(not path.exists() for path in files))
            if not _goes_on(buffer, counts):
                return counts
    return counts


# ------------------------------------------------------------------ at length


def _merged(parts: Iterable[Counts]) -> Counts:
    """The counts of all of them."""
    whole = Counts()
    for each in parts:
        whole.cases += each.cases
        whole.wrong += each.wrong
        whole.errors += each.errors[: 5 - len(whole.errors)]
        whole.outcomes += each.outcomes
    return whole


def races(size: int) -> Counts:
    """Every race, with so many batches of each writer."""
    cells = itertools.product(STORAGES, METHODS, (2, 4, 8), (False, True), (False, True))
    return _merged(race(*cell, size, full=full, late=late) for *cell, full, late in cells)


def all_kills(size: int) -> Counts:
    """So many kills of forked workers of each kind, and a twentieth of them where a start takes seconds."""
    cells = itertools.product(STORAGES, METHODS, (False, True))
    counts = {"fork": size, "spawn": max(1, size // 20), "forkserver": max(1, size // 20)}
    return _merged(kills(kind, method, counts[method], 0, holding=holding) for kind, method, holding in cells)


def all_endings(size: int) -> Counts:
    """So many ends of forked workers, and an eighth of them where a start takes seconds."""
    return _merged(endings(method, size if method == "fork" else max(3, size // 8), 0) for method in METHODS)
