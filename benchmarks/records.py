"""Files of results: one of many scripts that `run.py` writes, or one of a single script (`--json`).

    {"schema": 1, "scripts": {"torch_uniform": {...}, ...}, "failed": {"ted": "exit status 1"}}

A script's part holds "title", "about" (machine, versions, commit, load, date), "timings" and "values". A timing has
"name", "us" (the median of one call of each contender), "ratio" (rival / ours), "rounds" (for each contender one list a
run: the medians of its rounds), and "us_spread" and "ratio_spread" (their quartiles over all rounds).
"""

import collections
import itertools
import json
import os
import pathlib
import statistics
from typing import Any

import measure

Numbers = dict[str, Any]  # of one script
Lines = dict[tuple[str, str], Numbers]  # (script, name of a line) -> timing


class RecordError(ValueError):
    """A file that cannot be used as results."""


def read(file: pathlib.Path) -> dict[str, Any]:
    """The results in a file; those of a single script as results of one. RecordError for anything else."""
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        raise RecordError(f"{file} is not there: write it with `python benchmarks/run.py --json {file}`") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{file} is not JSON: {error}") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != measure.SCHEMA:
        raise RecordError(f"{file} has schema {schema}, and schema {measure.SCHEMA} is needed: measure again")
    if "scripts" in found:
        return found
    return {"schema": schema, "scripts": {found["script"]: joined([found])}, "failed": {}}


def write(file: pathlib.Path, results: dict[str, Any]) -> None:
    """Whole or not at all: a run that is stopped leaves what it had."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(file.name + ".tmp")
    scratch.write_text(json.dumps(results))
    os.replace(scratch, file)


def joined(runs: list[Numbers]) -> Numbers:
    """Several runs of one script as one: all their rounds, and medians over them."""
    values = collections.defaultdict(list)
    timings: dict[str, list[Numbers]] = collections.defaultdict(list)
    for run in runs:
        for name, value in run["values"].items():
            values[name].append(value)
        for timing in run["timings"]:
            timings[timing["name"]].append(timing)
    used = [run["about"].get("cores used by others") or 0 for run in runs]
    return runs[0] | {
        "about": runs[0]["about"] | {"cores used by others": max(used)},
        "timings": [_joined_line(name, lines) for name, lines in timings.items()],
        "values": {name: statistics.median(each) for name, each in values.items()},
    }


def _joined_line(name: str, lines: list[Numbers]) -> Numbers:
    """A contender that was not there in one of the runs is left out."""
    us, ratio, rounds = (_in_all([line[what] for line in lines]) for what in ("us", "ratio", "rounds"))
    rounds = {contender: list(itertools.chain(*runs)) for contender, runs in rounds.items()}
    measured = rounds.get(measure.OURS)
    return {
        "name": name,
        "us": {contender: statistics.median(each) for contender, each in us.items()},
        "ratio": {rival: statistics.median(each) for rival, each in ratio.items()},
        "us_spread": {contender: quartiles(rounds[contender]) for contender in us if contender in rounds},
        "ratio_spread": {rival: quartiles(ratios(rounds, rival)) for rival in ratio if measured and rival in rounds},
        "rounds": rounds,
    }


def _in_all(dicts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Lists of the values of keys that all have."""
    return {key: [each[key] for each in dicts] for key in dicts[0] if all(key in each for each in dicts)}


def ratios(rounds: dict[str, list[list[float]]], rival: str) -> list[list[float]]:
    """Rival / ours of each round of each run."""
    return [
        [theirs / ours for theirs, ours in zip(*pair, strict=True)]
        for pair in zip(rounds[rival], rounds[measure.OURS], strict=True)
    ]


def quartiles(runs: list[list[float]]) -> list[float]:
    """First and third, over all rounds of all runs."""
    numbers = list(itertools.chain(*runs))
    if len(numbers) < 2:
        return [numbers[0], numbers[0]]
    first, _, third = statistics.quantiles(numbers, n=4, method="inclusive")
    return [float(f"{first:.5g}"), float(f"{third:.5g}")]


def lines(results: dict[str, Any]) -> Lines:
    """Every timing of every script."""
    return {
        (script, timing["name"]): timing
        for script, numbers in results["scripts"].items()
        for timing in numbers["timings"]
    }


def disturbed(results: dict[str, Any]) -> list[str]:
    """Scripts during which other processes used the machine, and how many cores."""
    used = {script: numbers["about"].get("cores used by others") for script, numbers in results["scripts"].items()}
    return [f"{script} ({cores} cores)" for script, cores in used.items() if cores and cores > measure.BUSY]


def differences(one: Numbers, other: Numbers) -> list[str]:
    """What is not the same about two machines, in words: nothing where their times can be set side by side."""
    told = [
        f"{what}: {one['about'].get(what)} and {other['about'].get(what)}"
        for what in ("machine", "card", "python", "torch threads", "quick")
        if one["about"].get(what) != other["about"].get(what)
    ]
    ours, theirs = one["about"]["versions"], other["about"]["versions"]
    told += [
        f"{package}: {ours.get(package)} and {theirs.get(package)}"
        for package in sorted(ours.keys() | theirs.keys())
        if ours.get(package) != theirs.get(package)
    ]
    return told
