"""Runs the fault tests at length, each in a process of its own, and writes the table of docs/know/reliability.md.

python -m tests.faults             # about an hour
python -m tests.faults --quick     # a tenth of it; the table stays as it is
python -m tests.faults K3          # only this test; its line of the table is replaced
python -m tests.faults K3 --size 9 # in this process; the table stays as it is
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from tests.faults.counts import Counts

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "know" / "reliability.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass(frozen=True)
class Run:
    """A test: its id, what it does, a function `module.name(size) -> Counts` or a test file, and two sizes."""

    name: str
    what: str
    function: str
    size: int = 0
    quick: int = 0


RUNS = [
    Run("K1", "a save is killed at each operation on files", "killing.at_operations", 3000, 300),
    Run("K2", "and at random times, 200 MB", "killing.at_random_times", 500, 20),
    Run("K3", "operations of a save fail or write half", "failing.operations", 2000, 200),
    Run("K4", "what was not flushed is lost", "losing.unflushed", 5000, 500),
    Run("K5", "the writer of a memory map is killed", "memmap.kills", 1000, 50),
    Run("K6", "saves to a full disk", "failing.full_disk", 80, 80),
    Run("K7", "readers and writers of one path", "tests/fbuf/checkpoint/test_folders.py"),
    Run("D1", "each file of a checkpoint is damaged", "damaging.files", 3000, 300),
    Run("D2", "descriptions are made up and signed", "damaging.descriptions", 10000, 500),
    Run("D3", "descriptions of datasets are changed", "described.datasets", 2000, 200),
    Run("M1", "checkpoints of buffers that are built otherwise", "matrix.pairs", 400, 100),
    Run("I1", "bad and extreme arguments", "arguments.calls", 20000, 1500),
    Run("I2", "an exception at a line, or where Python looks for signals", "interrupts.lines", 3000, 600),
    Run("I3", "and in calls that make or change a dataset", "interrupts.datasets", 400, 100),
    Run("C1", "2, 4 and 8 processes write to one buffer", "sharing.races", 10000, 100),
    Run("C2", "processes are killed while they hold the lock", "sharing.all_kills", 200, 10),
    Run("C3", "threads do everything at once, seconds", "threads.everything", 60, 20),
    Run("C4", "checkpoints while others write", "threads.checkpoints", 500, 10),
    Run("C5", "signals to workers", "sharing.all_endings", 48, 6),
    Run("P1", "prefetched batches: slow, failing, many", "threads.prefetches", 100, 10),
    Run("X1", "a call that makes or changes a dataset is killed", "datasets.kills", 400, 80),
    Run("T1", "streams of environments with known episodes", "trajectories.streams", 4000, 200),
    Run("R1", "shards are killed under load", "shards.kills", 50, 5),
    Run("S1", "files that would run code or lead elsewhere", "tests/interop/checkpoint/test_no_code.py"),
]


def counted(each: Run, size: int) -> Counts:
    """Run a test here."""
    if not each.size:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"]
        done = subprocess.run([*command, each.function], capture_output=True, text=True, cwd=ROOT)
        passed = re.search(r"(\d+) passed", done.stdout)
        counts = Counts(cases=int(passed[1]) if passed else 0)
        counts.fail(done.stdout[-4000:], times=int(done.returncode != 0))
        return counts
    module, _, function = each.function.partition(".")
    return getattr(importlib.import_module(f"tests.faults.{module}"), function)(size)


def row(each: Run, size: int) -> tuple[str, bool]:
    """Run a test in another process: its line of the table, and whether nothing was wrong."""
    begun = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults", each.name, "--size", str(size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - begun
    counts = Counts(**json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else Counts(wrong=1)
    if counts.wrong:
        print(f"{each.name}: ended with {done.returncode}: {counts.errors}", file=sys.stderr)
    told = f"{counts.wrong} wrong" if done.returncode == 0 else f"ended with {done.returncode}"
    rest = ", ".join(f"{count} {name}" for name, count in counts.outcomes.items())
    told += f" ({rest})" if rest else ""
    return f"| {each.name} | {each.what} | {counts.cases} | {told} | {seconds:.0f} |", not counts.wrong


def write_table(lines: list[str]) -> None:
    """Put lines into the table of the page, each in the place of the one with its id."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    held = {line.split(" ")[1]: line for line in (*table.splitlines(), *lines) if line.startswith("| ")}
    head = ["| Id | Test | Size | Result | Seconds |", "|---|---|---|---|---|"]
    PAGE.write_text(
        "\n".join([before + BEGIN, *head, *(held[run.name] for run in RUNS if run.name in held), END + after])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ID", help="of the table; all of them by default")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--size", type=int, help="of one test, which runs in this process and prints its counts")
    options = parser.parse_args()
    chosen = [each for each in RUNS if each.name in options.names or not options.names]
    if options.size is not None:
        warnings.simplefilter("ignore")
        print(json.dumps(vars(counted(chosen[0], options.size))))
        return 0
    lines, well = [], True
    for each in chosen:
        line, fine = row(each, each.quick if options.quick else each.size)
        print(line, flush=True)
        lines.append(line)
        well &= fine
    if not options.quick:
        write_table(lines)
    return not well


if __name__ == "__main__":
    sys.exit(main())
