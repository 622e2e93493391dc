"""How the benchmarks time, describe and print: the part that all of them share.

Contenders take turns in one process, a short burst each, and the order turns round every round, so slow drift of the
machine meets all alike. A number is the median over all calls; a ratio is the median over rounds of rival / ours. The
rounds are kept, so that one can say later what is noise.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

SCHEMA = 1  # of the files written here and by run.py; one more when a reader of the old ones would be wrong
OURS = "ours"
YARDSTICK = "yardstick"  # stands in where a line has no rival: its rounds are kept, its time is not shown
ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "numpy", "torch", "tensordict", "torchrl", "cpprb", "flashbax")
MICROSECOND = 1e6
MOST_RATIOS = 6  # columns
LOAD = os.getloadavg()[0]  # before anything is measured
BUSY = 0.3  # cores that others use, from which on a ratio is not to be believed


@dataclasses.dataclass(frozen=True)
class Timing:
    """One line of a table: what was done, and how long it took each contender."""

    name: str
    us: dict[str, float]  # median of one call; OURS is always there
    ratio: dict[str, float]  # rival / ours: above 1 we are faster
    rounds: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # us, the median of each round

    def record(self) -> dict[str, Any]:
        """What is written to a file. `rounds` holds one list a run, and here there is one run."""
        rounds = {contender: [[_short(us) for us in times]] for contender, times in self.rounds.items()}
        return {"name": self.name, "us": _shortened(self.us), "ratio": _shortened(self.ratio), "rounds": rounds}

    @classmethod
    def of(cls, record: dict[str, Any], name: str | None = None) -> "Timing":
        """From what `record` made of it in another process; under another name if one is given."""
        rounds = {contender: runs[0] for contender, runs in record["rounds"].items()}
        return cls(name or record["name"], record["us"], record["ratio"], rounds)


def of_rounds(name: str, taken: dict[str, list[float]], calls: dict[str, list[float]] | None = None) -> Timing:
    """The line of contenders that took turns: seconds of each round, and of each call where they are more than that."""
    ratios = {
        contender: statistics.median(a / b for a, b in zip(times, taken[OURS], strict=True))
        for contender, times in taken.items()
        if contender not in (OURS, YARDSTICK)
    }
    shown = {
        contender: statistics.median(times) * MICROSECOND
        for contender, times in (calls or taken).items()
        if contender != YARDSTICK
    }
    rounds = {contender: [time * MICROSECOND for time in times] for contender, times in taken.items()}
    return Timing(name, shown, ratios, rounds)


def arguments(question: str, **more: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=question, **more)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the numbers to FILE")
    parser.add_argument("--quick", action="store_true", help="smaller buffers and fewer rounds, to see that it runs")
    return parser


def rival(name: str) -> ModuleType | None:
    """The module if it can be imported; a rival that is not there is left out."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    logging.getLogger(name.split(".")[0]).setLevel(logging.WARNING)  # no lines between those of the table
    return module


def compare(name: str, contenders: dict[str, Callable[[], Any]], *, quick: bool = False) -> Timing:
    """Time calls that do one whole operation and wait for its result (`block_until_ready` where it is a JAX array)."""
    if len(contenders) == 1:
        contenders = contenders | {YARDSTICK: yardstick()}
    most, budget, whole = (5, 0.01, 0.5) if quick else (41, 0.03, 4.0)  # rounds; seconds of a burst and of all
    bursts, one_round = {}, 0.0
    for contender, call in contenders.items():
        _first, *later = [seconds(call) for _ in range(3)]  # compile, touch memory, fill caches
        cost = max(min(later), 1e-7)
        bursts[contender] = max(2, min(200, int(budget / cost)))
        one_round += cost * (1 + bursts[contender])
    rounds = max(5, min(most, int(whole / one_round)))
    taken: dict[str, list[float]] = {contender: [] for contender in contenders}
    middles: dict[str, list[float]] = {contender: [] for contender in contenders}
    for turn in range(rounds):
        order = list(contenders)
        for contender in order if turn % 2 else order[::-1]:
            call = contenders[contender]
            call()  # the caches still hold the data of the other contender
            burst = [seconds(call) for _ in range(bursts[contender])]
            taken[contender] += burst
            middles[contender].append(statistics.median(burst))
    return of_rounds(name, middles, taken)


@functools.cache
def yardstick() -> Callable[[], Any]:
    """A fixed piece of work, some Python and some reading of memory, by which two moods of a machine can be told."""
    table = np.ones((262_144, 32), np.float32)
    rows = np.random.default_rng(0).integers(0, len(table), 256)
    return lambda: (table.take(rows, axis=0), sum(range(500)))


def _short(number: float) -> float:
    """Five significant digits: files stay small, and no timing has more."""
    return float(f"{number:.5g}")


def _shortened(numbers: dict[str, float]) -> dict[str, float]:
    return {name: _short(number) for name, number in numbers.items()}


def seconds(call: Callable[[], Any]) -> float:
    """What one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def about() -> dict[str, Any]:
    """Machine, versions and commit, so that a number can be traced."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    cores = len(os.sched_getaffinity(0))
    return {
        "machine": f"{_processor()}, {cores} cores, {platform.system()}",
        "cores": cores,
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "dirty": bool(_git("status", "--porcelain", "--", "fbuf", "interop", "benchmarks", ":!benchmarks/results")),
        "load": round(LOAD, 1),
        "cores used by others": others(),
        "torch threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "quick": "--quick" in sys.argv,
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def _cpu_seconds() -> tuple[float, float, float] | None:
    """Now, what all processes of the machine have used, and what this one and its children have. None: nobody says."""
    try:
        fields = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, interrupts, soft = map(int, fields[:7])
    everyone = (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), everyone, sum(os.times()[:4])


_BEGINNING = _cpu_seconds()


def others() -> float | None:
    """Cores that other processes have kept busy since this module was imported. None where nobody says."""
    now = _cpu_seconds()
    if now is None or _BEGINNING is None:
        return None
    passed, everyone, own = (after - before for after, before in zip(now, _BEGINNING, strict=True))
    return round(max(0.0, everyone - own) / max(passed, 0.01), 2)


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _git(*command: str) -> str:
    """What git says; nothing where there is no repository."""
    try:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def report(title: str, timings: list[Timing], values: dict[str, float], file: pathlib.Path | None) -> None:
    """Print the table, and write the same numbers to `file`."""
    show(title, timings, values)
    if file is not None:
        save(title, timings, values, file)


def show(title: str, timings: list[Timing], values: dict[str, float]) -> None:
    facts = about()
    print(f"\n{title}")
    print(
        f"{facts['machine']}; python {facts['python']}; commit {facts['commit']}"
        f"{' with changes' if facts['dirty'] else ''}; {facts['time']}"
    )
    print("; ".join(f"{package} {version}" for package, version in facts["versions"].items()))
    used = facts["cores used by others"]
    print(f"load before {facts['load']}; others used {used} cores meanwhile; torch threads: {facts['torch threads']}")
    if facts["cores"] < LOAD or (used or 0) > BUSY:
        print("The machine was busy. torch's threads then wait for one another: repeat this when it is idle, or with")
        print("OMP_NUM_THREADS=1, before a ratio against torch is believed.")
    if timings:
        _print_timings(timings)
    wide = max(map(len, values), default=0)
    for name, value in values.items():
        print(f"{name:<{wide}}  {value:>12.3f}")


def save(
    title: str,
    timings: list[Timing],
    values: dict[str, float],
    file: pathlib.Path,
    more: dict[str, Any] | None = None,
) -> None:
    """Write the numbers; `more` is to be known about the machine. What the file says is in `records.py`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    written = {
        "schema": SCHEMA,
        "script": pathlib.Path(sys.argv[0]).stem,
        "title": title,
        "about": about() | (more or {}),
        "timings": [timing.record() for timing in timings],
        "values": _shortened(values),
    }
    file.write_text(json.dumps(written))


def _print_timings(timings: list[Timing]) -> None:
    contenders = list(dict.fromkeys(c for timing in timings for c in timing.us))
    rivals = [c for c in contenders if c != OURS]
    shown = rivals if len(rivals) <= MOST_RATIOS else []  # of many the times are enough for one line
    heads = [OURS, *rivals, *(f"{r} / {OURS}" for r in shown)]
    widths = [max(12, len(head) + 2) for head in heads]
    wide = max(len(timing.name) for timing in timings)
    print(f"{'median, us':<{wide}}" + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for timing in timings:
        cells = [_cell(timing.us.get(c), ".1f") for c in [OURS, *rivals]]
        cells += [_cell(timing.ratio.get(r), ".2f") for r in shown]
        print(f"{timing.name:<{wide}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
