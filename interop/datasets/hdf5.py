"""HDF5 files of others. All values lie in the file itself, or the file is refused."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from interop.datasets.errors import CorruptDatasetError, DatasetError
from interop.optional import required

_TIMES_SMALLER = 10_000  # than its values is no compressed dataset
_MOST_DEEP = 64
_METADATA_CACHE = 1 << 21  # bytes; at HDF5's 32 MiB it takes ten times that in memory, and saves no time
_checked: set[tuple[str, int, int]] = set()


@contextlib.contextmanager
def _faults(what: Callable[[], str]) -> Iterator[None]:
    """Raises the errors of h5py as CorruptDatasetError. Errors of the system (no such file, no access) are left."""
    try:
        yield
    except DatasetError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise CorruptDatasetError(f"{what()} ({error})") from error


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An open `h5py.File` whose groups and datasets all lie in this file. Read values with `arrays` or `values`.

    CorruptDatasetError names the file, and the entry where it is known: for a truncated or damaged file, for soft links,
    external links and entries under two names, and for what else h5py cannot read in the block. The links are checked once a
    process, 700,000 entries in 5 s.
    """
    h5py = required("h5py", "interop")
    with _faults(lambda: f"{path} cannot be read as an HDF5 file"), h5py.File(path, "r", locking="best-effort") as file:
        config = file.id.get_mdc_config()
        config.max_size = _METADATA_CACHE
        file.id.set_mdc_config(config)
        about = os.stat(path)
        version = (os.path.abspath(path), about.st_size, about.st_mtime_ns)
        if version not in _checked:
            _check_links(file)
            _checked.add(version)
        yield file


def _check_links(file: Any) -> None:
    h5py = required("h5py", "interop")
    seen = {h5py.h5o.get_info(file.id).addr}

    def is_refused(name: bytes, link: Any) -> bytes | None:
        if link.type != h5py.h5l.TYPE_HARD or link.u in seen or name.count(b"/") > _MOST_DEEP:
            return name
        seen.add(link.u)
        return None

    if found := file.id.links.visit(is_refused, info=True):
        raise CorruptDatasetError(f"{file.filename}: {found!r} leads to another entry or file, or is nested too deeply")


def arrays(group: Any, rows: slice = slice(None)) -> dict[str, Any]:
    """Everything below a group of an `opened` file: `values` of the datasets, mappings of these for groups."""
    return {name: values(entry, rows) for name, entry in _entries(group).items()}


def values(entry: Any, rows: slice = slice(None)) -> Any:
    """Rows of a dataset of an `opened` file: an array, a list of text, or a list of arrays that differ in length.

    A dataset without dims gives its one value, a group its `arrays`. CorruptDatasetError names file and entry, for values in
    other files (virtual datasets, external storage), damaged ones, and those that are no numbers and no text.
    """
    h5py = required("h5py", "interop")
    if isinstance(entry, h5py.Group):
        return arrays(entry, rows)
    with _faults(lambda: f"{_name(entry)} is damaged"):
        _check_values(entry)
        dtype, chosen = entry.dtype, rows if entry.shape and rows != slice(None) else ()
        found = (entry.asstr("utf-8") if h5py.check_string_dtype(dtype) else entry)[chosen]
        is_list = entry.shape and (h5py.check_string_dtype(dtype) or h5py.check_vlen_dtype(dtype))
        return found.tolist() if is_list else found


def datasets(group: Any) -> dict[str, Any]:
    """The `h5py.Dataset`s below a group of an `opened` file, by their paths from there. Their values are not read.

    CorruptDatasetError as for `values`.
    """
    h5py, found = required("h5py", "interop"), dict[str, Any]()
    for name, entry in _entries(group).items():
        if isinstance(entry, h5py.Group):
            found |= {f"{name}/{path}": each for path, each in datasets(entry).items()}
        else:
            _check_values(entry)
            found[name] = entry
    return found


def _entries(group: Any) -> dict[str, Any]:
    with _faults(lambda: f"{_name(group)} is damaged"):
        return {name: group[name] for name in group}


def _check_values(entry: Any) -> None:
    """CorruptDatasetError for what is no dataset of numbers or text in this file."""
    h5py = required("h5py", "interop")
    if not isinstance(entry, h5py.Dataset):
        raise CorruptDatasetError(f"{_name(entry)} is a {type(entry).__name__}, no dataset")
    made, stored = entry.id.get_create_plist(), entry.id.get_storage_size()
    if made.get_layout() == h5py.h5d.VIRTUAL or made.get_external_count():
        raise CorruptDatasetError(f"{_name(entry)} has its values in other files: it is not read")
    dtype, shape = entry.dtype, entry.shape
    smaller = _TIMES_SMALLER if made.get_nfilters() else 1
    if shape is None or math.prod(shape) * dtype.itemsize > stored * smaller:
        raise CorruptDatasetError(f"{_name(entry)} has {stored} bytes: too few for its shape {shape}")
    item = np.dtype(h5py.check_vlen_dtype(dtype) or (h5py.check_string_dtype(dtype) and "S") or dtype)
    if item.kind not in "biufcSU" or item.char in "gG":  # no long doubles
        raise CorruptDatasetError(f"{_name(entry)} is of {dtype}: neither numbers nor text")


def _name(entry: Any) -> str:
    return f"{entry.file.filename}: {entry.name!r}"
