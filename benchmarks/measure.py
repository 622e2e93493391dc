"""How the benchmarks time, describe and print: the part that all of them share.

Contenders take turns in one process, a short burst each, and the order turns round every round, so slow drift of the
machine meets all alike. A number is the median over all calls; a ratio is the median over rounds of rival / ours.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

OURS = "ours"
ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "numpy", "torch", "tensordict", "torchrl", "cpprb", "flashbax")
MICROSECOND = 1e6
LOAD = os.getloadavg()[0]  # before anything is measured


@dataclasses.dataclass(frozen=True)
class Timing:
    """One line of a table: what was done, and how long it took each contender."""

    name: str
    us: dict[str, float]  # median of one call; OURS is always there
    ratio: dict[str, float]  # rival / ours: above 1 we are faster


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
    most, budget, whole = (5, 0.01, 0.5) if quick else (41, 0.03, 4.0)  # rounds; seconds of a burst and of all
    bursts, one_round = {}, 0.0
    for contender, call in contenders.items():
        for _ in range(2):  # compile, touch memory, fill caches
            call()
        cost = max(_seconds(call), 1e-7)
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
            burst = [_seconds(call) for _ in range(bursts[contender])]
            taken[contender] += burst
            middles[contender].append(statistics.median(burst))
    ratios = {
        contender: statistics.median(a / b for a, b in zip(middles[contender], middles[OURS], strict=True))
        for contender in contenders
        if contender != OURS
    }
    return Timing(name, {c: statistics.median(times) * MICROSECOND for c, times in taken.items()}, ratios)


def _seconds(call: Callable[[], Any]) -> float:
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
    return {
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {platform.system()}",
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
        "load": round(LOAD, 1),
        "torch threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "fbuf", "interop")
        return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def report(title: str, timings: list[Timing], values: dict[str, float], file: pathlib.Path | None) -> None:
    """Print the table, and write the same numbers to `file`."""
    facts = about()
    print(f"\n{title}")
    print(
        f"{facts['machine']}; python {facts['python']}; load {facts['load']}; commit {facts['commit']}; {facts['time']}"
    )
    print("; ".join(f"{package} {version}" for package, version in facts["versions"].items()))
    print(f"load before {facts['load']}; torch threads: {facts['torch threads']}")
    if len(os.sched_getaffinity(0)) < LOAD:
        print("The machine was busy. torch's threads then wait for one another: repeat this when it is idle, or with")
        print("OMP_NUM_THREADS=1, before a ratio against torch is believed.")
    if timings:
        _print_timings(timings)
    wide = max(map(len, values), default=0)
    for name, value in values.items():
        print(f"{name:<{wide}}{value:>12.3f}")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [dataclasses.asdict(timing) for timing in timings]
        file.write_text(json.dumps({"title": title, "about": facts, "timings": rows, "values": values}, indent=1))


def _print_timings(timings: list[Timing]) -> None:
    contenders = list(dict.fromkeys(c for timing in timings for c in timing.us))
    rivals = [c for c in contenders if c != OURS]
    heads = [OURS, *rivals, *(f"{r} / {OURS}" for r in rivals)]
    widths = [max(12, len(head) + 2) for head in heads]
    wide = max(len(timing.name) for timing in timings)
    print(f"{'median, us':<{wide}}" + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for timing in timings:
        cells = [_cell(timing.us.get(c), ".1f") for c in [OURS, *rivals]]
        cells += [_cell(timing.ratio.get(r), ".2f") for r in rivals]
        print(f"{timing.name:<{wide}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
