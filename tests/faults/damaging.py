"""Damages each file of checkpoints (D1), and changes their descriptions and signs them (D2).

Loading must raise an error that names the file, and change neither the folder nor the target, bit for bit.
"""

import hashlib
import json
import os
import random
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch, manifest
from fbuf.checkpoint.manifest import dump_json
from tests.faults.children import scratch
from tests.faults.counts import Counts
from tests.faults.subjects import Maker, Subject, Target, with_subjects

FLIPS = 32


def snapshot(folder: Path) -> dict[str, Any]:
    """The files of a folder with their modes, inodes, times and contents."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = (about.st_mode, about.st_ino, about.st_mtime_ns, content)
    return found


# ------------------------------------------------------------------ files


def damages(path: Path, others: list[Path], rng: random.Random) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways to damage a file, by name. `others` are files of the same or an older checkpoint that may be in its place."""
    good = path.read_bytes()
    contents = {"empty": b"", "half": good[: len(good) // 2], "a byte less": good[:-1], "more": good + bytes(64)}
    for place in rng.sample(range(8 * len(good)), min(FLIPS, 8 * len(good))):
        byte, bit = divmod(place, 8)
        contents[f"bit {place}"] = good[:byte] + bytes([good[byte] ^ (1 << bit)]) + good[byte + 1 :]
    for other in others:
        contents[f"that of {other.parent.name}/{other.name}"] = other.read_bytes()
    yield "deleted", lambda: None
    for what, content in contents.items():
        if content != good:
            yield what, partial(path.write_bytes, content)
    yield "a folder", path.mkdir
    yield "a pipe", lambda: os.mkfifo(path)
    yield "a link to nothing", lambda: path.symlink_to("nothing")


def _damage(subject: Subject, counts: Counts, most: int, rng: random.Random) -> None:
    """Damage files of a checkpoint, one at a time."""
    target = Target(subject)
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
            (path / name).unlink()
            do()
            outcome = _tried(target, path, name.name)
            where = f"{target.subject.name}, {name}: {what}"
            if name.name == manifest.NAME and what == f"that of {older.name}/{name.name}":
                outcome = "typed error" if "the folder of" in outcome or outcome == "typed error" else outcome
            counts.note(outcome, ("typed error",), where)
            shutil.rmtree(path)


def _tried(target: Target, path: Path, name: str) -> str:
    """Load a damaged checkpoint; "typed error" is right."""
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
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**53, 2**63, 2**70, -(2**70), 0.5, -0.0, 1e308, 3.0, "", "x", "nan"),
    *("\ud800", "\0", "../x", "/etc/passwd", "data-" + "0" * 16, "os:system", "builtins:dict", 300 * "a", "float64"),
    *([], {}, [[]], [0], [None], [0, 0], [2, 3], ["x"] * 3, {"": 0}, {"$float": "nan"}, {"$float": 3}, {"$dict": 3}),
    *({"$array": each} for each in (["float32", [], 0], ["object", [1], 0], ["int8", [2**61, 0], 0], [], 1)),
    *({"$columns": each} for each in ([0, 1, 1, []], [2**61, 2**61, 1, [["int64", [0]]]])),
    *({"$column": [1, 1, 0, [["int8", []]]]}, {"$unknown": 1}, {"$array": 1, "$float": 2}),
    *("int4", "LazyTensorStorage", "RandomSampler", "tensordict"),
]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all nodes of a tree."""
    yield path
    if isinstance(tree, dict | list):
        for key, each in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(each, (*path, key))


def changed(tree: Any, path: tuple[Any, ...], how: str, value: Any) -> Any:
    """A copy of a tree that is changed at a path."""
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
    """A manifest with this body and its digest."""
    head = {"schema": manifest.SCHEMA, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return dump_json(head) + b"\n" + body + b"\n"


def nearby(value: Any, rng: random.Random) -> Any:
    """A slightly different value of the same type."""
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
    "a large number": lambda: b'{"folder":"data-0000000000000000","versions":{},"files":[],"tree":1e999}',
    "a key twice": lambda: b'{"folder":1,"folder":2}',
    "deep lists": lambda: b"[" * 100_000,
    "deep and whole": lambda: (
        b'{"folder":"data-0000000000000000","versions":' + b"[" * 900 + b"]" * 900 + b',"files":[],"tree":1}'
    ),
    "not UTF-8": lambda: b'{"folder":"\xff"}',
    "UTF-16": lambda: '{"folder":1}'.encode("utf-16"),
    "nothing": lambda: b"",
    "a long number": lambda: b"1" * 1_000_000,
    "100 MB": lambda: b"[" + b" " * 100_000_000 + b"]",
    "many lists": lambda: b"[" + b"[]," * 100_000 + b"0]",
}


def _describe(subject: Subject, counts: Counts, most: int, rng: random.Random) -> None:
    """Load checkpoints with changed and signed descriptions."""
    target = Target(subject)
    with scratch("describing") as folder:
        path = Path(folder, "c")
        shutil.copytree(target.subject.new, path)
        body = json.loads((path / manifest.NAME).read_bytes().split(b"\n")[1])
        everywhere = list(places(body))
        tries: list[tuple[str, Callable[[], bytes]]] = [] if counts.cases else list(RAW.items())
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
                wrong = target.used()
                counts.fail(f"{where}: what was loaded cannot be used: {wrong}", times=bool(wrong))
                target.renew()
            else:
                counts.fail(f"{where}: what it was loaded into has changed", times=target.state() != state)
            counts.fail(f"{where}: took {took:.1f} s and {grown} kB", times=took > 1 or grown > 200_000)


def files(size: int, seed: int = 0, makers: list[Maker] | None = None) -> Counts:
    """So many damaged files."""
    return with_subjects(_damage, size, seed, makers, least=40)


def descriptions(size: int, seed: int = 0, makers: list[Maker] | None = None) -> Counts:
    """So many descriptions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parameters that the checkpoint has otherwise
        return with_subjects(_describe, size, seed, makers, least=40)
