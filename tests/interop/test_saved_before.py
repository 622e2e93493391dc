"""What an earlier version saved opens, loads and goes on bit for bit: every case of `saved_before/format1.tar.xz`.

Each case has its own expected content beside it, which that version wrote; see `saved_before/write.py`.
"""

import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from interop import LazyMemmapStorage
from tests.faults.children import scratch
from tests.interop.saved_before.case import Case
from tests.interop.saved_before.cases import CASES
from tests.interop.saved_before.plain import Entry, Seen, differences
from tests.interop.saved_before.write import ARCHIVE

COUNTERS = ("storage.state", "storage.lock")  # files of a folder that change whenever it is opened


def _manifest() -> dict[str, str]:
    """The folders of the cases by name, from the first file of the archive."""
    with tarfile.open(ARCHIVE) as archive:
        first = archive.next()
        assert first is not None and first.name == "manifest.json"
        content = archive.extractfile(first)
        assert content is not None
        described = json.loads(content.read())
    assert described["format"] == 1
    return dict(described["cases"])


FOLDERS = _manifest()
each_case = pytest.mark.parametrize("name", FOLDERS)
KILLED = [name for name in FOLDERS if name.startswith("folder: killed") and "first write" not in name]


@pytest.fixture(scope="module")
def unpacked() -> Iterator[Path]:
    with scratch("saved-before") as root, tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
        yield Path(root)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory: no disk is waited for."""
    with scratch("saved-before") as root:
        yield Path(root)


def saved(unpacked: Path, name: str, path: Path) -> Path:
    """A copy of what was saved, which may be written to."""
    source, target = unpacked / FOLDERS[name] / "saved", path / "saved"
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    return target


def expected(unpacked: Path, name: str) -> Seen:
    found: Seen = json.loads((unpacked / FOLDERS[name] / "expected.json").read_text())
    return found


def seen_of(case: Case[object], path: Path, beside: Path) -> Seen:
    """What is seen of an object after it was loaded."""
    beside.mkdir()
    seen: Seen = json.loads(json.dumps(case.go_on(case.load(case.make(), path), beside)))
    return seen


@each_case
def test_it_goes_on_as_it_was(name: str, unpacked: Path, place: Path) -> None:
    case = CASES[name]
    seen = seen_of(case, saved(unpacked, name, place), place / "scratch")
    assert differences(expected(unpacked, name), seen, case.rounded) == []


def test_every_case_is_in_the_archive() -> None:
    assert sorted(FOLDERS) == sorted(CASES)


# ------------------------------------------------------------------ each comparison can fail


@pytest.mark.slow  # it tests the cases, not the library
@each_case
def test_it_is_not_so_without_what_was_saved(name: str, unpacked: Path, place: Path) -> None:
    """An object that loads nothing does something else."""
    case = CASES[name]
    (place / "scratch").mkdir()
    try:
        seen = json.loads(json.dumps(case.go_on(case.make(), place / "scratch")))
    except Exception:
        return
    assert differences(expected(unpacked, name), seen, case.rounded) != []


def test_a_change_of_any_entry_is_seen(unpacked: Path) -> None:
    for name, case in CASES.items():
        before = expected(unpacked, name)
        after = {entry: _changed(each) for entry, each in before.items()}
        assert len(differences(before, after, case.rounded)) == len(before)
        assert len(differences(before, {}, case.rounded)) == len(differences({}, before, case.rounded)) == len(before)


def _changed(entry: Entry) -> Entry:
    """Another number or text in the place of one; another shape of an empty array."""
    if len(entry) < 3 or isinstance(entry[2], str):
        return [*entry[:-1], f"{entry[-1]} "]
    dtype, shape, (*numbers,) = entry  # type: ignore[misc]
    if not numbers:
        return [dtype, [*shape, 1], numbers]
    last = numbers[-1]
    changed = not last if isinstance(last, bool) else last + 1 if abs(last) < 2**30 else 0
    return [dtype, shape, [*numbers[:-1], changed]]


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_write_had_changed_the_files(name: str, unpacked: Path, place: Path) -> None:
    """The folder is one that must be rolled back: its files are others when it was opened."""
    path = saved(unpacked, name, place)
    before = contents(path)
    storage = LazyMemmapStorage.open(path)
    with storage.lock.held():  # rolls back
        after = contents(path)
    assert before.keys() == after.keys()
    assert [each for each in before if before[each] != after[each] and each not in COUNTERS]


def contents(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}
