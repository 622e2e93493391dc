"""Loses unflushed writes (K4): the operations of a save are recorded, and replayed on a model of a disk.

The power may fail after each operation. Then a write to a file is certain to be there only if the file was flushed since,
and a name only if its folder was; of all others any may be missing. Every loss of up to three of them, of all at once, and
of all but one is tried after each operation; the old checkpoint or the new one must be there.
"""

import contextlib
import itertools
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.children import scratch
from tests.faults.counts import Counts
from tests.faults.file_operations import watched
from tests.faults.subjects import NONE, Maker, Subject, with_subjects

MOST = 3  # that are lost together
Step = tuple[Any, ...]


class Recording:
    """The operations of a save, each with the files and folders that it is about."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._open: dict[int, str] = {}

    def __call__(self, number: int, name: str, when: str, args: tuple[Any, ...], result: Any) -> None:
        if when == "before":
            if name == "close":  # another thread may be given the number at once
                self._open.pop(args[0], None)
            return
        if name == "open":
            self._open[result] = str(args[0])
            if args[1] & os.O_CREAT:
                self.steps.append(("create", str(args[0])))
        elif name == "write":
            self.steps.append(("write", self._open[args[0]], bytes(args[1][:result])))
        elif name == "fsync":
            self.steps.append(("fsync", self._open[args[0]]))
        elif name in ("mkdir", "rmdir", "unlink"):
            self.steps.append((name, str(args[0])))
        elif name in ("rename", "replace", "link"):
            self.steps.append(("link" if name == "link" else "rename", str(args[0]), str(args[1])))


class _Cut(BaseException):
    pass


def record(subject: Subject, path: Path, cut: bool = False) -> list[Step]:
    """Save to that path; what was done. With `cut` it ends right after the new one was put in place."""
    recording = Recording()
    real = shutil.rmtree

    def hook(number: int, name: str, when: str, args: tuple[Any, ...], result: Any) -> None:
        if cut and name == "fsync" and recording.steps[-1][0] == "rename":
            raise _Cut
        recording(number, name, when, args, result)

    def remove(folder: Any, **options: Any) -> None:
        recording.steps.append(("remove", str(folder)))
        kept, recording.steps = recording.steps, []
        real(folder, **options)
        recording.steps = kept

    shutil.rmtree = remove  # type: ignore[assignment]
    try:
        with contextlib.suppress(_Cut), watched(hook, readings=True):
            subject.save(path)
    finally:
        shutil.rmtree = real
    return recording.steps


# ------------------------------------------------------------------ a disk


@dataclass
class Disk:
    """Folders and files; each path is that of a file with its content, or of a folder with None."""

    files: dict[str, bytearray | None] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> "Disk":
        """What is there now."""
        found = {str(each): None if each.is_dir() else bytearray(each.read_bytes()) for each in folder.rglob("*")}
        return cls({str(folder): None, **found})

    def copy(self) -> "Disk":
        """Another; files that two names lead to are still one."""
        known: dict[int, bytearray] = {}
        return Disk(
            {
                path: None if each is None else known.setdefault(id(each), bytearray(each))
                for path, each in self.files.items()
            }
        )

    def do(self, step: Step) -> None:
        """What can still be done after what it needs was lost."""
        name, path, *rest = step
        above = os.path.dirname(path)
        if name == "mkdir" and above in self.files:
            self.files.setdefault(path, None)
        elif name == "create" and above in self.files:
            self.files[path] = bytearray()
        elif name == "write" and (content := self.files.get(path)) is not None:
            content += rest[0]
        elif name == "link" and path in self.files and os.path.dirname(rest[0]) in self.files:
            self.files[rest[0]] = self.files[path]
        elif name == "rename" and path in self.files:
            for each in self._below(path):
                self.files[rest[0] + each.removeprefix(path)] = self.files.pop(each)
            self.files[rest[0]] = self.files.pop(path)
        elif name in ("unlink", "rmdir", "remove"):  # what is below a removed folder is gone, too
            for each in self._below(path):
                del self.files[each]
            self.files.pop(path, None)

    def _below(self, path: str) -> list[str]:
        return [each for each in self.files if each.startswith(f"{path}/")]

    def put(self, folder: Path, to: Path) -> None:
        """Make what is below `folder` as real files elsewhere."""
        for path in sorted(self.files):
            if Path(path) == folder or folder in Path(path).parents:
                place = to / os.path.relpath(path, folder)
                content = self.files[path]
                place.mkdir(parents=True, exist_ok=True) if content is None else place.write_bytes(content)

    def digest(self) -> int:
        """Equal for equal content."""
        return hash(frozenset((path, None if each is None else bytes(each)) for path, each in self.files.items()))


def pending(steps: list[Step]) -> list[int]:
    """The steps of which nothing says that they are on the disk."""
    inode: dict[str, int] = {}  # the step that made the file that a name leads to now
    made: dict[str, int] = {}
    found: set[int] = set()
    by_file: dict[Any, list[int]] = {}
    by_folder: dict[str, list[int]] = {}
    for place, (name, path, *rest) in enumerate(steps):
        if name == "fsync":
            for each in by_file.pop(inode.get(path, path), []) + by_folder.pop(path, []):
                found.discard(each)
            continue
        found.add(place)
        if name == "create":
            made[path] = inode[path] = place
        if name == "write":
            by_file.setdefault(inode.get(path, path), []).append(place)
            continue
        last = rest[0] if rest else path
        by_folder.setdefault(os.path.dirname(last), []).append(place)
        if name in ("rename", "link") and path in inode:
            inode[last] = inode[path]
    return sorted(found)


def losses(steps: list[Step], rng: random.Random, most: int) -> list[tuple[int, frozenset[int]]]:
    """How far it came and what was lost, each once; `most` of them by chance where there are more."""
    found = []
    for come in range(len(steps) + 1):
        open_ = pending(steps[:come])
        for count in range(min(MOST, len(open_)) + 1):
            found += [(come, frozenset(each)) for each in itertools.combinations(open_, count)]
        found += [(come, frozenset(open_) - {each}) for each in open_] + [(come, frozenset(open_))]
    found = list(dict.fromkeys(found))
    return found if len(found) <= most else rng.sample(found, most)


def _lose(subject: Subject, counts: Counts, most: int, rng: random.Random) -> None:
    """Try losses of saving a subject: over an old one, over one whose last save was cut short, and as a first one."""
    if subject.hidden:
        return
    for first, again in ((False, False), (False, True), (True, False)):
        with scratch("losing") as folder:
            path = Path(folder, "above", "c")
            path.parent.mkdir()
            if not first:
                shutil.copytree(subject.old, path)
            before = Disk.of(path.parent)
            steps = [*(record(subject, path, cut=True) if again else ()), *record(subject, path)]
            seen: dict[int, str] = {}
            for place, (come, lost) in enumerate(losses(steps, rng, max(1, most // 3))):
                disk = before.copy()
                for number in range(come):
                    if number not in lost:
                        disk.do(steps[number])
                digest = disk.digest()
                if digest not in seen:
                    to = Path(folder, f"state-{place}")
                    disk.put(path.parent, to)
                    seen[digest] = subject.found(to / "c")
                    shutil.rmtree(to, ignore_errors=True)
                good = ("new",) if come == len(steps) else (NONE if first else "old", "new")
                missing = [steps[each][:2] for each in sorted(lost)]
                where = f"{subject.name}, after {come} {steps[come - 1][:2]}, without {missing}"
                counts.note(seen[digest], good, where)
            counts.outcomes["different"] += len(seen)


def unflushed(size: int, seed: int = 0, makers: list[Maker] | None = None) -> Counts:
    """So many states after losses."""
    return with_subjects(_lose, size, seed, makers, least=400)
