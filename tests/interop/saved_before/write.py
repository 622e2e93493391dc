"""Writes `format1.tar.xz`: what the library saved before its storages were built anew, and what it held.

`python -m tests.interop.saved_before.write` makes it, with the code of the tree; with names of cases as arguments it makes
these alone, into the folder of `--into`. The archive is made once for each format, and never again: its data must open with
all later code. So do not run this over an archive that is there. A new format gets an archive of its own.

Each case is a folder:

- `saved`: what was saved, as a program leaves it: a checkpoint, a folder of memory maps, or a file of torch. Pickles are
  for processes of one version, and not kept.
- `expected.json`: what the object that was saved held and did next: rows, lengths, cursor, priorities, the slots and
  weights of the next batches, and all of this after further writes. A JSON object with a name for each array: its dtype, its
  shape and its numbers; or a type and a text. Complex numbers are pairs, bfloat16 numbers are their bits.

`manifest.json`, the first file, lists the cases, and what made them. The rows follow from numbers, see `data.py`; the
histories are in `buffers.py`, `folders.py`, `functional.py` and `others.py`.
"""

import argparse
import json
import platform
import shutil
import tarfile
import tempfile
import warnings
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from tests.interop.saved_before.case import Case
from tests.interop.saved_before.cases import CASES
from tests.interop.saved_before.plain import Seen

ARCHIVE = Path(__file__).with_name("format1.tar.xz")
MOST = 600_000  # bytes


def folder_of(name: str) -> str:
    """The name of the folder of a case."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def write_case(case: Case[object], folder: Path, scratch: Path) -> None:
    """Make, fill and save an object, and see how it goes on."""
    folder.mkdir()
    held = case.make()
    case.fill(held)
    case.save(held, folder / "saved")
    seen: Seen = case.go_on(held, scratch)
    text = json.dumps(seen, separators=(",", ":"))
    assert json.loads(text) == seen or "NaN" in text
    (folder / "expected.json").write_text(text)


def write_all(root: Path, names: Iterable[str]) -> None:
    """The folders of these cases, and the manifest."""
    folders = {name: folder_of(name) for name in names}
    assert len(set(folders.values())) == len(folders)
    for name, folder in folders.items():
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("error")
            tempfile.tempdir = scratch
            try:
                write_case(CASES[name], root / folder, Path(scratch))
            except Exception as error:
                raise RuntimeError(f"the case {name!r} cannot be written") from error
            finally:
                tempfile.tempdir = None
    made_by = {each: version(each) for each in ("fbuf", "torch", "tensordict", "numpy", "jax")}
    described = {"format": 1, "made by": {"python": platform.python_version(), **made_by}, "cases": folders}
    (root / "manifest.json").write_text(json.dumps(described, indent=1))
    _refuse_places(root)


def _refuse_places(root: Path) -> None:
    """No file tells where it was written: it is opened elsewhere."""
    for path in root.rglob("*"):
        assert not path.is_symlink(), path
        if path.is_file():
            content = path.read_bytes()
            assert tempfile.gettempdir().encode() + b"/" not in content and str(root).encode() not in content, path


def pack(root: Path, archive: Path) -> None:
    """One archive of a folder, with nothing of this machine or moment in it."""

    def plainly(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        member.mode = 0o755 if member.isdir() else 0o644
        return member

    with tarfile.open(archive, "w:xz", preset=9) as out:
        out.add(root / "manifest.json", "manifest.json", filter=plainly)
        for path in sorted(path for path in root.iterdir() if path.is_dir()):
            out.add(path, path.name, filter=plainly)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of cases; by default all")
    parser.add_argument("--into", type=Path, help="leave the folders here, without an archive")
    given = parser.parse_args()
    names = given.names or list(CASES)
    if given.into is not None:
        shutil.rmtree(given.into, ignore_errors=True)
        given.into.mkdir(parents=True)
        write_all(given.into, names)
        return
    if ARCHIVE.exists():
        raise SystemExit(f"{ARCHIVE} is there: what was saved before is not saved anew, remove it to make another one")
    with tempfile.TemporaryDirectory() as root:
        write_all(Path(root), names)
        pack(Path(root), ARCHIVE)
    size = ARCHIVE.stat().st_size
    print(f"{len(names)} cases, {size} bytes")
    assert size <= MOST


if __name__ == "__main__":
    main()
