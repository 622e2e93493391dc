"""Kills a process that writes to a memory-mapped storage, and opens the storage again (K5).

A child runs a program of writes and acknowledges each in a file. It is killed by SIGKILL at a random time, or before a line
of the library: any line, and lines that guard writes more often. Some storages are opened by another child that is killed
then. All acknowledged rows must be there and none torn; length, cursor, count and priorities are those of the last
acknowledged call or of the call under way.
"""

import os
import random
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from interop import LazyMemmapStorage, RandomSampler, ReplayBuffer, RoundRobinWriter
from interop.data import packed
from interop.engine.kept_priorities import KeptPriorities
from interop.samplers.item_values import ItemValues
from interop.samplers.validation import flat_slots
from interop.shared import journal
from tests.faults.children import forked, one_thread, scratch
from tests.faults.counts import Counts
from tests.faults.writes import CAPACITY, Call, State, each_text, leaves, program, rows, run

STARTS = ("new", "half full", "wrapped")
_GUARDS = ("packed.py", "journal.py", "priorities.py", "writes.py", "rows.py")
_HERE = str(Path(__file__).resolve().parents[2] / "interop") + os.sep


# ------------------------------------------------------------------ the child


class NotedValues(ItemValues):
    """The items that are there have priorities."""

    are_priorities = True
    marks_new_items = True


class Noted(RandomSampler):
    """Keeps priorities as a prioritized sampler does, without entering JAX, which a forked child could not."""

    _library_values = NotedValues()
    highest, bound = 1.0, None

    def _keep(self, storage):
        kept = storage.contents.keep(KeptPriorities)
        if kept is not None and kept is not self.bound:
            self.bound = kept
            kept.bind(self)
            self.highest = kept.read(len(storage)).highest
            self._top(kept)
        return kept

    def _top(self, kept):
        kept.give(self, np.zeros(0, np.int64), 0.0, self.highest)

    def mark_update(self, index, *, storage=None):
        self._keep(storage).begin(self, flat_slots(index, storage)[0], self.highest)

    def update_priority(self, index, priority, *, storage=None):
        values = priority.numpy()
        kept = self._keep(storage)
        self.highest = max(self.highest, values.max())
        kept.give(self, flat_slots(index, storage)[0], values, self.highest)

    def _empty(self):
        self.highest = 1.0


def started(folder, lanes):
    """A buffer on what is there, or on new files."""
    try:
        storage = LazyMemmapStorage.open(folder)
    except FileNotFoundError:
        storage = LazyMemmapStorage(CAPACITY, scratch_dir=folder, ndim=1 if lanes == 1 else 2)
    buffer = ReplayBuffer(storage=storage, sampler=Noted())
    if storage.initialized:
        buffer.sampler._keep(storage)
    return buffer


def killed_at_line(line, everywhere):
    """Have this process killed before it executes the `line`-th line, of the library or of anything; the lines so far."""
    lines = []

    def trace(frame, event, _):
        if not (everywhere or frame.f_code.co_filename.startswith(_HERE)):
            return None
        if event == "line":
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            if len(lines) == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    return lines


class Program:
    """Calls that a child makes on a copy of a folder. It acknowledges each that returned by a byte in a file."""

    def __init__(self, root, calls, lanes):
        self.begun, self.folder, self.report, self._returned = (root / each for each in ("begun", "folder", "r", "a"))
        self.calls, self.lanes = calls, lanes

    def restore(self):
        """Restore the folder from before the calls."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.begun.exists():
            shutil.copytree(self.begun, self.folder)

    def run(self, calls, line=None, after=None, everywhere=False):
        """Make the calls in a child that is killed before a line or after some seconds. Returns whether it was killed."""

        def do():
            lines = [] if line is None else killed_at_line(line, everywhere)
            buffer = started(self.folder, self.lanes)
            returned = os.open(self._returned, os.O_WRONLY | os.O_APPEND)
            for call in calls:
                run(buffer, call, self.lanes)
                os.write(returned, b"x")
            sys.settrace(None)
            if line == 0:
                self.report.write_text("\n".join(lines))

        self._returned.write_bytes(b"")
        how, told = forked(do, after)
        assert how in ("done", "killed"), told.decode()
        return how == "killed"

    def lines(self, calls, everywhere=False):
        """Run without a kill. Returns for each line of the sources when it is executed: those that guard writes, and all."""
        self.run(calls, line=0, everywhere=everywhere)
        when = {}
        for number, line in enumerate(self.report.read_text().splitlines(), 1):
            when.setdefault(line, []).append(number)
        return [numbers for line, numbers in when.items() if any(name in line for name in _GUARDS)], list(when.values())

    def acknowledged(self):
        """How many calls returned."""
        return self._returned.stat().st_size


def some_line(rng, lines):
    return rng.choice(rng.choice(rng.choice(lines)))


# ------------------------------------------------------------------ what is there


def found(folder, lanes):
    """The state of a storage after it was opened; AssertionError for a torn row. None where there is none."""
    try:
        storage = LazyMemmapStorage.open(folder)
    except FileNotFoundError:
        return None
    writer = RoundRobinWriter()
    writer.register_storage(storage)
    length = len(storage)
    ids = storage[:]["id"].reshape(-1).clone()
    assert ids.numel() == length
    stored = storage[:]
    wanted = leaves(ids.reshape(stored.shape))
    for key in ("floats", "bytes", ("next", "flag"), ("next", "half")):
        one = wanted[key[0]][key[1]] if isinstance(key, tuple) else wanted[key]
        assert torch.equal(torch.as_tensor(stored[key]).float(), one.float()), f"torn rows: {key} of {ids.tolist()}"
    assert not ids.numel() or stored["text"] == each_text(stored["id"].tolist()), f"torn rows: text of {ids.tolist()}"
    kept = storage.contents.keep(KeptPriorities)
    values = kept.read(length)
    assert not storage.guard.journal.active and not kept.active
    return tuple(ids.tolist()), tuple(values.given.tolist()), writer.cursor, writer.write_count, values.highest


def check(folder, calls, state, last, lanes):
    """How what is there fits a program of which `last` calls were acknowledged; AssertionError where it does not."""
    there = found(folder, lanes)
    settled = calls[last - 1].after if last else state
    if there is None:
        assert last == 0 and not settled.ids, f"{last} calls were acknowledged, and there is no storage"
        return "no storage yet"
    if there == settled.seen():
        return "as acknowledged"
    assert last < len(calls), f"all was acknowledged: {there} is not {settled.seen()}"
    call = calls[last]
    if there == call.after.seen():
        return "the call under way has happened"
    for each in call.between:
        if there == each.seen():
            return "a part of the call under way has happened"
    states = "\n".join(map(repr, (there, settled.seen(), call.after.seen())))
    raise AssertionError(f"after {last} calls, in {call.name}{call.arguments}:\n{states}")


# ------------------------------------------------------------------ kills


def template(folder, start, lanes):
    """A folder to begin with, and its state."""
    state, calls = State(lanes=lanes), []
    for count in {"new": [], "half full": [3, 2], "wrapped": [5, 7, 9]}[start]:
        calls.append(Call("extend", (count, state.fresh), state, state.extended(count)))
        state = calls[-1].after
    if calls:
        buffer = started(folder, lanes)
        for call in calls:
            run(buffer, call, lanes)
        buffer.storage.close()
    return state


@one_thread()
def kills(size, seed=0):
    """Kill so many children."""
    rng, counts = random.Random(seed), Counts()
    sizes, least = (journal.LARGEST, journal._PAGE), packed._LEAST
    try:
        while counts.cases < size:
            lanes, start, in_parts = rng.choice([1, 2]), rng.choice(STARTS), rng.random() < 0.3
            journal.LARGEST, journal._PAGE = (200, 8) if in_parts else sizes
            packed._LEAST = rng.choice([16, 100, least])  # bytes of a segment
            with scratch("memmap") as root:
                state = template(Path(root, "begun"), start, lanes)
                everywhere = start == "new" and rng.random() < 0.3  # the first write: at each file operation
                calls = program(state, 1 if everywhere else 12, rng, in_parts)
                kill_program(
                    Program(Path(root), calls, lanes), state, everywhere, min(20, size - counts.cases), rng, counts
                )
                counts.outcomes[f"start: {start}"] += 1
    finally:
        (journal.LARGEST, journal._PAGE), packed._LEAST = sizes, least
    return counts


def kill_program(every, state, everywhere, most, rng, counts):
    """Kill a program so many times, and look at what is there."""
    every.restore()
    lines = every.lines(every.calls, everywhere)
    assert every.acknowledged() == len(every.calls)
    check(every.folder, every.calls, state, len(every.calls), every.lanes)
    opening = every.lines([])
    for _ in range(most):
        every.restore()
        timed = rng.random() < 0.3
        how = {"after": rng.uniform(0, 0.02)} if timed else {"line": some_line(rng, lines), "everywhere": everywhere}
        killed = every.run(every.calls, **how)
        last = every.acknowledged()
        counts.cases += killed
        counts.outcomes["at a random time" if timed else "before a line"] += killed
        if rng.random() < 0.3 and (every.folder / "storage.json").exists():
            counts.outcomes["while it was opened"] += every.run([], line=some_line(rng, opening))
        counts.outcomes[check(every.folder, every.calls, state, last, every.lanes)] += 1
        goes_on(every.folder, every.lanes)


def goes_on(folder, lanes):
    """The next start works, whatever was killed."""
    buffer = started(folder, lanes)
    before = buffer.write_count
    ids = torch.arange(1000, 1000 + 2 * lanes)
    buffer.extend(rows(ids) if lanes == 1 else rows(ids.reshape(lanes, 2)))
    assert buffer.write_count == before + 2 and set(buffer[:]["id"].reshape(-1).tolist()) >= set(ids.tolist())
    del buffer
