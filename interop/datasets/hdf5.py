"""HDF5 files of others. All values lie in the file itself, or the file is refused."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from interop.datasets.errors import CorruptDatasetError, DatasetError
from interop.optional import required

_FAULTS = (OSError, RuntimeError, KeyError, ValueError, TypeError)  # what h5py raises for damaged files
_TIMES_SMALLER = 10_000  # than its values is no compressed dataset
_MOST_DEEP = 64
_checked: set[tuple[str, int, int]] = set()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An open `h5py.File` whose groups and datasets all lie in this file. Read values with `arrays` or `values`.

    CorruptDatasetError names the file, and the entry where it is known: for a truncated or damaged file, for soft links,
    external links and entries under two names, and for what else h5py cannot read in the block. The links are checked once a
    process, 700,000 entries in 5 s.
    """
    h5py = required("h5py", "interop")
    with _faults(f"{path} cannot be read as an HDF5 file"), h5py.File(path, "r", locking="best-effort") as file:
        about = os.stat(path)
        version = (os.path.abspath(path), about.st_size, about.st_mtime_ns)
        if version not in _checked:
            _check_links(file, path)
            _checked.add(version)
        yield file


def _check_links(file: Any, path: Path) -> None:
    h5py = required("h5py", "interop")
    seen = {h5py.h5o.get_info(file.id).addr}

    def refused(encoded: bytes, link: Any) -> str | None:
        name = encoded.decode(errors="replace")
        if "\ufffd" in name:
            return f"{name!r} is no text"
        if link.type != h5py.h5l.TYPE_HARD:
            return f"{name!r} leads to another entry or file"
        if name.count("/") > _MOST_DEEP:
            return f"{name!r} is nested too deeply"
        if link.u in seen:
            return f"{name!r} is an entry that has another name too"
        seen.add(link.u)
        return None

    found = file.id.links.visit(refused, info=True)
    if found is not None:
        raise CorruptDatasetError(f"{path}: {found}: it is not read")


def arrays(group: Any, rows: slice = slice(None)) -> dict[str, Any]:
    """Everything below a group of an `opened` file: `values` of the datasets, mappings of these for groups."""
    with _faults(f"{group.file.filename}: {group.name!r} is damaged"):
        return {name: values(group[name], rows) for name in group}


def values(entry: Any, rows: slice = slice(None)) -> Any:
    """Rows of a dataset of an `opened` file: an array, a list of text, or a list of arrays that differ in length.

    A dataset without dims gives its one value, a group its `arrays`. CorruptDatasetError names file and entry, for values in
    other files (virtual datasets, external storage), damaged ones, and those that are no numbers and no text.
    """
    h5py = required("h5py", "interop")
    if isinstance(entry, h5py.Group):
        return arrays(entry, rows)
    where = f"{entry.file.filename}: {entry.name!r}"
    with _faults(f"{where} is damaged"):
        _check_dataset(entry, where)
        chosen = rows if entry.shape else ()
        if h5py.check_string_dtype(entry.dtype):
            text = entry.asstr("utf-8")[chosen]
            return text.tolist() if isinstance(text, np.ndarray) else text
        found = entry[chosen]
    return list(found) if entry.shape and h5py.check_vlen_dtype(entry.dtype) else found


def datasets(group: Any) -> dict[str, Any]:
    """The `h5py.Dataset`s below a group of an `opened` file, by their paths from there. Their values are not read.

    CorruptDatasetError as for `values`.
    """
    h5py, found = required("h5py", "interop"), {}

    def keep(name: str, entry: Any) -> None:
        if not isinstance(entry, h5py.Group):
            _check_dataset(entry, f"{group.file.filename}: {entry.name!r}")
            found[name] = entry

    with _faults(f"{group.file.filename}: {group.name!r} is damaged"):
        group.visititems(keep)
    return found


def _check_dataset(entry: Any, where: str) -> None:
    """CorruptDatasetError for what is no dataset of values in this file."""
    h5py = required("h5py", "interop")
    if not isinstance(entry, h5py.Dataset):
        raise CorruptDatasetError(f"{where} is a {type(entry).__name__}, no dataset")
    if entry.is_virtual or entry.external:
        raise CorruptDatasetError(f"{where} has its values in other files: it is not read")
    smaller = _TIMES_SMALLER if entry.id.get_create_plist().get_nfilters() else 1
    stored = entry.id.get_storage_size()
    if entry.shape is None or entry.nbytes > stored * smaller:
        raise CorruptDatasetError(f"{where} has {stored} bytes: too few for its shape {entry.shape}")
    dtype = np.dtype(h5py.check_vlen_dtype(entry.dtype) or entry.dtype)
    if dtype.kind not in "biufcSU" or dtype.char in "gG":  # no long doubles
        raise CorruptDatasetError(f"{where} is of {entry.dtype}: neither numbers nor text")


@contextlib.contextmanager
def _faults(what: str) -> Iterator[None]:
    """Turns the errors of h5py into CorruptDatasetError. Errors of the system (no such file, no access) are left."""
    try:
        yield
    except DatasetError:
        raise
    except _FAULTS as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise CorruptDatasetError(f"{what} ({error})") from error
