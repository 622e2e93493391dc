"""Runs all tests of faults at length, each in a process of its own, and writes the table of docs/reliability.md.

python -m tests.faults            # about an hour
python -m tests.faults --quick    # a tenth of it, and the table is left as it is
python -m tests.faults --only K3  # one of them, of which the table gets the line
"""

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass(frozen=True)
class Run:
    """A test: its id, what it does, the command, and that of its quick form."""

    name: str
    what: str
    command: str
    quick: str


RUNS = [
    Run("K1", "whoever saves is killed at each operation on files", "killing --points 3000", "killing --points 300"),
    Run("K2", "and at random times, 200 MB", "killing --random 500", "killing --random 20 --megabytes 50"),
    Run("K3", "operations fail, write half, find the disk full", "failing --points 2000", "failing --points 200"),
    Run("K4", "what was not flushed is lost", "losing --states 5000", "losing --states 500"),
    Run("K5", "whoever writes to a memory map is killed", "memmap --kills 1000", "memmap --kills 50"),
    Run("K7", "readers and writers of one path", "pytest tests/fbuf/checkpoint/test_folders.py", ""),
    Run(
        "D1",
        "each file of a checkpoint is damaged",
        "damaging --damages 3000 --descriptions 0",
        "damaging --damages 300 --descriptions 0",
    ),
    Run(
        "D2",
        "descriptions are made up and signed",
        "damaging --damages 0 --descriptions 10000",
        "damaging --damages 0 --descriptions 500",
    ),
    Run("M1", "checkpoints of buffers that are built otherwise", "matrix --pairs 400", "matrix --pairs 100"),
    Run("I1", "bad and extreme arguments", "arguments", "arguments --every 10"),
    Run(
        "C1",
        "2, 4 and 8 processes write to one buffer",
        "sharing --cells race --batches 10000",
        "sharing --cells race --batches 300 --methods fork",
    ),
    Run(
        "C2",
        "processes are killed while they hold the lock",
        "sharing --cells kills --kills 200",
        "sharing --cells kills --kills 10",
    ),
    Run(
        "C3",
        "threads do everything at once",
        "threads --seconds 60 --dumps 0 --prefetches 0",
        "threads --seconds 20 --dumps 0 --prefetches 0",
    ),
    Run(
        "C4",
        "checkpoints while others write",
        "threads --seconds 0 --dumps 500 --prefetches 0",
        "threads --seconds 0 --dumps 10 --prefetches 0",
    ),
    Run("C5", "signals to workers", "sharing --cells endings", "sharing --cells endings --methods fork"),
    Run(
        "P1",
        "batches drawn ahead: slow, failing, many",
        "threads --seconds 0 --dumps 0 --prefetches 100",
        "threads --seconds 0 --dumps 0 --prefetches 10",
    ),
    Run(
        "X1",
        "whoever downloads, converts, splits, transforms or removes a dataset is killed",
        "datasets --points 400 --random 40",
        "datasets --points 80 --random 8",
    ),
    Run("R1", "shards are killed under load", "shards --kills 50", "shards --kills 5"),
    Run("S1", "files that would run code or lead elsewhere", "pytest tests/interop/checkpoint/test_no_code.py", ""),
]


def arguments_of(command: str) -> list[str]:
    """Those of the interpreter."""
    name, *rest = command.split()
    if name == "pytest":
        return ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", *rest]
    return ["-m", f"tests.faults.{name}", *rest]


def shown(command: str) -> str:
    """As one would type it."""
    return command if command.startswith("pytest") else f"python -m tests.faults.{command}"


def result_of(said: str) -> tuple[int, int, str]:
    """How much was tried, how much of it was wrong, and what else was counted."""
    size = wrong = 0
    rest: list[str] = []
    for line in said.splitlines():
        if found := re.match(r"(\d+) (passed|kills)", line):
            size += int(found[1])
        elif line.startswith("all "):
            told = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", line)}
            size += told.pop("tried", 0)
            reads = told.pop("reads", 0)
            rest += [f"{reads} batches read"] if reads else []
            wrong += sum(told.values())
        elif line.startswith("{"):
            told = json.loads(line)
            size, wrong = size + told.get("points", 0), wrong + told.get("wrong", 0)
            skip = {"points", "wrong", "test", "seconds", "first wrong", "operations", "megabytes"}
            rest += [f"{value} {key}" for key, value in told.items() if key not in skip and value not in (0, [], "")]
    return size, wrong, ", ".join(rest)


def run(each: Run, quick: bool) -> tuple[str, bool]:
    """The line of the table, and whether all is well."""
    command = (each.quick or each.command) if quick else each.command
    begun = time.monotonic()
    done = subprocess.run([sys.executable, *arguments_of(command)], capture_output=True, text=True)
    seconds = time.monotonic() - begun
    size, wrong, rest = result_of(done.stdout)
    if done.returncode:
        sys.stderr.write(f"{shown(command)}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n")
    told = f"{wrong} wrong" if done.returncode == 0 or wrong else f"ended with {done.returncode}"
    told += f" ({rest})" if rest else ""
    line = f"| {each.name} | {each.what} | {size} | {told} | {seconds:.0f} | `{shown(command)}` |"
    return line, done.returncode == 0 and not wrong


def written(lines: list[str]) -> None:
    """Put lines into the table of the page, each in the place of the one with its id."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    held = {line.split(" ")[1]: line for line in (*table.splitlines(), *lines) if line.startswith("| ")}
    head = ["| Id | Test | Size | Result | Seconds | Command |", "|---|---|---|---|---|---|"]
    rows = [held[each.name] for each in RUNS if each.name in held]
    PAGE.write_text("\n".join([before + BEGIN, *head, *rows, END + after]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", choices=[each.name for each in RUNS])
    options = parser.parse_args()
    lines, well = [], True
    for each in RUNS:
        if options.only and each.name not in options.only:
            continue
        line, fine = run(each, options.quick)
        print(line, flush=True)
        lines.append(line)
        well &= fine
    if not options.quick:
        written(lines)
    return not well


if __name__ == "__main__":
    sys.exit(main())
