"""Creation, opening and replacement of the folder of a converted dataset."""

import contextlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fbuf.checkpoint import CheckpointCorrupt
from fbuf.checkpoint.files import remove_folder
from fbuf.checkpoint.writing import flush
from interop.datasets.conversion import convert
from interop.datasets.described import Described, noted
from interop.datasets.errors import CorruptDatasetError, DatasetError, DownloadError, MissingDatasetError
from interop.datasets.source import Source
from interop.shared.published_folder import DOWNLOADS, RECORD, check_files
from interop.shared.source_files import state_of
from interop.storages import LazyMemmapStorage, TensorStorage


def make_dataset(
    source: Source, files: Path | None, metadata_name: str, force: bool, workers: int, scratch: Path
) -> dict[str, Any]:
    """Download the files unless given, convert them, and publish the folder. Returns its record."""
    sums: Mapping[str, str] = {}
    first = scratch.with_suffix(".sha256.json")  # beside the dataset
    if files is None:
        files = scratch / DOWNLOADS
        if force:
            remove_folder(files)
        files.mkdir(exist_ok=True)
        try:
            with _downloaded_damage():
                sums = source.download(files)
        except BaseException:
            with contextlib.suppress(OSError):
                files.rmdir()  # if nothing was downloaded
            raise
        if not force and first.exists():
            _check_sums(sums, _first_sums(first), files)
        with _downloaded_damage():
            metadata, rows = _converted(source, files, scratch, workers)
    else:
        before = local_state(source, files)
        metadata, rows = _converted(source, files, scratch, workers)
        if local_state(source, files) != before:
            raise DatasetError(f"files in {files} changed while they were converted: wait until they are complete")
    (scratch / "data" / metadata_name).write_text(metadata)
    if sums:
        (scratch / "sums").write_text(json.dumps(dict(sums)))
        flush(scratch / "sums")
        (scratch / "sums").replace(first)
    return {"rows": rows, "sha256": dict(sums), "made": secrets.token_hex(8)}


def _converted(source: Source, files: Path, scratch: Path, workers: int) -> tuple[str, int]:
    """Write the rows. Returns the metadata as JSON, and the number of rows."""
    metadata = json.dumps(source.metadata(files))
    return metadata, convert(source, files, scratch / "data", workers)


@contextlib.contextmanager
def _downloaded_damage() -> Iterator[None]:
    """Add the way out to errors of damaged files that were downloaded."""
    try:
        yield
    except CorruptDatasetError as error:
        raise CorruptDatasetError(f"{error}. Remove it to have it downloaded anew, or pass download='force'") from error


def _first_sums(path: Path) -> dict[str, str]:
    """The checksums of the first download, by file name. CorruptDatasetError if the file is damaged."""
    try:
        sums = Described(noted(path), str(path))
        return {name: sums.text(name) for name in sums}
    except CorruptDatasetError as error:
        raise CorruptDatasetError(f"{error}. Remove it, or pass download='force'") from error


def local_state(source: Source, files: Path) -> dict[str, str]:
    """The state of the files in a user's folder, as an entry of a record. Empty if they are not there (any more)."""
    try:
        inputs = source.inputs(files) if files.is_dir() else []
        return {"local_files": state_of(inputs, files)} if inputs else {}
    except (CorruptDatasetError, FileNotFoundError):
        return {}


def check_preprocessed(folder: Path, state: Mapping[str, str]) -> None:
    """ValueError if the dataset of a folder was preprocessed, and its files have another state now."""
    record = _record_to_check(folder)
    if record is None or "preprocessed" not in record or "local_files" not in record:
        return
    if state and record.any("local_files") != state["local_files"]:
        raise ValueError(
            f"the files in {record.text('from_local')} have changed since they were converted to {folder}, where the rows "
            "were preprocessed. Pass download='force' to convert them anew, or another root"
        )


def _check_sums(sums: Mapping[str, str], before: Mapping[str, str], folder: Path) -> None:
    """DownloadError for a file that differs from the first conversion. The next call downloads it again."""
    differ = [name for name, checksum in sums.items() if before.get(name, checksum) != checksum]
    for name in differ:
        (folder / name).unlink(missing_ok=True)
    if differ:
        raise DownloadError(
            f"{differ[0]} is not the file that was downloaded the first time: its SHA-256 is {sums[differ[0]]}, it was "
            f"{before[differ[0]]}. Try again, or pass download='force' if upstream has changed it"
        )


def made_again(folder: Path, run: Callable[[Path], dict[str, Any]], scratch: Path) -> dict[str, Any]:
    """Replace the dataset of a folder by a transformed one. The metadata stays."""
    record = run(scratch)
    for path in folder.glob("*.json"):
        if not (scratch / "data" / path.name).exists() and path.name != RECORD:
            shutil.copy(path, scratch / "data" / path.name)
    return {**record, "made": secrets.token_hex(8)}


def opened(folder: Path) -> tuple[TensorStorage, dict[str, Any]]:
    """Open the rows of a folder for reading, and its record. CorruptDatasetError for missing or damaged files."""
    with damage_of(folder, FileNotFoundError):
        record = record_of(folder)
        sizes = Described(record, str(folder / RECORD)).fields("files")
        check_files(folder, {name: sizes.whole(name) for name in sizes})
        return LazyMemmapStorage.open(folder, "r"), record


def record_of(folder: Path) -> dict[str, Any]:
    """The record of a folder. MissingDatasetError if there is none, CorruptDatasetError for a damaged one."""
    if not (folder / RECORD).exists():
        raise MissingDatasetError(f"there is no dataset in {folder} any more. Construct it again")
    return noted(folder / RECORD)


def check_rows_version(folder: Path, rows_version: int) -> None:
    """ValueError if a folder has rows that an earlier version of this library made of the same files in another way."""
    record = _record_to_check(folder)
    if record is None:
        return
    with damage_of(folder, CorruptDatasetError):
        version = record.whole("rows_version") if "rows_version" in record else 1
    if version < rows_version:
        raise ValueError(
            f"{folder} was converted by an earlier version of this library, which read these files in another way (version "
            f"{version} of rows, now {rows_version}). Pass download='force' to convert them again, or another root"
        )


def _record_to_check(folder: Path) -> Described | None:
    """The record of a folder; None if it is missing or damaged, which `publish` reports."""
    try:
        return Described(noted(folder / RECORD), str(folder / RECORD))
    except CorruptDatasetError:
        return None


@contextlib.contextmanager
def damage_of(folder: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Re-raise errors of a damaged folder, and exceptions of `kinds`, as CorruptDatasetError."""
    caught: tuple[type[Exception], ...] = (CheckpointCorrupt, *kinds)
    try:
        yield
    except caught as error:
        raise CorruptDatasetError(f"{error}. Remove {folder}, or pass download='force'") from error
