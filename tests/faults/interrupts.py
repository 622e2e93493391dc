"""An exception at every line of every call (I2): the buffer is as before the call or as after it, and works on.

A trace function raises where a signal handler might: before a line, or where Python looks for signals, of this library and
of the standard library that it calls. The state must then be that from before or that from after, as a whole. What
another thread then does with the buffer must be what it does from that state, without waiting for ever.
"""

import contextlib
import dis
import functools
import itertools
import json
import random
import shutil
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer
from tests.faults import datasets as data
from tests.faults.children import scratch
from tests.faults.counts import Counts
from tests.faults.signatures import signature
from tests.faults.subjects import states_of
from tests.interop.checkpoint.resuming import name_of
from tests.interop.datasets.loaders import LOADERS, given
from tests.interop.pair_history import BATCH, LANES, PRIORITIZED, SAMPLERS, STORAGES, Cell, as_given, ids_of, parts

ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(f"{ROOT / name}/" for name in ("fbuf", "interop"))
_STANDARD = sysconfig.get_paths()["stdlib"] + "/"
# Callbacks of references, whose exceptions Python reports and drops; and `cached_property`, which holds one lock for all
# objects: raising between its body and the release, where Python does not look for signals, would leave it locked.
_LEFT_OUT = ("weakref.py", "weakrefset.py", "functools.py")
_OTHERS = (sysconfig.get_paths()["purelib"] + "/", sysconfig.get_paths()["platlib"] + "/")
SURE = 60.0  # seconds after which something waits for ever


class Interrupt(BaseException):
    """What the handler of a signal raises."""


# ------------------------------------------------------------------ the tracer


@functools.cache
def _is_traced(path: str) -> bool:
    if path.startswith(_OTHERS) or "importlib" in path or path.endswith(_LEFT_OUT):
        return False
    return path.startswith((*_OURS, _STANDARD))


@functools.cache
def _looks(code: types.CodeType) -> frozenset[int]:
    """The instructions before which Python looks for signals: behind calls, and at the begin of functions and turns."""
    found, after = set(), False
    for each in dis.get_instructions(code):
        if after:
            found.add(each.offset)
        after = each.opname in ("CALL", "CALL_FUNCTION_EX", "RESUME") or "BACKWARD" in each.opname
    return frozenset(found)


class Tracer:
    """Raises an `Interrupt` in this thread at the event of a number, counted from 0.

    Args:
        at: the number; -1 for none, to count.
        looks: whether events are the places where Python looks for signals, instead of lines.
    """

    def __init__(self, at: int, looks: bool) -> None:
        self.at, self.looks = at, looks
        self.count = 0
        self.where = ""

    def __enter__(self) -> "Tracer":
        if self.looks:  # Python 3.12 reports no instruction unless a frame asked for them before
            sys._getframe().f_trace_opcodes = True
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        if not _is_traced(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.looks, not self.looks
        return self._event

    def _event(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line" or (event == "opcode" and frame.f_lasti in _looks(frame.f_code)):
            self.count += 1
            if self.count == self.at + 1:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_filename.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
                raise Interrupt
        return self._event


# ------------------------------------------------------------------ the subjects


@dataclass(frozen=True)
class Subject:
    """A buffer, and how it is made."""

    cell: Cell
    prefetch: int = 0
    kept: bool = False  # whether its rows are in a folder
    generations: bool = False

    @property
    def name(self) -> str:
        more = [f"prefetch={self.prefetch}"] * bool(self.prefetch) + ["folder"] * self.kept
        return " ".join([name_of(self.cell), *more, *["generations"] * self.generations])

    @property
    def lanes(self) -> int:
        return LANES if self.cell.ndim == 2 else 1

    def rows(self, turn: int, count: int = 4) -> Any:
        """Different ones for each turn."""
        return as_given(ids_of(4 * turn, count, self.lanes), self.cell)

    def made(self, folder: Path) -> Any:
        """A buffer without items."""
        storage, sampler, writer = parts(self.cell)
        if self.kept:
            shutil.rmtree(folder / "rows", ignore_errors=True)
            storage = LazyMemmapStorage(storage.max_size, scratch_dir=folder / "rows", ndim=self.cell.ndim)
        if self.generations:
            writer = type(writer)(track_generations=True)
        return TensorDictReplayBuffer(
            storage=storage,
            sampler=sampler,
            writer=writer,
            batch_size=BATCH,
            prefetch=self.prefetch or None,
            generator=torch.Generator("cpu").manual_seed(0),
        )

    def used(self, folder: Path) -> Any:
        """A buffer that is full, and was drawn from."""
        buffer = self.made(folder)
        for turn in range(5):
            buffer.extend(self.rows(turn))
        self.go_on(buffer, 2, 5)
        return buffer

    def go_on(self, buffer: Any, turns: int, turn: int = 9) -> list[Any]:
        """Draws, updates and writes; all that was seen."""
        seen: list[Any] = []
        for each in range(turn, turn + turns):
            buffer.drop_prefetched()  # what was drawn before a write, and what after it, is left to chance
            for _ in range(2):
                try:
                    batch, info = buffer.sample(return_info=True)
                except RuntimeError as error:  # nothing may be left to draw
                    seen.append(str(error))
                    continue
                seen += [batch.clone(), *(info[key] for key in sorted(info, key=str))]
                if self.cell.sampler in PRIORITIZED:
                    buffer.drop_prefetched()
                    batch["td_error"] = (batch["x"] % 11 + each % 3).float()
                    buffer.update_tensordict_priority(batch)
            buffer.drop_prefetched()
            seen.append(torch.as_tensor(buffer.extend(self.rows(each))).clone())
        return seen

    def state(self, buffer: Any) -> str:
        """A digest of everything that it holds."""
        state, length, rows = states_of(buffer)
        ring = buffer.storage.ring
        counts = ring.cursor, ring.written, ring.count, ring.size
        counted = buffer.writer.generations_of(torch.arange(12)) if self.generations else 0
        if not len(buffer.storage):
            state.pop("_storage")
        return signature((state, length, rows, counts, counted, buffer.batch_size))


Do = Callable[[Subject, Any, Path], Any]


def _update(subject: Subject, buffer: Any, folder: Path) -> None:
    index = torch.tensor([3, 1, 4])
    index = index if subject.lanes == 1 else torch.stack([index, index % subject.lanes], -1)
    buffer.update_priority(index, torch.tensor([0.25, 9.0, 0.5]))


def _update_tensordict(subject: Subject, buffer: Any, folder: Path) -> None:
    index = torch.tensor([3, 1, 4])
    data = buffer[:].reshape(-1)[index].clone()
    data["index"] = index if subject.lanes == 1 else torch.stack([index, index % subject.lanes], -1)
    data["td_error"] = torch.tensor([0.25, 9.0, 0.5])
    buffer.update_tensordict_priority(data)


CALLS: dict[str, Do] = {
    "extend": lambda subject, buffer, folder: buffer.extend(subject.rows(30, 12)),
    "add": lambda subject, buffer, folder: buffer.add(
        subject.rows(30, 1)[:, 0] if subject.lanes > 1 else subject.rows(30, 1)[0]
    ),
    "sample": lambda subject, buffer, folder: buffer.sample(),
    "empty": lambda subject, buffer, folder: buffer.empty(),
    "update_priority": _update,
    "update_tensordict_priority": _update_tensordict,
    "set_sampler": lambda subject, buffer, folder: buffer.set_sampler(parts(subject.cell)[1]),
    "set_writer": lambda subject, buffer, folder: buffer.set_writer(parts(subject.cell)[2]),
    "set_storage": lambda subject, buffer, folder: buffer.set_storage(parts(subject.cell)[0]),
    "set_rng": lambda subject, buffer, folder: buffer.set_rng(torch.Generator("cpu").manual_seed(7)),
    "dumps": lambda subject, buffer, folder: buffer.dumps(folder / "saved"),
    "loads": lambda subject, buffer, folder: buffer.loads(folder / "loaded"),
    "load_state_dict": lambda subject, buffer, folder: buffer.load_state_dict(torch.load(folder / "state.pt")),
    "state_dict": lambda subject, buffer, folder: buffer.state_dict(),
}
_OF_PRIORITIES = ("update_priority", "update_tensordict_priority")
_SLICED = ("SliceSampler", "SliceSamplerWithoutReplacement", "PrioritizedSliceSampler")


def _subject(
    storage: str, sampler: str, writer: str = "TensorDictRoundRobinWriter", ndim: int = 1, **more: Any
) -> Subject:
    return Subject(Cell(storage, ndim, sampler, writer, "TensorDictReplayBuffer"), **more)


SUBJECTS = [
    *(_subject("LazyTensorStorage", sampler) for sampler in SAMPLERS),
    *(_subject(storage, "RandomSampler") for storage in STORAGES if storage != "LazyTensorStorage"),
    _subject("LazyTensorStorage", "RandomSampler", "RoundRobinWriter", generations=True),
    _subject("LazyTensorStorage", "RandomSampler", "TensorDictMaxValueWriter"),
    _subject("LazyStackStorage", "PrioritizedSampler", "TensorDictMaxValueWriter"),
    _subject("ListStorage", "SamplerWithoutReplacement"),
    _subject("LazyTensorStorage", "PrioritizedSampler", ndim=2),
    _subject("LazyFrameStorage", "SamplerWithoutReplacement"),
    *(_subject("LazyMemmapStorage", each, kept=True) for each in ("RandomSampler", "PrioritizedSampler", *_SLICED[1:])),
    *(_subject("LazyTensorStorage", each, prefetch=2) for each in SAMPLERS if each != "ConsumingSampler"),
    _subject("LazyMemmapStorage", "PrioritizedSampler", kept=True, prefetch=2),
    _subject("ListStorage", "SamplerWithoutReplacement", prefetch=2),
]
FEW = [
    _subject("LazyTensorStorage", "RandomSampler"),
    _subject("LazyTensorStorage", "SamplerWithoutReplacement", prefetch=2),
    _subject("LazyMemmapStorage", "PrioritizedSampler", kept=True),
    _subject("ListStorage", "RandomSampler"),
]


def pairs(subjects: Sequence[Subject], calls: Collection[str]) -> list[tuple[Subject, str]]:
    """Subjects and the calls that change something in them."""
    every = itertools.product(subjects, calls)
    return [(one, call) for one, call in every if call not in _OF_PRIORITIES or one.cell.sampler in PRIORITIZED]


# ------------------------------------------------------------------ the test


class Case:
    """A call of a subject: the states before and after it, and what comes next from each of them."""

    def __init__(self, subject: Subject, call: str, folder: Path, looks: bool) -> None:
        self.subject, self.call, self.folder, self.looks = subject, call, folder, looks
        if call in ("loads", "load_state_dict"):
            other = subject.made(folder)
            for turn in range(4):
                other.extend(subject.rows(12 + turn))
            other.dumps(folder / "loaded")
            torch.save(other.state_dict(), folder / "state.pt")
            del other
        self.known: dict[str, tuple[str, str]] = {}
        for name in ("before", "after"):
            buffer = self.ready()
            if name == "after":
                with Tracer(-1, looks) as counting:
                    self.do(buffer)
                self.events = counting.count
            state = subject.state(buffer)
            self.known[state] = name, self.next(buffer)

    def ready(self) -> Any:
        buffer = self.subject.used(self.folder)
        if self.call == "dumps" and not (self.folder / "saved").exists():
            buffer.dumps(self.folder / "saved")
        return buffer

    def do(self, buffer: Any) -> None:
        self.result = CALLS[self.call](self.subject, buffer, self.folder)  # finalizers of it wait

    def next(self, buffer: Any) -> str:
        """A digest of what another thread sees next, or what went wrong."""
        found: list[str] = []

        def run() -> None:
            try:
                seen = self.subject.go_on(buffer, 2)
                buffer.dumps(self.folder / "next")
                found.append(signature((seen, self.subject.state(buffer), self.reopened(buffer))))
            except BaseException as error:
                found.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(SURE)
        return found[0] if found else "waits for ever"

    def reopened(self, buffer: Any) -> Any:
        """What the folder of the rows holds, if there is one."""
        if not self.subject.kept or buffer.storage.scratch_dir is None:
            return None
        buffer.storage.close()
        storage = LazyMemmapStorage.open(self.folder / "rows", mode="r")
        kept = PrioritizedSampler(storage.max_size, 1.0, 1.0)
        ReplayBuffer(storage=storage, sampler=kept)
        return (
            storage[:],
            kept.priorities,
            list(storage.ring.counts[:2]),
        )  # a change that is made twice is a version more

    def interrupted(self, at: int) -> tuple[str, str]:
        """What an interrupt at an event leaves, and where that is."""
        buffer = self.ready()
        came = False
        with Tracer(at, self.looks) as tracer:
            try:
                self.do(buffer)
            except Interrupt:
                came = True
            except BaseException as error:
                return f"{type(error).__name__}: {error}", tracer.where
        if not came:
            return "was swallowed" if tracer.where else "no such line", tracer.where
        state = self.subject.state(buffer)
        if state not in self.known:
            return "a mixture", tracer.where
        name, following = self.known[state]
        found = self.next(buffer)
        return (name if found == following else f"{name}, but then: {found[:200]}"), tracer.where


def cases(subject: Subject, call: str, step: int = 1, start: int = 0, looks: bool = False) -> Counts:
    """One case for each event of a call, or for each `step`-th."""
    counts = Counts()
    with scratch("interrupts") as folder:
        case = Case(subject, call, Path(folder), looks)
        for at in range(start, case.events, step):
            outcome, where = case.interrupted(at)
            counts.note(outcome, ("before", "after", "no such line"), f"{subject.name}, {call}, {at}, {where}")
    return counts


def lines(
    size: int, seed: int = 0, subjects: Sequence[Subject] = SUBJECTS, calls: Collection[str] = tuple(CALLS)
) -> Counts:
    """I2: about so many cases, evenly over all subjects and calls; of each a part of the events, from a random one on."""
    rng, every, found = random.Random(seed), pairs(subjects, calls), list[Counts]()
    for number, (subject, call) in enumerate(every):
        looks = (number + seed) % 2 == 1
        with scratch("interrupts") as folder:
            case = Case(subject, call, Path(folder), looks)
            step = max(1, case.events * len(every) // size)
            counts = Counts()
            for at in range(rng.randrange(step), case.events, step):
                outcome, where = case.interrupted(at)
                counts.note(outcome, ("before", "after", "no such line"), f"{subject.name}, {call}, {at}, {where}")
            counts.outcomes[call] += counts.cases
            found.append(counts)
    return Counts.of(found)


def datasets(size: int, seed: int = 0) -> Counts:
    """I3: about so many interrupts of calls that make, split and replace a dataset, which is then old, new or missing.

    The call is made again, must succeed, and must leave nothing else behind.
    """
    counts, rng = Counts(), random.Random(seed)
    loader = next(each for each in LOADERS if each.name == "toy")
    with scratch("interrupts") as folder, given(loader, Path(folder)) as (found, patch):
        subject = data.Subject(found)
        for upstream, content in enumerate((data.OLD, data.NEW)):
            found.upload(upstream, patch)
            subject.put(data.MISSING)
            subject.known[data.digest(subject.construct())] = content
            shutil.copytree(subject.root, found.folder / content)
            for operation in [each for each in data.OPERATIONS if each.upstream == upstream]:
                subject.put(operation.before)
                with Tracer(-1, False) as counting:
                    operation.do(subject.construct)
                subject.known.setdefault(data.digest(subject.result(operation)), operation.after)
                step = max(1, counting.count * len(data.OPERATIONS) // size)
                for at in range(rng.randrange(step), counting.count, step):
                    _interrupt_dataset(subject, operation, at, counts)
    return counts


def _interrupt_dataset(subject: data.Subject, operation: data.Operation, at: int, counts: Counts) -> None:
    subject.put(operation.before)
    with Tracer(at, False) as tracer, contextlib.suppress(Interrupt):
        operation.do(subject.construct)
    between = subject.standing()
    subject.look(operation)
    _, again, left = json.loads(subject.told.read_text())
    well = again == operation.after and not left
    outcome = between if well else f"{between}, then {again}, left {left}"
    counts.note(outcome, (*operation.between, operation.after), f"{operation.name}, {at}, {tracer.where}")
