"""Threads that write, draw, set priorities, save and empty one buffer, at random and all at once.

Each row tells in every leaf which one it is, and each write is of one whole block of rows, so that a checkpoint of two
moments is seen: it would hold a part of a block, or a cursor that does not go with its rows.
"""

import faulthandler
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
    """What is wrong with what is stored, if it should be of one moment."""
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
    """Threads that each do one thing over and over, until they are told to stop."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.errors: list[str] = []
        self.done: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, do: Callable[[], bool | None]) -> None:
        """Another thread; it was not done where `do` returns False."""

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
        """Stop; what went wrong."""
        self.stop.set()
        until = time.monotonic() + SURE
        for each in self._threads:
            each.join(max(0.1, until - time.monotonic()))
        stuck = [each.name for each in self._threads if each.is_alive()]
        if stuck:
            faulthandler.dump_traceback(all_threads=True)
        return self.errors + [f"{name} hangs" for name in stuck]


def crowd(buffer: Any, folder: Path, empties: bool) -> tuple[Crowd, Callable[[], None]]:
    """Threads that write, draw and set priorities; and what saves."""
    every, number = Crowd(), iter(range(1, 1_000_000_000))
    turn = threading.Lock()  # blocks are in the order of their numbers

    def extend() -> None:
        with turn:
            buffer.extend(block(next(number)))

    def sample() -> bool:
        if not len(buffer):
            time.sleep(0.001)
            return False
        try:
            batch = buffer.sample()
        except RuntimeError:  # it was emptied meanwhile
            return False
        if torn(batch):
            raise AssertionError(f"{torn(batch)} torn rows were drawn")
        if isinstance(buffer.sampler, PrioritizedSampler):
            batch["td_error"] = torch.rand(len(batch)) + 0.1
            try:
                buffer.update_tensordict_priority(batch)
            except (IndexError, RuntimeError):  # of rows that are there no more
                if not empties:
                    raise
        return True

    def save() -> None:
        buffer.dumps(folder / "c")

    def empty() -> None:
        time.sleep(0.05)
        with turn:
            buffer.empty()

    for place in range(2):
        every.start(f"extend {place}", extend)
        every.start(f"sample {place}", sample)
    if empties:
        every.start("empty", empty)
    return every, save


def everything(seconds: float) -> Counts:
    """Each mix for a part of the time, with a thread that empties and without."""
    counts = Counts()
    for mix in MIXES:
        for empties in (False, True):
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
    """So many checkpoints of each mix while others write, each of which must be of one moment."""
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
        self.calls, self._fails_at, self._slow = 0, fails_at, slow
        self._lock = threading.Lock()

    def __call__(self, items: Any) -> Any:
        with self._lock:
            self.calls += 1
            failing = self.calls == self._fails_at
        time.sleep(self._slow)
        if failing:
            raise ZeroDivisionError("as was asked for")
        return items


def prefetching(seed: int, folder: Path) -> str:
    """One run with a queue that is full, slow or fails; what is wrong."""
    rng = random.Random(seed)
    fails_at = rng.choice([None, rng.randint(1, 12)])
    trouble = Trouble(fails_at, rng.choice([0, 0, 0.003]))
    mix = rng.choice(["tensor, uniform", "tensor, epochs", "memmap, prioritized"])
    buffer = buffer_of(mix, prefetch=rng.choice([1, 3]), collate_fn=trouble)
    buffer.extend(block(0)), buffer.extend(block(1))
    errors, low, first = 0, 0, 2
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
        elif what == "dumps":
            buffer.dumps(folder / "c")
            other = buffer_of(mix)
            other.loads(folder / "c")
            if found := moment(other):
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
    buffer.dumps(folder / "c")
    other = buffer_of(mix)
    other.loads(folder / "c")
    if errors > (fails_at is not None):
        return f"one error was raised {errors} times"
    held = [signature(each.storage[:]) for each in (buffer, other)]
    return "" if held[0] == held[1] else "something else was saved"


def prefetches(size: int, seed: int = 0) -> Counts:
    """So many runs of `prefetching`."""
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
