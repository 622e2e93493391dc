"""The episodes in the files of Minari datasets, as they are stored: HDF5, Arrow or Parquet."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from interop.datasets.errors import CorruptDatasetError
from interop.datasets.hdf5 import arrays, opened
from interop.optional import required

ONE_MORE = ("observations", "infos", "state")  # entries with a row before each step, and one behind the last
_HDF5 = "main_data.hdf5"


class Episode(NamedTuple):
    """An episode, or some steps of it.

    Args:
        number: that it has in the files.
        steps: how many there are.
        where: the file and the episode, for errors.
        entries: arrays, lists of text and lists of encoded images, by their place: ("observations", "image"). The parts of
            a Tuple are "0", "1", ....
    """

    number: int
    steps: int
    where: str
    entries: dict[tuple[str, ...], Any]


def steps_of(data: Path, kind: str) -> dict[int, int]:
    """How many steps each episode has, by number, in order. Reads headers."""
    found = dict(_hdf5_steps(data / _HDF5) if kind == "hdf5" else _arrow_steps(data))
    return {number: found[number] for number in sorted(found)}


def episodes(data: Path, kind: str, steps: Mapping[int, int]) -> Iterator[Episode]:
    """Episodes of these numbers and steps."""
    if kind != "hdf5":
        for number, count in steps.items():
            folder = data / str(number)
            yield Episode(number, count, str(folder), dict(_flat(_arrow_episode(folder, kind, count))))
        return
    with opened(data / _HDF5) as file:
        for number, count in steps.items():
            entries = arrays(file[f"episode_{number}"])
            yield Episode(number, count, f"{data / _HDF5}, episode {number}", dict(_flat(entries)))


def _flat(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, each in values.items():
        index = key.removeprefix("_index_")  # a part of a Tuple
        path = (*above, index if index.isdigit() else key)
        if isinstance(each, Mapping):
            yield from _flat(each, path)
        else:
            yield path, each


def _hdf5_steps(path: Path) -> Iterator[tuple[int, int]]:
    if not path.exists():
        raise CorruptDatasetError(f"{path} is missing")
    attributes, steps = required("h5py", "interop").h5a, np.empty((), np.int64)
    with opened(path) as file:
        for name in file:
            if name.startswith("episode_"):
                try:  # by the low-level functions: those of groups take five times as long
                    attributes.open(file.id, b"total_steps", obj_name=name.encode()).read(steps)
                except KeyError:  # files of 2023
                    steps[()] = len(file[name]["rewards"]) if "rewards" in file[name] else 0
                yield int(name.removeprefix("episode_")), int(steps)


def _arrow_steps(data: Path) -> Iterator[tuple[int, int]]:
    for folder in data.iterdir():
        if folder.name.isdigit():
            path = folder / "metadata.json"
            try:
                yield int(folder.name), int(json.loads(path.read_bytes())["total_steps"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CorruptDatasetError(f"{path} does not say the total_steps of this episode ({error})") from error


def _arrow_episode(folder: Path, kind: str, steps: int) -> dict[str, Any]:
    pyarrow = required("pyarrow", "datasets")
    files = sorted(folder.glob(f"*.{kind}"), key=lambda path: (len(path.name), path.name))  # part-2 before part-10
    try:
        table = pyarrow.concat_tables([_table(each, kind) for each in files]).combine_chunks()
        table.validate(full=True)
        if table.num_rows != steps + 1:
            raise CorruptDatasetError(f"{folder} has {table.num_rows} rows, {steps + 1} are needed for {steps} steps")
        return {
            name: _values(table[name].chunk(0).slice(0, steps + (name in ONE_MORE)), f"{folder}, {name}")
            for name in table.column_names
            if name != "episode_id"
        }
    except (pyarrow.ArrowException, OSError) as error:
        raise CorruptDatasetError(f"{folder} cannot be read as {kind} files ({error})") from error


def _table(path: Path, kind: str) -> Any:
    if kind == "parquet":
        return required("pyarrow.parquet", "datasets").ParquetFile(path, memory_map=True).read(use_threads=False)
    pyarrow = required("pyarrow", "datasets")
    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()


def _values(column: Any, where: str) -> Any:
    """A column as an array, a list of text or bytes, or a mapping of these."""
    types = required("pyarrow", "datasets").types
    kind = column.type
    if types.is_struct(kind):
        return {
            field.name: _shaped(_values(column.field(place), f"{where}/{field.name}"), field.metadata)
            for place, field in enumerate(kind)
        }
    if column.null_count:
        raise CorruptDatasetError(f"{where} has {column.null_count} missing values")
    if types.is_fixed_size_list(kind) or types.is_list(kind):
        flat = _values(column.flatten(), where)
        lengths = {len(each) for each in column} if types.is_list(kind) else {kind.list_size}
        if len(lengths) == 1 and isinstance(flat, np.ndarray):
            return flat.reshape(len(column), *lengths, *flat.shape[1:])
    elif types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind):
        return column.to_pylist()
    elif (array := column.to_numpy(zero_copy_only=False)).dtype.kind in "biufc":
        return array
    raise CorruptDatasetError(f"{where} is {kind}, which are no arrays of one shape and no text")


def _shaped(values: Any, metadata: Mapping[bytes, bytes] | None) -> Any:
    """An array of rows in the shape that Minari notes beside columns of infos."""
    if not metadata or b"shape" not in metadata or not isinstance(values, np.ndarray):
        return values
    return values.reshape(len(values), *(int(size) for size in metadata[b"shape"].split(b",") if size))
