"""Compares every checksum at a path, streamed, and reports what is damaged by name."""

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, Fields, Reading, files, json_text
from fbuf.checkpoint.manifest import NAME, FileEntry, Manifest
from interop.looking import file_contents, page_checksums
from interop.looking.path_kinds import Kind, below, kind_of, minari_data
from interop.looking.tables import size
from interop.shared import checksums
from interop.shared.folder_description import (
    ACTIVE,
    DESCRIPTION,
    LOCK,
    STATE,
    SUMS,
    check_file,
    counters_of,
    description,
    words_of,
)
from interop.shared.published_folder import RECORD, check_files

Progress = Callable[[int, int], None]
_FAULTS = (CheckpointError, OSError, EOFError, ValueError)
_FOR_OTHERS = "meta.json"
_BATCH = 1 << 14  # rows of Parquet that are read at once


@dataclass(frozen=True)
class Damage:
    """A file that is not what was written.

    Attributes:
        file: its name.
        what: what is wrong with it.
        holds: the keys of items and the values of components in it, such as "rows 0 to 99 of next.reward"; "" if not known.
    """

    file: str
    what: str
    holds: str = ""

    def __str__(self) -> str:
        text = self.what if self.file in self.what else f"{self.file}: {self.what}"
        return f"{text}. It holds {self.holds}" if self.holds else text


@dataclass
class Report:
    """What `verify` has found. `print` shows it, `to_dict()` gives plain values.

    Attributes:
        path, kind: as of `inspect`.
        files: how many were looked at.
        bytes: how many bytes were compared with a checksum.
        damaged: what is damaged, by file.
        notes: what could not be compared, and why.
    """

    path: str
    kind: Kind
    files: int = 0
    bytes: int = 0
    damaged: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no damage was found. Files without checksums are checked for their sizes: see `notes`."""
        return not self.damaged

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        damaged = [asdict(each) for each in self.damaged]
        own = {name: getattr(self, name) for name in ("path", "kind", "files", "bytes", "ok", "notes")}
        return {**own, "damaged": damaged}

    def __str__(self) -> str:
        state = "no damage found" if self.ok else f"{len(self.damaged)} damaged"
        lines = [f"{self.path}: {state} in {self.files} files, {size(self.bytes)} compared with checksums"]
        lines += [f"  damaged: {each}" for each in self.damaged]
        return "\n".join([*lines, *(f"  note: {each}" for each in self.notes)])


class _Counter:
    """Tells a callback how many bytes of how many were read, from any thread."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += count
                self._progress(self._done, self._total)


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> Report:
    """Compare every checksum at a path, in a few MiB of memory whatever its size. Damage is reported, never raised.

    - Checkpoints: the digest of the manifest, and the CRC-32 of each file.
    - Folders of rows, and datasets that were converted to rows: description, counters, sizes, and the CRC-32 of each block
      where there are checksums (`LazyMemmapStorage(..., checksums=True)` or `seal`). A note says where there are none.
    - Parquet and H5 files of datasets: every page is read and decoded, and compared with its checksum where the file has
      one. A note says where it has none: then a changed value is not seen. They need pyarrow and h5py.
    - Minari, LeRobot and hub folders: also what their readers refuse, such as missing files and episodes; videos are not
      decoded.
    - Other folders: everything of these kinds below.

    Args:
        path: a file or folder.
        progress: is called with the bytes read so far, and those to be read; from several threads, one at a time.

    FileNotFoundError where nothing is there, `UnknownPathError` for what this library does not read.
    """
    root = Path(path)
    kind = kind_of(root)
    report = Report(str(root), kind)
    if kind == "folder":
        for each in below(root):
            _join(report, verify(each, progress))
        return report
    with _noted(report, root):
        _CHECKS[kind](root, report, progress)
    return report


def seal(path: str | os.PathLike[str], progress: Progress | None = None) -> None:
    """Flush the rows of a folder that no storage has open, and write their checksums for `verify`. O(bytes).

    RuntimeError where a storage has it open: `LazyMemmapStorage(..., checksums=True)` does it at `close`. Otherwise the
    errors of `LazyMemmapStorage.open`. Until the next `open` for writing, what is there is what `verify` compares with. An
    edit through a view that outlived its storage counts as damage.
    """
    import fcntl

    root = Path(path)
    description(root)
    with open(root / LOCK, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"{root} is in use: close its storage first. One that was built with checksums=True seals the folder itself"
            ) from None
        if words_of(root / STATE)[ACTIVE]:
            raise RuntimeError(f"{root}: a write was cut off. Open the storage for writing once, which rolls it back")
        total = sum(os.path.getsize(root / name) for name in checksums.files_of(root))
        checksums.seal(root, _Counter(progress, total))


def _join(report: Report, other: Report) -> None:
    report.files += other.files
    report.bytes += other.bytes
    report.damaged += [replace(each, file=str(Path(other.path) / each.file)) for each in other.damaged]
    report.notes += [each if other.path in each else f"{other.path}: {each}" for each in other.notes]


@contextlib.contextmanager
def _noted(report: Report, name: Path | str) -> Iterator[None]:
    """Reports what goes wrong as damage of a file."""
    try:
        yield
    except _FAULTS as error:
        report.damaged.append(Damage(str(name), str(error) or type(error).__name__))


# ------------------------------------------------------------------ checkpoints


def _checkpoint(root: Path, report: Report, progress: Progress | None) -> None:
    while True:
        found = Manifest.read(root)
        try:
            damaged = _damaged_files(root, found, progress)
        except _FAULTS:
            if _was_replaced(root, found):
                continue
            raise
        if not damaged or not _was_replaced(root, found):
            break
    holds = file_contents.of_checkpoint(found) if damaged else {}
    report.files = len(found.files) + 1
    report.damaged = [replace(each, holds=holds.get(each.file, "")) for each in damaged]
    report.bytes = sum(each.size for each in found.files) + os.path.getsize(root / NAME)


def _was_replaced(root: Path, found: Manifest) -> bool:
    """Whether another checkpoint has taken the place of this one meanwhile: what was missing in it is no damage."""
    with contextlib.suppress(*_FAULTS):
        return Manifest.read(root).folder != found.folder
    return False


def _damaged_files(root: Path, found: Manifest, progress: Progress | None) -> list[Damage]:
    counter = _Counter(progress, sum(each.size for each in found.files))
    jobs = [partial(_damage_of, root / found.folder, each, counter) for each in found.files]
    damaged = [each for each in files.at_once(jobs) if each is not None]
    if not damaged:
        with Reading(root, "size"):  # the tree describes its arrays as they are
            pass
    return damaged


def _damage_of(folder: Path, entry: FileEntry, counter: _Counter) -> Damage | None:
    """Read a file; what is wrong with it."""
    path = folder
    try:
        for part in entry.name.split("/"):
            path = path / part
            if path.is_symlink():
                return Damage(entry.name, f"{path}: a link, where a file was written")
        with files.opened(path) as (handle, found):
            if found != entry.size:
                return Damage(entry.name, f"{path}: has {found} bytes of {entry.size}, or is no plain file")
            checksum = 0
            for piece in files.chunks(entry.size):
                files.read_into(handle, piece)
                checksum = zlib.crc32(piece.data, checksum)
                counter(piece.size)
    except (OSError, EOFError) as error:
        return Damage(entry.name, f"{path}: {error or 'ends too soon'}")
    return None if checksum == entry.checksum else Damage(entry.name, f"{path}: its checksum is another")


# ------------------------------------------------------------------ folders of rows


def _rows(root: Path, report: Report, progress: Progress | None) -> None:
    saved = description(root)  # its own checksum
    sizes = saved.fields("files")
    report.files += 1
    report.bytes += os.path.getsize(root / DESCRIPTION)
    for name in sizes:
        report.files += 1
        with _noted(report, name):
            # The undo record may have grown since the description was written.
            check_file(root / name, None if name == STATE else sizes.whole(name))
    with _noted(report, STATE):
        counters = counters_of(root / STATE)
        rows = saved.whole("rows")
        if not (
            0 <= counters["size"] <= rows and 0 <= counters["cursor"] < max(rows, 1) and min(counters.values()) >= 0
        ):
            raise ValueError(f"the counters {counters} are none of a storage of {rows} rows")
        if words_of(root / STATE)[ACTIVE]:
            report.notes.append("a write is under way, or was cut off: the next open(mode='r+') rolls it back")
    if os.path.lexists(root / RECORD):
        _record(root, report)
    _described_for_others(root, report, saved)
    with _noted(report, SUMS):
        sums = checksums.Sums.read(root)
        if sums is None or sums.is_outdated(root):
            there = os.path.lexists(root / SUMS)
            why = "its checksums are outdated: the last writer has not closed it" if there else "it has no checksums"
            report.notes.append(f"only sizes were checked, {why}. interop.seal({str(root)!r}) writes them")
            return
        _blocks(root, report, sums, saved, progress)


def _described_for_others(root: Path, report: Report, saved: Fields) -> None:
    """The files from which tensordict opens the folder say what the description says."""
    leaves = {tuple(path): (f"torch.{dtype}", list(shape)) for path, shape, dtype in saved.any("layout")["leaves"]}
    for each in sorted(root.rglob(_FOR_OTHERS)):
        folder = each.parent.relative_to(root).parts
        with _noted(report, str(each.relative_to(root))):
            for key, entry in json_text.parsed(each.read_bytes(), str(each), CheckpointCorrupt).items():
                known = leaves.get((*folder, key))
                if known is None or not isinstance(entry, dict):
                    continue
                dtype, shape = entry.get("dtype"), list(entry.get("shape") or ())
                if dtype != known[0] or shape[len(shape) - len(known[1]) :] != known[1]:
                    raise CheckpointCorrupt(
                        f"{each} says that {key!r} has {dtype} of shape {shape}, items have {known[0]} of shape {known[1]}"
                    )


def _record(root: Path, report: Report) -> None:
    import json

    with _noted(report, RECORD):
        named = json.loads((root / RECORD).read_bytes())["files"]
        check_files(root, {name: size for name, size in named.items() if name != STATE})


def _blocks(root: Path, report: Report, sums: checksums.Sums, saved: Fields, progress: Progress | None) -> None:
    if dict(sums.counters) != counters_of(root / STATE):
        report.damaged.append(Damage(STATE, f"{root / STATE}: its counters are others than when it was sealed"))
    counter = _Counter(progress, sum(size for size, _ in sums.files.values()))
    known = {each.file for each in report.damaged}
    for name in sorted({*sums.files, *checksums.files_of(root)}):
        if name in known:
            continue
        with _noted(report, name):
            if name not in sums.files:
                raise ValueError(f"{root / name} was added after the folder was sealed")
            there, digits = sums.files[name]
            if os.path.getsize(root / name) != there:
                raise ValueError(f"{root / name} has {os.path.getsize(root / name)} bytes of {there}")
            wanted = np.array([int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)], np.int64)
            found = np.fromiter(checksums.blocks_of(root, name, sums.block, counter), np.int64)
            report.bytes += there
            wrong = np.flatnonzero(wanted != found) if wanted.size == found.size else np.arange(found.size)
            if wrong.size:
                start, stop = int(wrong[0]) * sums.block, min((int(wrong[0]) + 1) * sums.block, there)
                what = f"{wrong.size} of {found.size} blocks are damaged, the first one at byte {start:,}"
                holds = file_contents.of_rows(saved, name, start, stop - 1)
                report.damaged.append(Damage(name, f"{root / name}: {what}", holds))


# ------------------------------------------------------------------ datasets


def _parquet(paths: list[Path], report: Report) -> None:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        report.notes.append("Parquet files are checked where pyarrow is installed: pip install 'fbuf[datasets]'")
        return
    without = 0
    for path in paths:
        report.files += 1
        try:
            with parquet.ParquetFile(path, page_checksum_verification=True) as file:
                for _ in file.iter_batches(_BATCH):
                    pass
                compared, rest = page_checksums.bytes_of(path, file.metadata)
        except (ArrowException, *_FAULTS) as error:
            report.damaged.append(Damage(str(path), f"{path}: {error}"))
            continue
        report.bytes += compared
        without += bool(rest)
    if without:
        report.notes.append(
            f"{without} Parquet files have no checksums for some pages: these were only read and decoded"
        )


def _arrow(paths: list[Path], report: Report) -> None:
    """Read every batch of files of Arrow, which have no checksums."""
    try:
        from pyarrow import ArrowException, ipc, memory_map
    except ImportError:
        report.notes.append("Arrow files are checked where pyarrow is installed: pip install 'fbuf[datasets]'")
        return
    for path in paths:
        report.files += 1
        try:
            with memory_map(str(path)) as file:
                reader = ipc.open_file(file)
                for number in range(reader.num_record_batches):
                    reader.get_batch(number).validate(full=True)
        except (ArrowException, OSError) as error:
            report.damaged.append(Damage(str(path), f"{path}: {error}"))
    if paths:
        report.notes.append(f"{len(paths)} Arrow files have no checksums: they were read, and nothing was compared")


def _h5(path: Path, report: Report, progress: Progress | None = None) -> None:
    try:
        import h5py
    except ImportError:
        report.notes.append("H5 files are checked where h5py is installed: pip install h5py")
        return
    report.files += 1
    without: list[str] = []

    def visit(name: str, node: object) -> None:
        if isinstance(node, h5py.Dataset) and node.shape:
            if node.fletcher32:
                report.bytes += node.id.get_storage_size()
            elif node.size:
                without.append(name)
            step = max(1, (1 << 22) * node.shape[0] // max(node.nbytes, 1))
            for start in range(0, node.shape[0], step):
                node[start : start + step]

    with _noted(report, path):
        try:
            with h5py.File(path, "r") as file:
                file.visititems(visit)
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"{path}: {error}") from error
    if without:
        report.notes.append(
            f"{path}: {len(without)} of its arrays have no checksums, as {without[0]}: these were only read and decoded"
        )


def _as_read(root: Path, report: Report, reader: str, **options: object) -> None:
    """What the reader of a dataset refuses is damage: missing files, wrong counts, other columns. O(rows).

    `reader` is its module and class, `options` are arguments besides the id. Where packages that it needs are missing, a
    note says so.
    """
    from importlib import import_module  # here: they import torch

    module, _, name = reader.rpartition(".")
    try:
        source = getattr(import_module(f"interop.datasets.{module}"), name)(root.absolute().name, **options)
        for part in source.parts(root):
            for _ in source.read(part):
                pass
        source.metadata(root)
    except ImportError as error:
        report.notes.append(f"whether files and episodes are complete was not checked: {error}")
    except (RuntimeError, *_FAULTS) as error:  # errors of datasets are RuntimeErrors
        if not report.damaged:  # else what is wrong is known already, and by which file
            report.damaged.append(Damage(str(root), str(error) or type(error).__name__))


def _hub(root: Path, report: Report, progress: Progress | None) -> None:
    _parquet(sorted((root / "data").rglob("*.parquet")), report)
    _as_read(root, report, "hub_folder.HubFolderSource")


def _lerobot(root: Path, report: Report, progress: Progress | None) -> None:
    import json

    with _noted(report, "meta/info.json"):
        json.loads((root / "meta" / "info.json").read_bytes())
    _parquet(sorted(root.rglob("*.parquet")), report)
    videos = [each for each in root.rglob("*.mp4") if each.is_file()]
    report.damaged += [Damage(str(each), f"{each}: is empty") for each in videos if not each.stat().st_size]
    _as_read(root, report, "lerobot.LeRobotSource", video=False)
    if videos:
        report.notes.append(f"{len(videos)} videos have no checksums: only that they are there was checked")


def _minari(root: Path, report: Report, progress: Progress | None) -> None:
    data = minari_data(root)
    assert data is not None
    if (data / "main_data.hdf5").is_file():
        _h5(data / "main_data.hdf5", report)
    _parquet(sorted(data.rglob("*.parquet")), report)
    _arrow(sorted(data.rglob("*.arrow")), report)
    _as_read(root, report, "minari_data.MinariSource")


def _torchrl(root: Path, report: Report, progress: Progress | None) -> None:
    report.files = sum(1 for each in root.rglob("*") if each.is_file())
    report.notes.append("torchrl writes no checksums: nothing could be compared")


_CHECKS: dict[Kind, Callable[[Path, Report, Progress | None], None]] = {
    "checkpoint": _checkpoint,
    "rows": _rows,
    "dataset": _rows,
    "minari": _minari,
    "lerobot": _lerobot,
    "hub": _hub,
    "h5": _h5,
    "torchrl": _torchrl,
}
