"""Threads that write, draw, set priorities, save and empty one buffer at once (C3, C4), and prefetch queues (P1).

Every leaf of a row has its number, and each write is of one whole block of rows. So a checkpoint of two moments is
found: it has a part of a block, or a cursor that does not fit its rows.
"""

import faulthandler
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from fbuf import CheckpointError
from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.faults.children import scratch
from tests.faults.counts import Counts
from tests.faults.sharing import rows, torn
from tests.faults.signatures import signature

CAPACITY, BLOCK, BATCH = 60, 4, 8
SURE = 120.0  # seconds after which something hangs
MIXES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "tensor, uniform": (lambda: LazyTensorStorage(CAPACITY), RandomSampler),
    "tensor, prioritized": (lambda: LazyTensorStorage(CAPACITY), lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5)),
    "memmap, prioritized": (lambda: LazyMemmapStorage(CAPACITY), lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5)),
    "tensor, epochs": (lambda: LazyTensorStorage(CAPACITY), SamplerWithoutReplacement),
    "list, uniform": (lambda: ListStorage(CAPACITY), RandomSampler),
}


def block(number: int) -> TensorDict:
    """The rows of the write of that number."""
    return rows(torch.arange(BLOCK * number, BLOCK * (number + 1)))


def buffer_of(mix: str, **options: Any) -> Any:
    """An empty buffer."""
    storage, sampler = MIXES[mix]
    return TensorDictReplayBuffer(
        storage=storage(),
        sampler=sampler(),
        batch_size=BATCH,
        priority_key="td_error",
        generator=torch.Generator("cpu").manual_seed(0),
        **options,
    )


def moment(buffer: Any) -> str:
    """An error in rows and counters that should be of one moment, or nothing."""
    length, count, cursor = len(buffer), buffer.write_count, buffer.writer.cursor
    if not length:
        return "" if not cursor else f"empty, with the cursor at {cursor}"
    held = buffer.storage[:] if not isinstance(buffer.storage, ListStorage) else torch.stack(list(buffer.storage))
    if torn(held):
        return f"{torn(held)} torn rows"
    ids = held["id"].roll(-cursor) if length == CAPACITY else held["id"]
    if not torch.equal(ids, torch.arange(length) + ids[0]) or ids[0] % BLOCK or length % BLOCK:
        return f"rows {ids.tolist()}, with the cursor at {cursor}"
    if cursor != length % CAPACITY and length != CAPACITY:
        return f"{length} rows, with the cursor at {cursor}"
    if count % BLOCK:
        return f"{count} rows were written"
    return ""


class Crowd:
    """Threads that each do one thing over and over, until the end or an error."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.errors: list[str] = []
        self.done: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, do: Callable[[], bool | None]) -> None:
        """Start a thread. `do` returns False where it did nothing."""

        def run() -> None:
            try:
                while not self.stop.is_set():
                    self.done[name] = self.done.get(name, 0) + (do() is not False)
            except Exception as error:
                self.errors.append(f"{name}: {type(error).__name__}: {error}")
                self.stop.set()

        self._threads.append(threading.Thread(target=run, daemon=True, name=name))
        self._threads[-1].start()

    def end(self) -> list[str]:
        """Stop. Returns the errors."""
        self.stop.set()
        until = time.monotonic() + SURE
        for each in self._threads:
            each.join(max(0.1, until - time.monotonic()))
        stuck = [f"{each.name} hangs" for each in self._threads if each.is_alive()]
        if stuck:
            faulthandler.dump_traceback(all_threads=True)
        return self.errors + stuck


def crowd(buffer: Any, folder: Path, empties: bool) -> tuple[Crowd, Callable[[], None]]:
    """Threads that write, draw, set priorities and empty; and the function that saves."""
    every, number = Crowd(), itertools.count(1)
    order = threading.Lock()  # of the blocks

    def extend() -> None:
        with order:
            buffer.extend(block(next(number)))

    def sample() -> bool:
        try:
            batch = buffer.sample()
        except RuntimeError:  # it was just emptied
            return False
        if torn(batch):
            raise AssertionError(f"{torn(batch)} torn rows were drawn")
        if isinstance(buffer.sampler, PrioritizedSampler):
            batch["td_error"] = torch.rand(len(batch)) + 0.1
            try:
                buffer.update_tensordict_priority(batch)
            except (IndexError, RuntimeError):  # of rows that were emptied
                if not empties:
                    raise
        return True

    def empty() -> None:
        time.sleep(0.05)
        with order:
            buffer.empty()

    for place in range(2):
        every.start(f"extend {place}", extend)
        every.start(f"sample {place}", sample)
    if empties:
        every.start("empty", empty)
    return every, lambda: buffer.dumps(folder / "c")


def everything(seconds: float) -> Counts:
    """C3: each mix for a part of the time, with a thread that empties and without."""
    counts = Counts()
    for mix, empties in itertools.product(MIXES, (False, True)):
        with scratch("threads") as folder:
            buffer, other = buffer_of(mix), buffer_of(mix)
            buffer.extend(block(0))
            every, save = crowd(buffer, Path(folder), empties)
            every.start("dumps", save)
            every.stop.wait(seconds / len(MIXES) / 2)
            wrong = "; ".join(every.end())
            if not wrong:
                other.loads(Path(folder, "c"))
                wrong = moment(other)
            counts.note(wrong or "well", ("well",), f"{mix}, {'with' if empties else 'without'} empty()")
            for name, count in every.done.items():
                counts.outcomes[name.split()[0]] += count
    return counts


def checkpoints(size: int, mixes: Iterable[str] = tuple(MIXES)) -> Counts:
    """C4: so many checkpoints of each mix while others write, each of which must be of one moment."""
    counts = Counts()
    for mix in mixes:
        with scratch("threads") as folder:
            buffer, target = buffer_of(mix), buffer_of(mix)
            buffer.extend(block(0))
            every, save = crowd(buffer, Path(folder), empties=False)
            for _ in range(size):
                if every.stop.is_set():
                    break
                save()
                try:
                    target.loads(Path(folder, "c"))
                    found = moment(target) or "of one moment"
                except CheckpointError as error:
                    found = f"{type(error).__name__}: {error}"
                counts.note(found, ("of one moment",), mix)
            for each in every.end():
                counts.fail(f"{mix}: {each}")
    return counts


# ------------------------------------------------------------------ batches drawn ahead


class Trouble:
    """A collate function that is slow, or raises at the n-th call."""

    def __init__(self, fails_at: int | None, slow: float) -> None:
        self._calls, self._fails_at, self._slow = itertools.count(1), fails_at, slow

    def __call__(self, items: Any) -> Any:
        call = next(self._calls)  # in one step, whatever the thread
        time.sleep(self._slow)
        if call == self._fails_at:
            raise ZeroDivisionError("as was asked for")
        return items


def prefetching(seed: int, folder: Path) -> str:
    """One run with a queue that is full, slow or fails. Returns an error or nothing."""
    rng = random.Random(seed)
    fails_at = rng.choice([None, rng.randint(1, 12)])
    mix = rng.choice(["tensor, uniform", "tensor, epochs", "memmap, prioritized"])
    trouble = Trouble(fails_at, rng.choice([0, 0, 0.003]))
    buffer = buffer_of(mix, prefetch=rng.choice([1, 3]), collate_fn=trouble)
    buffer.extend(block(0)), buffer.extend(block(1))
    errors, low, first = 0, 0, 2  # low: the oldest id; first: the next block

    def saved() -> Any:
        buffer.dumps(folder / "c")
        other = buffer_of(mix)
        other.loads(folder / "c")
        return other

    for _ in range(10):
        what = rng.choice(["sample", "sample", "sample", "dumps", "empty", "loads", "extend"])
        if what == "sample":
            try:
                batch = buffer.sample()
            except ZeroDivisionError:
                errors += 1
                continue
            if torn(batch):
                return f"{torn(batch)} torn rows"
            if int(batch["id"].min()) < low:
                return f"a stale batch {batch['id'].tolist()}, when all below {low} is gone"
        elif what == "dumps" and (found := moment(saved())):
            return found
        elif what == "loads" and (folder / "c").exists():
            buffer.loads(folder / "c")
            ids = buffer.storage[:]["id"]
            low, first = int(ids.min()), int(ids.max()) // BLOCK + 1
        elif what == "extend":
            buffer.extend(block(first))
            first += 1
        elif what == "empty":
            buffer.empty()
            low = BLOCK * first
            buffer.extend(block(first)), buffer.extend(block(first + 1))
            first += 2
    if errors > (fails_at is not None):
        return f"one error was raised {errors} times"
    return "" if signature(saved().storage[:]) == signature(buffer.storage[:]) else "something else was saved"


def prefetches(size: int, seed: int = 0) -> Counts:
    """P1: so many runs of `prefetching`."""
    counts = Counts()
    for number in range(seed, seed + size):
        with scratch("prefetch") as folder:
            every, told = Crowd(), list[str]()

            def once(every: Crowd = every, told: list[str] = told, number: int = number, folder: str = folder) -> None:
                told.append(prefetching(number, Path(folder)) or "well")
                every.stop.set()

            every.start("prefetch", once)
            every.stop.wait(SURE)
            counts.note("; ".join([*every.end(), *told]), ("well",), f"seed {number}")
    return counts
