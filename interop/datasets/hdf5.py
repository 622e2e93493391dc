"""A safe HDF5 reader. It rejects files whose values lie outside of the file, or are not there at all."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from interop.data.arguments import required
from interop.datasets import allowance
from interop.datasets.errors import CorruptDatasetError, DatasetError

if TYPE_CHECKING:
    import h5py

_FAULTS = (OSError, RuntimeError, KeyError, ValueError, TypeError)  # errors of h5py for damaged files
_FILLED = 4096  # bytes that a compressed dataset may announce beside its compressed ones
_ENTRIES = 64  # of variable length that are read at once
_MOST_DEEP = 64
_METADATA_CACHE = 1 << 21  # bytes; HDF5's default of 32 MiB takes ten times that in memory, and saves no time
_checked: set[tuple[str, int, int]] = set()


@contextlib.contextmanager
def faults(name: str) -> Iterator[None]:
    """Re-raise h5py errors as CorruptDatasetError. System errors (no such file, no access) pass through."""
    try:
        yield
    except _FAULTS as error:
        raise _corrupt(name, error) from error


def _corrupt(name: str, error: Exception) -> Exception:
    if isinstance(error, DatasetError) or (isinstance(error, OSError) and error.errno):
        return error
    return CorruptDatasetError(f"{name} ({error})")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open an `h5py.File` whose groups and datasets all lie in this file. Read values with `arrays` or `values`.

    CorruptDatasetError names the file, and the entry if known: for a truncated or damaged file, for soft links, external
    links and hard links under two names, and for other h5py errors in the block. Links are checked once per process,
    700,000 entries in 5 s.
    """
    h5py = required("h5py", "interop")
    with faults(f"{path} cannot be read as an HDF5 file"), h5py.File(path, "r", locking="best-effort") as file:
        config = file.id.get_mdc_config()
        config.max_size = _METADATA_CACHE
        file.id.set_mdc_config(config)
        about = os.stat(path)
        version = (os.path.abspath(path), about.st_size, about.st_mtime_ns)
        if version not in _checked:
            _check_links(file, path)
            _checked.add(version)
        yield file


def _check_links(file: "h5py.File", path: Path) -> None:
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

    refusal = file.id.links.visit(refused, info=True)
    if refusal is not None:
        raise CorruptDatasetError(f"{path}: {refusal}: it is not read")


def arrays(group: "h5py.Group", rows: slice = slice(None)) -> dict[str, Any]:
    """All values below a group of an `opened` file: `values` of datasets, and mappings of these for groups."""
    h5py = required("h5py", "interop")
    try:
        entries = {key.decode(): h5py.h5o.open(group.id, key) for key in group.id}
    except _FAULTS as error:
        raise _damaged(h5py, group.id, error) from error
    return {
        key: arrays(h5py.Group(at), rows) if isinstance(at, h5py.h5g.GroupID) else _values(h5py, at, rows)
        for key, at in entries.items()
    }


def values(entry: "h5py.Dataset", rows: slice = slice(None)) -> Any:
    """Rows of a dataset of an `opened` file: an array, a list of text, or a list of arrays of different lengths.

    A dataset without dims gives a single value, a group its `arrays`. CorruptDatasetError names file and entry, for values
    in other files (virtual datasets, external storage), damaged values, and values that are no numbers or text.
    """
    h5py = required("h5py", "interop")
    return arrays(entry, rows) if isinstance(entry, h5py.Group) else _values(h5py, entry.id, rows)


def datasets(group: "h5py.Group") -> dict[str, Any]:
    """The `h5py.Dataset`s below a group of an `opened` file, by relative path. Values are not read.

    CorruptDatasetError as for `values`.
    """
    h5py = required("h5py", "interop")
    by_path: dict[str, Any] = {}
    try:
        for name, entry in {name: group[name] for name in group}.items():
            if isinstance(entry, h5py.Group):
                by_path |= {f"{name}/{path}": dataset for path, dataset in datasets(entry).items()}
            else:
                _layout(h5py, entry.id)
                by_path[name] = entry
    except _FAULTS as error:
        raise _damaged(h5py, group.id, error) from error
    return by_path


def shapes(file: "h5py.File", name: str) -> dict[tuple[str, ...], tuple[Any, tuple[int, ...]]]:
    """Dtype and shape of the datasets below a group of an `opened` file, by path; none if there is no such group.

    The dtype of text is None. CorruptDatasetError as for `values`, for sizes that are not there; values are not read.
    """
    h5py = required("h5py", "interop")
    try:
        return _shapes(h5py, h5py.h5o.open(file.id, name.encode())) if name in file else {}
    except _FAULTS as error:
        raise _damaged(h5py, file.id, error) from error


def _shapes(h5py: ModuleType, group: "h5py.Group") -> dict[tuple[str, ...], tuple[Any, tuple[int, ...]]]:
    by_path: dict[tuple[str, ...], tuple[Any, tuple[int, ...]]] = {}
    if isinstance(group, h5py.h5g.GroupID):
        for key in group:
            at = h5py.h5o.open(group, key)
            if isinstance(at, h5py.h5d.DatasetID):
                shape, dtype = _layout(h5py, at)
                by_path[key.decode(),] = None if h5py.check_string_dtype(dtype) else dtype, shape
            else:
                by_path |= {(key.decode(), *path): shape_of for path, shape_of in _shapes(h5py, at).items()}
    return by_path


def attributes(group: "h5py.Group") -> dict[str, Any]:
    """The attributes of a group of an `opened` file, as JSON. CorruptDatasetError for damaged ones, and for other types."""
    return {name: _as_json(value, f"{group.name}, attribute {name}") for name, value in group.attrs.items()}


def _as_json(value: Any, where: str) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biufSUO":
            raise CorruptDatasetError(f"{where} is of {value.dtype}: neither numbers nor text")
        return _as_json(value.tolist(), where)
    if isinstance(value, list):
        return [_as_json(element, where) for element in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise CorruptDatasetError(f"{where} is a {type(value).__name__}: neither numbers nor text")


def _values(h5py: ModuleType, it: "h5py.h5d.DatasetID", rows: slice) -> Any:
    """`values` for a low-level h5py identifier, which is faster than `h5py.Dataset` for small datasets."""
    try:
        shape, dtype = _layout(h5py, it)
        if dtype.kind in "biufc" and rows == slice(None):
            out = np.empty(shape, dtype)
            if out.size:
                it.read(h5py.h5s.ALL, h5py.h5s.ALL, out)
            return out if shape else out[()]
        dataset = h5py.Dataset(it)
        chosen = rows if shape else ()
        text = h5py.check_string_dtype(dtype)
        reader = dataset.asstr("utf-8") if text else dataset
        if dtype.kind == "O" and shape:
            values = _of_any_length(h5py, it, reader, shape, rows)
        else:
            values = reader[chosen]
        return values.tolist() if text and shape else list(values) if dtype.kind == "O" and shape else values
    except _FAULTS as error:
        raise _damaged(h5py, it, error) from error


def _of_any_length(
    h5py: ModuleType, it: "h5py.h5d.DatasetID", reader: "h5py.Dataset", shape: tuple[int, ...], rows: slice
) -> np.ndarray:
    """Text or arrays of variable length, an array of objects.

    Each entry names its length and place in the file. Many may name the same place, so that they are larger together than
    the file: they are read a few at a time, and their sizes are added up.
    """
    most = h5py.h5i.get_file_id(it).get_filesize()
    start, stop, _ = rows.indices(shape[0])
    objects = np.empty((max(stop - start, 0), *shape[1:]), object)
    total = 0
    for place in np.ndindex(*objects.shape[:-1]):  # of a list of entries; () for the only one
        above, begin = ((place[0] + start, *place[1:]), 0) if place else ((), start)
        for at in range(0, objects.shape[-1], _ENTRIES):
            end = min(at + _ENTRIES, objects.shape[-1])
            values = reader[(*above, slice(begin + at, begin + end))]
            total += sum(value.nbytes if isinstance(value, np.ndarray) else len(value) for value in values)
            if total > most:
                raise CorruptDatasetError(f"{_name(h5py, it)} has more bytes of variable length than its file, {most}")
            objects[(*place, slice(at, end))] = values
    return objects


def shape_of(file: "h5py.File", path: str) -> tuple[int, ...]:
    """The shape of a dataset of an `opened` file. KeyError if there is none; CorruptDatasetError as for `values`."""
    h5py = required("h5py", "interop")
    try:
        it = h5py.h5d.open(file.id, path.encode())  # low-level, five times faster than for groups
    except ValueError as error:
        raise CorruptDatasetError(f"{file.filename}: {path!r} is no dataset ({error})") from error
    return _layout(h5py, it)[0]


def _layout(h5py: ModuleType, it: "h5py.h5d.DatasetID") -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of a dataset. CorruptDatasetError unless it has numbers or text in this file."""
    if not isinstance(it, h5py.h5d.DatasetID):
        raise CorruptDatasetError(f"{_name(h5py, it)} is a {type(it).__name__}, no dataset")
    creation = it.get_create_plist()
    stored = it.get_storage_size()
    dtype = it.dtype
    if creation.get_layout() == h5py.h5d.VIRTUAL or creation.get_external_count():
        raise CorruptDatasetError(f"{_name(h5py, it)} has its values in other files: it is not read")
    shape = it.get_space().get_simple_extent_dims()
    filtered = creation.get_nfilters() > 0
    size = 0 if shape is None else math.prod(shape) * dtype.itemsize
    most = allowance.UNPACKED * stored + _FILLED if filtered else stored
    if filtered and size:
        size = max(size, math.prod(creation.get_chunk()) * dtype.itemsize)  # which is decompressed as a whole
    if shape is None or size > most or (size and not stored):
        raise CorruptDatasetError(f"{_name(h5py, it)} has {stored} bytes: too few for its shape {shape}")
    item = np.dtype(h5py.check_vlen_dtype(dtype) or dtype)
    if item.kind not in "biufcSU" or item.char in "gG":  # no long doubles
        raise CorruptDatasetError(f"{_name(h5py, it)} is of {dtype}: neither numbers nor text")
    return shape, dtype


def _name(h5py: ModuleType, it: "h5py.h5d.DatasetID") -> str:
    return f"{h5py.h5f.get_name(it).decode()}: {(h5py.h5i.get_name(it) or b'?').decode(errors='replace')!r}"


def _damaged(h5py: ModuleType, it: "h5py.h5d.DatasetID", error: Exception) -> Exception:
    return _corrupt(f"{_name(h5py, it)} is damaged", error)
