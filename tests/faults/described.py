"""Changes the descriptions of datasets (D3): metadata files of upstream, records of this library, and answers in JSON.

A changed description gives the same rows as before, or a documented error, and leaves nothing behind. Values take the
place of entries that are of another type, out of bounds, deep or many; entries are removed, renamed and come twice.
"""

import json
import random
import shutil
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from interop.datasets.errors import CorruptDatasetError, DatasetError, DownloadError
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.rows import entries
from tests.faults.children import scratch
from tests.faults.counts import Counts
from tests.interop.datasets import sources_minari
from tests.interop.datasets.loaders import LOADERS, Given, Loader, given
from tests.interop.datasets.server import Answer
from tests.interop.datasets.sources_toy import content

SLOWEST = 20.0  # seconds of a construction, in a test that many others run beside
RAW = "\0raw:"  # text that goes into the JSON as it is


def deep(depth: int, inner: Any = 0) -> Any:
    for _ in range(depth):
        inner = [inner]
    return inner


LEAVES: list[tuple[str, Any]] = [
    *((repr(value), value) for value in (None, "", "text", "../../x", "1", True, False, -1, 0, 1, 1.5, [], {}, [[]])),
    *(
        (text, RAW + text)
        for text in ("1e400", "-1e400", "NaN", "Infinity", str(2**31), str(2**63), str(2**64), "-0.0")
    ),
    ("a huge number", RAW + "9" * 400),
    ("a longer number", RAW + "9" * 5_000),
    ("half a character", RAW + '"\\ud800"'),
    ("a zero byte", "a\0b"),
    ("long text", "x" * 10_000),
    ("60 deep", deep(60)),
    ("deeper", RAW + "[" * 300 + "]" * 300),
    ("too deep", RAW + "[" * 100_000 + "]" * 100_000),
    ("many", [0] * 10_000),
]


Change = tuple[str, Callable[[], Any]]  # its name, and what makes the changed value


def changes(value: Any) -> Iterator[Change]:
    """A value with one change each. Text of JSON is changed within too."""
    for name, leaf in LEAVES:
        yield name, partial(_same, leaf)
    yield "in a list", partial(_same, [value])
    yield "in an object", partial(_same, {"value": value})
    if isinstance(value, dict):
        for key in value:
            yield f"without {key}", partial(_renamed, value, key, None)
            yield f"{key} renamed", partial(_renamed, value, key, f"{key}_")
            yield f"{key} twice", partial(Twice, value, key)
            for name, make in changes(value[key]):
                yield f"{key}: {name}", partial(_with, value, key, make)
    elif isinstance(value, list) and value:
        yield "the first twice", partial(_same, [value[0], *value])
        yield "without the first", partial(_same, value[1:])
        yield "the last twice", partial(_same, [*value, value[-1]])
        for place in {0, len(value) - 1}:
            for name, make in changes(value[place]):
                yield f"{place}: {name}", partial(_at, value, place, make)
    elif isinstance(value, str) and value[:1] in ("{", "["):
        for name, make in changes(json.loads(value)):
            yield f"within: {name}", partial(_as_text, make)


def _same(value: Any) -> Any:
    return value


def _renamed(value: dict[str, Any], key: str, new: str | None) -> dict[str, Any]:
    names = {name: new if name == key else name for name in value}
    return {names[name]: each for name, each in value.items() if names[name] is not None}


def _with(value: dict[str, Any], key: str, make: Callable[[], Any]) -> dict[str, Any]:
    return {**value, key: make()}


def _at(value: list[Any], place: int, make: Callable[[], Any]) -> list[Any]:
    return [*value[:place], make(), *value[place + 1 :]]


def _as_text(make: Callable[[], Any]) -> str:
    return encoded(make())


class Twice:
    """An object with one key two times."""

    def __init__(self, value: dict[str, Any], key: str) -> None:
        self.value, self.key = value, key

    def encoded(self) -> str:
        pairs = [*self.value.items(), (self.key, self.value[self.key])]
        return "{" + ", ".join(f"{json.dumps(name)}: {encoded(each)}" for name, each in pairs) + "}"


def encoded(value: Any) -> str:
    """JSON, also with what Python would not write."""
    if isinstance(value, Twice):
        return value.encoded()
    if isinstance(value, str):
        return value.removeprefix(RAW) if value.startswith(RAW) else json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {encoded(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(encoded, value)) + "]"
    return json.dumps(value)


def texts(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Files that are no description."""
    yield from {
        "no file": b"",
        "spaces": b" \n ",
        "half": good[: len(good) // 2],
        "more": good + b"}",
        "two": good + good,
        "a mark": b"\xef\xbb\xbf" + good,
        "UTF-16": good.decode().encode("utf-16"),
        "Latin-1": b"\xff" + good,
        "zeros": bytes(len(good)),
        "a page": b"<!DOCTYPE html><html><title>Sign in</title></html>",
        "deep": b"[" * 1_000_000,
        "deep objects": b'{"a":' * 1_000_000,
        "an open text": b'{"' + b'\\"' * 1_000_000,
        "a key twice": b'{"a": 1, "a": 2}',
    }.items()


# ------------------------------------------------------------------ where descriptions are


@dataclass(frozen=True)
class Subject:
    """A description of a dataset.

    Args:
        name: of it.
        loader: of the dataset.
        path: of its file, below the folder of `Given`; or of an address of the server, with `answered`.
        answered: the description is an answer of the server.
        record: it is in the converted dataset, which is opened.
        allowed: documented errors beside CorruptDatasetError.
        make: makes the upstream files in another way.
        lists: parts of the names of changes that make another list of files: rows of other files are right then.
    """

    name: str
    loader: str
    path: str
    answered: bool = False
    record: bool = False
    allowed: tuple[type[Exception], ...] = ()
    make: Callable[..., Any] | None = None
    lists: tuple[str, ...] = ()


_RECORDS = (ValueError, FileExistsError, DatasetError)
_ARROW = partial(sources_minari.make, data_format="arrow", jpeg_encoding=False)
SUBJECTS = [
    Subject("Minari, HDF5", "minari", "files/toy/all-v0/data/metadata.json"),
    Subject("Minari, Arrow", "minari", "files/toy/all-v0/data/metadata.json", make=_ARROW),
    Subject("Minari, an episode", "minari", "files/toy/all-v0/data/4/metadata.json", make=_ARROW),
    Subject("LeRobot", "lerobot", "files/meta/info.json", allowed=(DatasetError,), lists=("features: ",)),
    Subject("the list of the hub", "roboset", "api/datasets/jdvakil/RoboSet_Sim", answered=True, allowed=(DownloadError,),
            lists=("rfilename", "without the first")),
    Subject("the list of the bucket", "atari_dqn", "storage/v1/b/atari-replay-datasets/o", answered=True,
            allowed=(DownloadError,)),
    Subject("the record of a dataset", "d4rl", "root/hopper-medium-v2/made_from.json", record=True, allowed=_RECORDS),
    Subject("the metadata of a dataset", "d4rl", "root/hopper-medium-v2/metadata.json", record=True),
    Subject("the checksums of the first download", "d4rl", "root/.hopper-medium-v2.sha256.json",
            allowed=(DownloadError,)),
]  # fmt: skip


def _loader(subject: Subject) -> Loader:
    (found,) = [loader for loader in LOADERS if loader.name == subject.loader]
    return Loader(**{**vars(found), "make": subject.make or found.make})


class Tried:
    """Constructs a dataset with changed descriptions."""

    def __init__(self, subject: Subject, dataset: Given, counts: Counts) -> None:
        self.subject, self.dataset, self.counts = subject, dataset, counts
        self.number = 0
        self.expected = dict(entries(self.construct(dataset.folder / "root")[:]))
        place = dataset.folder / subject.path
        if subject.answered:
            self.good = self._sent()
        else:
            place = place if place.exists() else next(dataset.folder.glob(f"root/.*{place.name[-12:]}"))
            self.good = place.read_bytes()
        self.place = place

    def _sent(self) -> bytes:
        """The answer of the server."""
        with urllib.request.urlopen(f"{self.dataset.server.url}/{self.subject.path}?blobs=true", timeout=10) as answer:
            return answer.read()

    def construct(self, root: Path) -> BaseDatasetExperienceReplay:
        more = {"from_local": self.dataset.files} if self.subject.path.startswith("files") else {}
        return self.dataset.construct(root=root, **more)

    def change(self, name: str, text: bytes) -> None:
        """Construct it with this description, in a folder of its own."""
        subject, dataset = self.subject, self.dataset
        self.number += 1
        root = dataset.folder / f"try{self.number}"
        kept = subject.record or ".sha256" in subject.path
        if kept:
            shutil.copytree(dataset.folder / "root", root)
            place = root / self.place.relative_to(dataset.folder / "root")
            place.write_bytes(text)
            if not subject.record:  # as after a removal of the dataset
                shutil.rmtree(root / "hopper-medium-v2")
        elif subject.answered:
            dataset.server.heal(subject.path)
            dataset.server.answer(subject.path, Answer(body=text))
        else:
            self.place.write_bytes(text)
        before = content(root)
        begun = time.monotonic()
        try:
            outcome = self._outcome(root, before)
        finally:
            if not kept and not subject.answered:
                self.place.write_bytes(self.good)
        if time.monotonic() - begun > SLOWEST:
            outcome = f"took {time.monotonic() - begun:.0f} s"
        if outcome == "other rows" and any(part in name for part in subject.lists):
            outcome = "same rows"  # of the files that are listed
        self.counts.note(
            outcome, ("same rows", "typed error", "same rows, metadata refused"), f"{subject.name}: {name}"
        )
        shutil.rmtree(root, ignore_errors=True)

    def _outcome(self, root: Path, before: dict[str, Any]) -> str:
        allowed = (CorruptDatasetError, *self.subject.allowed)
        try:
            data = self.construct(root)
        except allowed as error:
            if len(str(error)) < 20:
                return f"an error without a message: {error!r}"
            left = {path: held for path, held in content(root).items() if ".making/downloads" not in path}
            return "typed error" if left == before else f"left {sorted(left.keys() ^ before.keys())[:5]}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]
        if not _alike(dict(entries(data[:])), self.expected):
            return "other rows"
        try:
            data.metadata
        except allowed:
            return "same rows, metadata refused"
        except Exception as error:
            return f"metadata: {type(error).__name__}: {error}"[:300]
        return "same rows"


def _alike(found: dict[Any, Any], expected: dict[Any, Any]) -> bool:
    """Whether rows have the same values. A description of a shape may divide the values of a row otherwise."""
    if found.keys() != expected.keys():
        return False
    for key, ours in found.items():
        theirs = expected[key]
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            ours, theirs = (each.reshape(len(each), -1).double().nan_to_num() for each in (ours, theirs))
            if ours.shape != theirs.shape or not torch.equal(ours, theirs):
                return False
        elif type(ours) is not type(theirs) or ours.tolist() != theirs.tolist():
            return False
    return True


def datasets(size: int, seed: int = 0, names: tuple[str, ...] = ()) -> Counts:
    """So many changes, divided among the subjects."""
    counts, rng = Counts(), random.Random(seed)
    subjects = [each for each in SUBJECTS if each.name in names or not names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for subject in subjects:
            with scratch("described") as folder, given(_loader(subject), Path(folder)) as (dataset, _):
                tried = Tried(subject, dataset, counts)
                every = [*changes(json.loads(tried.good))]
                share = -(-size // len(subjects))
                files = [*texts(tried.good)]
                for name, text in rng.sample(files, min(len(files), -(-share // 4))):
                    tried.change(name, text)
                for name, make in rng.sample(every, min(share, len(every))):
                    tried.change(name, encoded(make()).encode("utf-8", "surrogatepass"))
    return counts
