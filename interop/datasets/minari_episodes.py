"""Readers of Minari episodes in HDF5, Arrow or Parquet files."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from interop.data.arguments import required
from interop.data.keys import entries_below
from interop.datasets import parquet
from interop.datasets.arrow_columns import faults, values
from interop.datasets.described import MOST_ROWS, described
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.hdf5 import arrays, opened, shape_of

ONE_MORE = ("observations", "infos", "state")  # entries of T + 1 rows
_HDF5 = "main_data.hdf5"
_MOST_DIGITS = 18  # of the number of an episode, which becomes an int64


class Episode(NamedTuple):
    """The number of an episode in the files, and its number of steps."""

    number: int
    steps: int


class Steps(NamedTuple):
    """Consecutive steps of an episode.

    Args:
        episode: the number of the episode, and the number of these steps.
        where: file and episode, for errors.
        entries: arrays, lists of text and lists of encoded images, by path: ("observations", "image"). The parts of a
            Tuple are "0", "1", ....
    """

    episode: Episode
    where: str
    entries: dict[tuple[str, ...], Any]


def episodes(data: Path, kind: str) -> list[Episode]:
    """The episodes of a folder, in order. Reads headers only."""
    return sorted(_of_hdf5(data / _HDF5) if kind == "hdf5" else _of_arrow(data, kind))


def steps_of(data: Path, kind: str, these: Iterable[Episode]) -> Iterator[Steps]:
    """All steps of these episodes."""
    if kind == "hdf5":
        with opened(data / _HDF5) as file:
            for each in these:
                yield _steps(each, f"{data / _HDF5}, episode {each.number}", arrays(file[f"episode_{each.number}"]))
    else:
        for each in these:
            folder = data / str(each.number)
            yield _steps(each, str(folder), _arrow_entries(folder, kind, each.steps))


def _steps(episode: Episode, where: str, entries: dict[str, Any]) -> Steps:
    def name(key: str) -> str:
        place = key.removeprefix("_index_")  # a part of a Tuple
        return place if place.isdigit() else key

    return Steps(episode, where, {tuple(map(name, path)): each for path, each in entries_below(entries)})


def _of_hdf5(path: Path) -> Iterator[Episode]:
    if not path.exists():
        raise CorruptDatasetError(f"{path} is missing")
    with opened(path) as file:
        for name in file:
            if name.startswith("episode_"):
                number = name.removeprefix("episode_")
                if not _is_number(number):
                    raise CorruptDatasetError(f"{path}: {name[:80]!r} has no number of an episode")
                try:
                    steps = shape_of(file, f"{name}/rewards")[:1]
                except KeyError:
                    steps = (len(file[name]),)  # 0 for an empty group
                if not steps:
                    raise CorruptDatasetError(f"{path}: {name}/rewards is a single number, not one for each step")
                yield Episode(int(number), *steps)


def _of_arrow(data: Path, kind: str) -> Iterator[Episode]:
    for folder in data.iterdir():
        if _is_number(folder.name):
            steps = described(folder / "metadata.json").whole("total_steps", most=MOST_ROWS)
            with faults(f"{folder}: its {kind} files"):
                rows = sum(_count(path, kind) for path in folder.glob(f"*.{kind}"))
            if rows != steps + 1:
                raise CorruptDatasetError(f"{folder} has {rows} rows, {steps + 1} are needed for {steps} steps")
            yield Episode(int(folder.name), steps)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def _arrow_entries(folder: Path, kind: str, steps: int) -> dict[str, Any]:
    pyarrow = required("pyarrow", "datasets")
    files = sorted(folder.glob(f"*.{kind}"), key=lambda path: (len(path.name), path.name))  # part-2 before part-10
    with faults(f"{folder}: its {kind} files"):
        table = pyarrow.concat_tables([_table(each, kind) for each in files]).combine_chunks()
        table.validate(full=True)
        if len(table) != steps + 1:
            raise CorruptDatasetError(f"{folder} has {len(table)} rows, {steps + 1} are needed for {steps} steps")
        return {
            name: values(table[name].chunk(0).slice(0, steps + (name in ONE_MORE)), f"{folder}, {name}")
            for name in table.column_names
            if name != "episode_id"
        }


def _count(path: Path, kind: str) -> int:
    """The rows of a file, from its headers."""
    if kind == "parquet":
        with parquet.opened(path) as file:
            return sum(file.rows())
    file = _arrow_file(path)
    return sum(file.get_batch(place).num_rows for place in range(file.num_record_batches))


def _table(path: Path, kind: str) -> Any:
    if kind == "parquet":
        with parquet.opened(path) as file:
            return required("pyarrow", "datasets").concat_tables(
                [file.read(place) for place in range(len(file.rows()))]
            )
    return _arrow_file(path).read_all()


def _arrow_file(path: Path) -> Any:
    pyarrow = required("pyarrow", "datasets")
    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
