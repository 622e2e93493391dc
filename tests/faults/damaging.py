"""Damages every file of checkpoints in every way, and has descriptions made up that are not what was saved.

Loading must say so by an error that names the file, change nothing in the folder, and leave what it was to be loaded into
as it was, bit for bit.

    python -m tests.faults.damaging --damages 3000 --descriptions 10000 --seed 0
"""

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch, manifest
from fbuf.checkpoint.tree import dump_json
from tests.faults.children import scratch
from tests.faults.killing import Counts
from tests.faults.subjects import Subject, Target, every, targets

FLIPS = 32


def snapshot(folder: Path) -> dict[str, Any]:
    """Everything about the files of a folder, but when they were read."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (about.st_mode, about.st_ino, about.st_mtime_ns, content)
    return found


# ------------------------------------------------------------------ files


def damages(path: Path, others: list[Path], rng: random.Random) -> Iterator[tuple[str, Callable[[], None]]]:
    """What can happen to a file; others are files of the same or of an older checkpoint that it is mistaken for."""
    good = path.read_bytes()

    def put(content: bytes) -> Callable[[], None]:
        def do() -> None:
            path.unlink()
            path.write_bytes(content)

        return do

    contents = {"empty": b"", "half": good[: len(good) // 2], "a byte less": good[:-1], "more": good + bytes(64)}
    for place in rng.sample(range(8 * len(good)), min(FLIPS, 8 * len(good))):
        byte, bit = divmod(place, 8)
        contents[f"bit {place}"] = good[:byte] + bytes([good[byte] ^ (1 << bit)]) + good[byte + 1 :]
    for other in others:
        contents[f"that of {other.parent.name}/{other.name}"] = other.read_bytes()
    yield "deleted", path.unlink
    for what, content in contents.items():
        if content != good:
            yield what, put(content)

    def replace(make: Callable[[], Any]) -> Callable[[], None]:
        def do() -> None:
            path.unlink()
            make()

        return do

    yield "a folder", replace(path.mkdir)
    yield "a pipe", replace(lambda: os.mkfifo(path))
    yield "a link to nothing", replace(lambda: path.symlink_to("nothing"))


def damage_files(target: Target, counts: Counts, most: int, rng: random.Random) -> None:
    """Damage files of a checkpoint, one at a time."""
    with scratch("damaging") as folder:
        path, older = Path(folder, "c"), target.subject.old
        fine = target.subject.new
        names = [each.relative_to(fine) for each in sorted(fine.rglob("*")) if each.is_file()]
        shutil.copytree(fine, path)
        others = [each for each in (*fine.rglob("*"), *older.rglob("*")) if each.is_file()]
        points = []
        for name in names:
            good = (path / name).read_bytes()
            alike = [each for each in others if each.name == name.name and each.read_bytes() != good]
            different = [each for each in others if each.name != name.name and each.read_bytes() != good][:2]
            points += [(name, what, do) for what, do in damages(path / name, alike + different, rng)]
        shutil.rmtree(path)
        for name, what, do in rng.sample(points, min(len(points), most)):
            shutil.copytree(fine, path)
            do()
            outcome = _tried(target, path, name.name)
            where = f"{target.subject.name}, {name}: {what}"
            if name.name == manifest.NAME and what == f"that of {older.name}/{name.name}":
                outcome = "typed error" if "the folder of" in outcome or outcome == "typed error" else outcome
            counts.note(outcome, ("typed error",), where)
            shutil.rmtree(path)


def _tried(target: Target, path: Path, name: str) -> str:
    """Load what is damaged; "typed error" is right."""
    before, state = snapshot(path), target.state()
    try:
        target.load(path)
        outcome = "no error"
    except (CheckpointError, FileNotFoundError) as error:
        known = name in str(error) or (isinstance(error, CheckpointError) and str(path) in str(error))
        outcome = "typed error" if known else f"an error that does not name the file: {error}"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    if snapshot(path) != before:
        return f"{outcome}, and the files have changed"
    if target.state() != state:
        return f"{outcome}, and what it was loaded into has changed"
    return outcome


# ------------------------------------------------------------------ descriptions


ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53, 2**62, 2**63, 2**64, 2**70, -(2**70), 10**30),
    *(0.5, -0.0, 1e308, 1e-320, 3.0, "", "x", "nan", "\ud800", "\0", "../x", "/etc/passwd", "data-" + "0" * 16),
    *(
        [],
        {},
        [[]],
        [0],
        [None],
        {"": 0},
        {"$float": "nan"},
        {"$float": "x"},
        {"$float": 3},
        {"$dict": {}},
        {"$dict": 3},
    ),
    *(
        {"$array": ["float32", [], 0]},
        {"$array": ["object", [1], 0]},
        {"$array": ["int8", [2**61, 0], 0]},
        {"$array": []},
    ),
    *(
        {"$columns": [0, 1, 1, []]},
        {"$columns": [2**61, 2**61, 1, [["int64", [0]]]]},
        {"$column": [1, 1, 0, [["int8", []]]]},
    ),
    *({"$unknown": 1}, {"$array": 1, "$float": 2}, ["x"] * 3, "float64", "int4", "LazyTensorStorage", "RandomSampler"),
    *([0, 0], [1, 1], [2, 3], "os:system", "builtins:dict", "tensordict", 300 * "a"),
]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in it."""
    yield path
    if isinstance(tree, dict | list):
        for key, each in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(each, (*path, key))


def changed(tree: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    """A tree with something else at that place."""
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    key, *rest = path
    if rest:
        copy[key] = changed(copy[key], tuple(rest), how, value)
    elif how == "gone":
        del copy[key]
    elif how == "twice" and isinstance(copy, list):
        copy.insert(key, copy[key])
    elif how == "renamed" and isinstance(copy, dict):
        copy = {(str(value) if each == key else each): held for each, held in copy.items()}
    else:
        copy[key] = value
    return copy


def written(body: bytes) -> bytes:
    """A manifest of that body, with a digest that is right."""
    head = {"schema": manifest.SCHEMA, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return dump_json(head) + b"\n" + body + b"\n"


def nearby(value: Any, rng: random.Random) -> Any:
    """Something of the same type that is a little different."""
    if isinstance(value, bool) or value is None:
        return rng.choice([True, False, None])
    if isinstance(value, int):
        return value + rng.choice([-2, -1, 1, 2, 16, value])
    if isinstance(value, float):
        return rng.choice([value + 1, -value, value / 3, 0.0])
    if isinstance(value, str):
        return rng.choice([value + "x", value[:-1], value[::-1], value.upper()])
    if isinstance(value, list):
        return rng.choice([value[:-1], value[::-1], value * 2, value[1:]])
    return dict(list(value.items())[:-1])


RAW: dict[str, Callable[[], bytes]] = {
    "NaN": lambda: b'{"folder":NaN}',
    "Infinity": lambda: b'{"folder":"data-0000000000000000","versions":{},"files":[],"tree":-Infinity}',
    "a large number": lambda: b'{"folder":"data-0000000000000000","versions":{},"files":[],"tree":1e999}',
    "a key twice": lambda: b'{"folder":1,"folder":2}',
    "deep lists": lambda: b"[" * 100_000,
    "deep dicts": lambda: b'{"":' * 100_000,
    "deep and whole": lambda: (
        b'{"folder":"data-0000000000000000","versions":' + b"[" * 900 + b"]" * 900 + b',"files":[],"tree":1}'
    ),
    "not UTF-8": lambda: b'{"folder":"\xff"}',
    "UTF-16": lambda: '{"folder":1}'.encode("utf-16"),
    "a mark of order": lambda: b"\xef\xbb\xbf{}",
    "nothing": lambda: b"",
    "zeros": lambda: bytes(1000),
    "a long number": lambda: b"1" * 1_000_000,
    "a long name": lambda: b'"' + b"a" * 1_000_000 + b'"',
    "100 MB": lambda: b"[" + b" " * 100_000_000 + b"]",
    "many lists": lambda: b"[" + b"[]," * 100_000 + b"0]",
}


def describe(target: Target, counts: Counts, most: int, rng: random.Random) -> None:
    """Load checkpoints whose description was changed and signed anew."""
    with scratch("describing") as folder:
        path = Path(folder, "c")
        shutil.copytree(target.subject.new, path)
        body = json.loads((path / manifest.NAME).read_bytes().split(b"\n")[1])
        everywhere = list(places(body))
        tries: list[tuple[str, Callable[[], bytes]]] = [] if counts["points"] else list(RAW.items())
        for _ in range(max(0, most - len(tries))):
            at = rng.choice(everywhere)
            how = rng.choice(["put", "put", "near", "near", "gone", "twice", "renamed"])
            value: Any = rng.choice(ODD)
            if how == "near":
                value = body
                for step in at:
                    value = value[step]
                value = nearby(value, rng)
            if not at and how not in ("put", "near"):
                continue
            tree = changed(body, at, how, value)
            tries.append((f"{how} {value!r:.60} at {at}", lambda tree=tree: dump_json(tree)))  # type: ignore[misc]
        for what, make in tries[:most]:
            (path / manifest.NAME).unlink()
            (path / manifest.NAME).write_bytes(written(make()))
            state = target.state()
            begun, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            outcome = "refused"
            try:
                target.load(path)
                outcome = "loaded"
            except (CheckpointCorrupt, CheckpointMismatch, FileNotFoundError):
                pass
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            took = time.process_time() - begun
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
            where = f"{target.subject.name}, {what}"
            counts.note(outcome, ("refused", "loaded"), where)
            if outcome == "loaded":
                if told := target.used():
                    counts.note(f"what was loaded cannot be used: {told}", (), where)
                target.renew()
            elif target.state() != state:
                counts.note("what it was loaded into has changed", (), where)
            if took > 1:
                counts.note(f"took {took:.1f} s", (), where)
            if grown > 200_000:
                counts.note(f"took {grown} kB", (), where)


def run(
    points: int,
    seed: int,
    do: Callable[[Target, Counts, int, random.Random], None],
    name: str,
    makers: list[Callable[[], Subject]] | None = None,
) -> dict[str, Any]:
    """So many points, over subjects in an order of their own."""
    rng = random.Random(seed)
    counts, begun = Counts(), time.monotonic()
    makers = every(seed) if makers is None else makers
    for target in targets(makers):
        if counts["points"] >= points:
            break
        do(target, counts, min(max(40, points // len(makers)), points - counts["points"]), rng)
        counts["subjects"] += 1
    return {"test": name, **counts.result(), "seconds": round(time.monotonic() - begun, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damages", type=int, default=3000)
    parser.add_argument("--descriptions", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of parameters that the checkpoint has otherwise
    results = [run(options.damages, options.seed, damage_files, "damaging")] if options.damages else []
    if options.descriptions:
        results += [run(options.descriptions, options.seed, describe, "describing")]
    for each in results:
        print(json.dumps(each))
    return any(each["wrong"] for each in results)


if __name__ == "__main__":
    sys.exit(main())
