"""What became slower between two files of results, and what faster, with noise taken into account.

    python benchmarks/compare.py OLD.json NEW.json [--least 0.1] [--anyway] [--all]

A line that has a rival in both is judged by its ratio to that rival, which the drift of a machine leaves alone; of
several by the one that was steadiest; without one by its time beside the yardstick that was measured with it, or by its time
alone. It has changed when the middle of the change is past `--least` and the 99 % interval does not hold "no change". The
interval comes from the rounds (bootstrap of their medians) and from what one process and the next of the same code differ
by (`BETWEEN_RUNS`), which more runs average out: one run of each tells changes of 30 %, `run.py --repeats 3` of 17 %.

The exit status is 1 when a line became slower or a target that was met is missed, 2 when files cannot be compared.
"""

import argparse
import dataclasses
import math
import pathlib
import statistics
import sys
from typing import Any

import measure
import numpy as np
import records
import targets

BETWEEN_RUNS = (
    0.07  # standard deviation of the logarithm of a ratio from process to process: lines of the same code that
)
# were run more than once differed by 2 to 20 %
DRIFT = 0.15  # the same of a time with nothing beside it: a machine is half as fast again in one hour as in another
OURSELVES = (measure.OURS, "unwatched")  # what begins so is this library in another form, and no measure for it
DRAWS = 2_000
INTERVAL = (0.5, 99.5)  # percent


@dataclasses.dataclass(frozen=True)
class Change:
    """How much faster a line became: 1.1 is a tenth faster, 0.5 takes twice the time."""

    script: str
    name: str
    beside: str  # what it was measured against
    factor: float
    low: float
    high: float

    def verdict(self, least: float) -> str:
        """ "slower", "faster", "unclear" (the middle is past `least`, noise could be the reason) or "same"."""
        if 1 / (1 + least) < self.factor < 1 + least:
            return "same"
        if self.low <= 1 <= self.high:
            return "unclear"
        return "faster" if self.factor > 1 else "slower"

    def __str__(self) -> str:
        return f"{self.script + ': ' + self.name:<76}{self.factor:>7.2f}x  ({self.low:.2f} to {self.high:.2f}) {self.beside}"


def change(script: str, old: records.Numbers, new: records.Numbers) -> Change | None:
    """From a line of one file to the same line of another; None where rounds were not kept."""
    if not (old["rounds"].get(measure.OURS) and new["rounds"].get(measure.OURS)):
        return None
    common = [each for each in old["rounds"] if each in new["rounds"] and not each.startswith(OURSELVES)]
    rivals = [each for each in common if each != measure.YARDSTICK] or common
    pairs = {rival: (_logarithms(old, rival), _logarithms(new, rival)) for rival in rivals or [None]}
    beside, (before, after) = min(pairs.items(), key=lambda item: sum(map(_noise, item[1])))
    draw = np.random.default_rng(0)
    between = DRIFT if beside is None else BETWEEN_RUNS
    drawn = _drawn(after, between, draw) - _drawn(before, between, draw)
    low, high = np.exp(np.percentile(drawn, INTERVAL))
    factor = math.exp(_middle(after) - _middle(before))
    told = "by its time alone" if beside is None else f"beside {beside}"
    return Change(script, old["name"], told, factor, min(float(low), factor), max(float(high), factor))


def _logarithms(line: records.Numbers, rival: str | None) -> list[np.ndarray]:
    """Of rival / ours in each round, or of 1 / ours; an array a run."""
    ours = [-np.log(run) for run in line["rounds"][measure.OURS]]
    if rival is None:
        return ours
    return [each + np.log(run) for each, run in zip(ours, line["rounds"][rival], strict=True)]


def _middle(runs: list[np.ndarray]) -> float:
    return statistics.fmean(float(np.median(run)) for run in runs)


def _noise(runs: list[np.ndarray]) -> float:
    """Variance of the middle, as far as the rounds tell."""
    return statistics.fmean(float(np.var(run)) / len(run) for run in runs)


def _drawn(runs: list[np.ndarray], between: float, draw: np.random.Generator) -> np.ndarray:
    """Middles as they could have come out."""
    medians = [np.median(run[draw.integers(0, len(run), (DRAWS, len(run)))], axis=1) for run in runs]
    return np.mean(medians, axis=0) + draw.normal(0, between / math.sqrt(len(runs)), DRAWS)


def missed_now(old: dict[str, Any], new: dict[str, Any], least: float) -> list[str]:
    """Values that met their target, do not any more, and are past `least` of what they were."""
    told = []
    for target in targets.TARGETS:
        before, after = target.reached(old), target.reached(new)
        if target.rivals or before is None or after is None:
            continue
        if target.met(before[0]) and not target.met(after[0]) and after[0] > before[0] * (1 + least):
            told.append(f"{target.script}: {target.name}: {before[0]:.3g}, now {after[0]:.3g}, at most {target.bound}")
    return told


def refusals(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Why times of these files do not belong side by side."""
    told: dict[str, list[str]] = {}
    for script in old["scripts"].keys() & new["scripts"].keys():
        for difference in records.differences(old["scripts"][script], new["scripts"][script]):
            told.setdefault(difference, []).append(script)
    return sorted(f"{difference} ({', '.join(sorted(scripts))})" for difference, scripts in told.items())


def changes(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[Change], list[str]]:
    """Every line of both, the slowest first; and in words what only one of them has, or cannot be judged."""
    before, after = records.lines(old), records.lines(new)
    found, untold = [], []
    for key in before.keys() & after.keys():
        one = change(key[0], before[key], after[key])
        if one is None:
            untold.append(f"{key[0]}: {key[1]}: its rounds were not kept")
        else:
            found.append(one)
    untold += [f"{script}: {name}: only in the old file" for script, name in before.keys() - after.keys()]
    untold += [f"{script}: {name}: only in the new file" for script, name in after.keys() - before.keys()]
    untold += [f"{script}: failed in the new file ({why})" for script, why in new["failed"].items()]
    return sorted(found, key=lambda each: (each.factor, each.script, each.name)), sorted(untold)


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What became slower between two files of results, and what faster")
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--least", type=float, default=0.1, help="changes below this are the same (0.1)")
    parser.add_argument("--anyway", action="store_true", help="compare although machines or versions differ")
    parser.add_argument("--all", action="store_true", help="show every line")
    options = parser.parse_args(given)
    try:
        old, new = records.read(options.old), records.read(options.new)
    except records.RecordError as error:
        print(error, file=sys.stderr)
        return 2
    differ = refusals(old, new)
    if differ:
        print("\n".join(["These were not measured on the same ground:", *differ]), file=sys.stderr)
        if not options.anyway:
            print("Measure both on one machine, or pass --anyway.", file=sys.stderr)
            return 2
    for file, each in ((options.old, old), (options.new, new)):
        if disturbed := records.disturbed(each):
            print(f"{file}: measured while others used the machine: {', '.join(disturbed)}", file=sys.stderr)
    found, untold = changes(old, new)
    if not found:
        print("No line is in both files with its rounds: nothing to compare.", file=sys.stderr)
        return 2
    by_verdict: dict[str, list[Change]] = {}
    for each in found:
        by_verdict.setdefault(each.verdict(options.least), []).append(each)
    missed = missed_now(old, new, options.least)
    shown = ("slower", "unclear", "faster", "same") if options.all else ("slower", "unclear", "faster")
    for verdict in shown:
        if by_verdict.get(verdict):
            print("\n".join([f"{verdict}:", *(f"  {each}" for each in by_verdict[verdict])]))
    if missed:
        print("\n".join(["targets that were met:", *(f"  {each}" for each in missed)]))
    if untold:
        print("\n".join(["not compared:", *(f"  {each}" for each in untold)]))
    counts = ", ".join(
        f"{len(by_verdict.get(verdict, []))} {verdict}" for verdict in ("slower", "unclear", "faster", "same")
    )
    print(f"{len(found)} lines: {counts}")
    return 1 if by_verdict.get("slower") or missed else 0


if __name__ == "__main__":
    sys.exit(main())
