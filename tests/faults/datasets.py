"""Kills a process that makes, changes or removes a dataset (X1), at its operations on files or at random times.

The dataset must be complete, old or new, or missing where it was missing. The same call must then complete, and leave
nothing else behind.
"""

import contextlib
import gc
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interop.buffers import ReplayBuffer
from interop.datasets.errors import MissingDatasetError
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.rows import entries
from interop.shared.processes import jax_started
from tests.faults.children import forked, one_thread, scratch
from tests.faults.counts import Counts
from tests.faults.file_operations import watched
from tests.interop.datasets.loaders import LOADERS, Given, Loader, given

Construct = Callable[..., BaseDatasetExperienceReplay]
MISSING, OLD, NEW, MARKED, SPLIT = "missing", "old", "new", "marked", "trajectories"


@dataclass(frozen=True)
class Operation:
    """What is killed.

    Args:
        before: what is there before.
        upstream: which of two versions the server has.
        do: the call, which is made again afterwards.
        between: what may be there when it was killed.
        returned: what is there when it has returned.
        after: and what is there when the dataset was then constructed.
    """

    name: str
    before: str
    upstream: int
    do: Callable[[Construct], Any]
    between: tuple[str, ...]
    returned: str
    after: str


def _marked(rows: Any) -> Any:
    return rows.set("mark", torch.ones(rows.batch_size))


OPERATIONS = [
    Operation("first", MISSING, 0, lambda construct: construct(), (MISSING, OLD), OLD, OLD),
    Operation("split", OLD, 0, lambda construct: construct(split_trajs=True), (OLD,), OLD, SPLIT),
    Operation(
        "preprocess",
        OLD,
        0,
        lambda construct: construct().preprocess(_marked, num_workers=0),
        (OLD, MARKED),
        MARKED,
        MARKED,
    ),
    Operation("remove", OLD, 0, lambda construct: construct().delete(), (OLD, MISSING), MISSING, OLD),
    Operation("force", OLD, 1, lambda construct: construct(download="force"), (OLD, NEW), NEW, NEW),
]


def digest(dataset: BaseDatasetExperienceReplay) -> str:
    """Of all rows and what upstream says."""
    found = hashlib.sha256(dataset.metadata_path.read_bytes())
    for key, value in sorted(entries(dataset[:]), key=lambda entry: repr(entry[0])):
        content = value.numpy().tobytes() if isinstance(value, Tensor) else repr(value.tolist()).encode()
        found.update(repr(key).encode() + content)
    return found.hexdigest()


class Points:
    """Operations on files, before and after each, of which one kills this process."""

    def __init__(self, end: int = -1) -> None:
        self.end, self.names = end, list[str]()

    def at(self, name: str) -> None:
        if len(self.names) == self.end:
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)

    def watch(self, do: Callable[[], Any]) -> None:
        """Do this. What a child has changed to watch it stays."""

        def opened(event: str, given: tuple[Any, ...]) -> None:
            if event == "open" and given[1] is not None and given[2] & (os.O_WRONLY | os.O_RDWR):
                self.at(f"open {os.path.basename(os.fsdecode(given[0])) if not isinstance(given[0], int) else ''}")

        sys.addaudithook(opened)
        for owner, name in ((ReplayBuffer, "extend"), (os, "posix_fallocate")):
            setattr(owner, name, self._around(name, getattr(owner, name)))
        with watched(lambda number, name, when, args, result: self.at(f"{when} {name}")):
            do()

    def _around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self.at(f"before {name}")
            result = real(*args, **more)
            self.at(f"after {name}")
            return result

        return call


class Subject:
    """A loader whose datasets are constructed by children: this process starts no threads of the libraries that they use."""

    def __init__(self, found: Given) -> None:
        self.given, self.root, self.told = found, found.folder / "root", found.folder / "told"
        self.known: dict[str, str] = {}  # what there can be, by its digest
        self.names: dict[str, list[str]] = {}  # the points of each operation
        self.took: dict[str, float] = {}  # seconds

    def construct(self, **more: Any) -> BaseDatasetExperienceReplay:
        return self.given.construct(root=self.root, **more)

    def learn(self, content: str, operations: Sequence[Operation]) -> None:
        """Have a child make what is to be there with the files that the server has now, and do all operations."""

        def do() -> bytes:
            self.put(MISSING)
            self.known[digest(self.construct())] = content
            shutil.copytree(self.root, self.given.folder / content)
            for operation in operations:
                self.put(operation.before)
                begun, points = time.monotonic(), Points()
                points.watch(lambda operation=operation: operation.do(self.construct))
                self.names[operation.name], self.took[operation.name] = [*points.names], time.monotonic() - begun
                self.known.setdefault(digest(self.result(operation)), operation.after)
            return json.dumps([self.known, self.names, self.took, [*sys.modules]]).encode()

        how, told = forked(do)
        assert how == "done", told.decode()
        self.known, self.names, self.took, modules = json.loads(told)
        for name in set(modules) - {*sys.modules, "__mp_main__"}:  # here, in the place of in each child
            with warnings.catch_warnings(), contextlib.suppress(Exception):  # some are no modules by themselves
                warnings.simplefilter("ignore")
                importlib.import_module(name)

    def put(self, content: str) -> None:
        """Have this there, and nothing else."""
        shutil.rmtree(self.root, ignore_errors=True)
        if content != MISSING:
            shutil.copytree(self.given.folder / content, self.root)

    def result(self, operation: Operation) -> BaseDatasetExperienceReplay:
        return self.construct(**({"split_trajs": True} if operation.after == SPLIT else {}))

    def standing(self) -> str:
        """What is there."""
        try:
            return self.known.get(digest(self.construct(download=False)), "a part")
        except MissingDatasetError:
            return MISSING
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def look(self, operation: Operation) -> None:
        """Tell what is there, what is there when the operation was done again, and what is left beside it."""
        between = self.standing()
        try:
            operation.do(self.construct)
            again = self.known.get(digest(self.result(operation)), "a part")
        except Exception as error:
            again = f"{type(error).__name__}: {error}"
        left = [str(path.relative_to(self.root)) for path in self.root.rglob(".*.making*")]
        self.told.write_text(json.dumps([between, again, left]))

    def kill(self, operation: Operation, chosen: Sequence[int | float], counts: Counts) -> None:
        """Kill it at points, and after seconds. A child looks at what the one before has left, and is killed then."""

        def do(looks: bool, moment: int | float) -> None:
            if looks:
                self.look(operation)
            self.put(operation.before)
            if moment >= 0:
                Points(int(moment)).watch(lambda: operation.do(self.construct))

        before: tuple[str, int | float] | None = None
        for moment in [*chosen, -1]:
            timed = isinstance(moment, float)
            self.told.unlink(missing_ok=True)
            how, told = forked(lambda: do(before is not None, -1 if timed else moment))  # noqa: B023
            if before is not None:
                self.note(operation, *before, counts)
            if timed:
                how, told = forked(lambda: operation.do(self.construct) and None, moment)
            before = how if how in ("killed", "done") else f"{how} {told.decode()}", moment

    def note(self, operation: Operation, how: str, moment: int | float, counts: Counts) -> None:
        name = f"{moment:.3f} s" if isinstance(moment, float) else f"{moment} {self.names[operation.name][moment]}"
        where = f"{self.given.loader.name}, {operation.name}, {name}"
        between, again, left = json.loads(self.told.read_text()) if self.told.exists() else ("nothing is known", "", [])
        good = {"killed": operation.between, "done": (operation.returned,)}.get(how, ())
        counts.note(between if good else how, good, where)
        well = again == operation.after and not left
        counts.outcomes["restarts"] += well
        counts.fail(f"{where}: then {again}, left {left}", times=not well)


def run_loader(
    loader: Loader, operations: Sequence[Operation], points: int, times: int, counts: Counts, rng: random.Random
) -> None:
    """Kill operations at so many points, and at so many random times."""
    operations = [each for each in operations if loader.splits or each.after != SPLIT]
    with scratch("datasets") as folder, given(loader, Path(folder)) as (found, patch):
        subject = Subject(found)
        for upstream, content in enumerate((OLD, NEW)):
            found.upload(upstream, patch)
            some = [each for each in operations if each.upstream == upstream]
            subject.learn(content, some)
            for operation in some:
                every = range(len(subject.names[operation.name]))
                share = min(-(-points // len(operations)), len(every))
                chosen = sorted(rng.sample(every, share))
                took = subject.took[operation.name]
                seconds = [rng.random() * took for _ in range(-(-times // len(operations)))]
                subject.kill(operation, [*chosen, *seconds], counts)


def kills(points: int, seed: int = 0, names: Sequence[str] = (), short: bool = False) -> Counts:
    """So many kills for each loader, and a tenth as many at random times.

    `short`: for all but the first a quarter of those, at what differs between loaders, and none at random times.
    """
    gc.collect()
    gc.freeze()
    counts, rng = Counts(), random.Random(seed)
    loaders = [loader for loader in LOADERS if loader.name in names or not names]
    times = 0 if short else points // 10
    with one_thread():
        for loader in loaders:
            if not short or loader is loaders[0]:
                run_loader(loader, OPERATIONS, points, times, counts, rng)
            else:
                run_loader(loader, [OPERATIONS[0], OPERATIONS[-1]], points // 4, times, counts, rng)
    assert not jax_started(), "children of a process in which JAX runs may hang"
    return counts
