"""HDF5 files of others. All values lie in the file itself, or the file is refused."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from interop.datasets.errors import CorruptDatasetError
from interop.optional import required

_FAULTS = (OSError, RuntimeError, KeyError, ValueError, TypeError)  # what h5py raises for damaged files
_TIMES_SMALLER = 10_000  # than its values is no compressed dataset
_MOST_DEEP = 64
_checked: set[tuple[str, int, int]] = set()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An open `h5py.File` whose groups and datasets all lie in this file. Read values with `arrays` or `values`.

    CorruptDatasetError names the file, and the entry where there is one: for a truncated or damaged file, and for soft
    links, external links and entries under two names. The links are checked once a process, in 5 s for 100,000 groups of
    six datasets.
    """
    h5py = required("h5py", "interop")
    with _faults(f"{path} cannot be read as an HDF5 file"):
        file = h5py.File(path, "r", locking="best-effort")
    with file:
        about = os.stat(path)
        version = (os.path.abspath(path), about.st_size, about.st_mtime_ns)
        if version not in _checked:
            _check_links(file, path)
            _checked.add(version)
        yield file


def _check_links(file: Any, path: Path) -> None:
    h5py = required("h5py", "interop")
    seen: set[int] = set()

    def refused(name: bytes, link: Any) -> tuple[bytes, str] | None:
        if link.type != h5py.h5l.TYPE_HARD:
            return name, "leads to another entry or file"
        if name.count(b"/") > _MOST_DEEP:
            return name, "is nested too deeply"
        if link.u in seen:
            return name, "is an entry that has another name too"
        seen.add(link.u)
        return None

    with _faults(f"{path} is damaged"):
        seen.add(h5py.h5o.get_info(file.id).addr)
        found = file.id.links.visit(refused, info=True)
    if found is not None:
        name, what = found
        raise CorruptDatasetError(f"{path}: {name.decode(errors='replace')!r} {what}: it is not read")


def arrays(group: Any, rows: slice = slice(None)) -> dict[str, Any]:
    """Everything below a group of an `opened` file: `values` of the datasets, mappings of these for groups."""
    h5py = required("h5py", "interop")
    with _faults(f"{group.file.filename}: {group.name!r} is damaged"):
        entries = {key: group[key] for key in group}
        return {key: (arrays if isinstance(at, h5py.Group) else values)(at, rows) for key, at in entries.items()}


def values(dataset: Any, rows: slice = slice(None)) -> Any:
    """Rows of a dataset of an `opened` file: an array, a list of text, or a list of arrays that differ in length.

    A dataset without dims gives its one value. CorruptDatasetError, which names file and dataset, for values in other files
    (virtual datasets, external storage), damaged ones, and those that are no numbers and no text.
    """
    h5py = required("h5py", "interop")
    where = f"{dataset.file.filename}: {dataset.name!r}"
    if not isinstance(dataset, h5py.Dataset):
        raise CorruptDatasetError(f"{where} is a {type(dataset).__name__}, no dataset")
    with _faults(f"{where} is damaged"):
        if dataset.is_virtual or dataset.external:
            raise CorruptDatasetError(f"{where} has its values in other files: it is not read")
        smaller = _TIMES_SMALLER if dataset.id.get_create_plist().get_nfilters() else 1
        stored = dataset.id.get_storage_size()
        if dataset.shape is None or dataset.nbytes > stored * smaller:
            raise CorruptDatasetError(f"{where} has {stored} bytes: too few for its shape {dataset.shape}")
        chosen = rows if dataset.shape else ()
        if h5py.check_string_dtype(dataset.dtype):
            text = dataset.asstr("utf-8")[chosen]
            return text.tolist() if isinstance(text, np.ndarray) else text
        of_varied = h5py.check_vlen_dtype(dataset.dtype)
        if (of_varied or dataset.dtype).kind not in "biufc":
            raise CorruptDatasetError(f"{where} is of {dataset.dtype}: neither numbers nor text")
        found = dataset[chosen]
    return list(found) if of_varied and dataset.shape else found


@contextlib.contextmanager
def _faults(what: str) -> Iterator[None]:
    """Turns the errors of h5py into CorruptDatasetError. Errors of the system (no such file, no access) are left."""
    try:
        yield
    except CorruptDatasetError:
        raise
    except _FAULTS as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise CorruptDatasetError(f"{what} ({error})") from error
