"""Readers of Minari episodes in HDF5, Arrow or Parquet files."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from interop.data.arguments import required
from interop.data.keys import entries_below
from interop.datasets import parquet
from interop.datasets.arrow_columns import faults, values
from interop.datasets.described import MOST_ROWS, described
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.hdf5 import arrays, attributes, opened, shape_of, shapes
from interop.datasets.minari_infos import EpisodeInfos, Kind

ONE_MORE = ("observations", "infos", "state")  # entries of T + 1 rows
_HDF5 = "main_data.hdf5"
_MOST_NESTED = 32  # options
_MOST_DIGITS = 18  # of the number of an episode, which becomes an int64


class MinariEpisode(NamedTuple):
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

    episode: MinariEpisode
    where: str
    entries: dict[tuple[str, ...], Any]


def episodes(data: Path, kind: str) -> list[MinariEpisode]:
    """The episodes of a folder, in order. Reads headers only."""
    return sorted(_of_hdf5(data / _HDF5) if kind == "hdf5" else _of_arrow(data, kind))


def steps_of(data: Path, kind: str, chosen: Iterable[MinariEpisode]) -> Iterator[Steps]:
    """All steps of these episodes."""
    if kind == "hdf5":
        with opened(data / _HDF5) as file:
            for episode in chosen:
                yield _steps(
                    episode, f"{data / _HDF5}, episode {episode.number}", arrays(file[f"episode_{episode.number}"])
                )
    else:
        for episode in chosen:
            folder = data / str(episode.number)
            yield _steps(episode, str(folder), _arrow_entries(folder, kind, episode.steps))


def infos_of(data: Path, kind: str, chosen: Iterable[MinariEpisode]) -> Iterator[EpisodeInfos]:
    """The kinds of the infos of these episodes. HDF5: from headers; Arrow and Parquet: from the infos."""
    if kind == "hdf5":
        with opened(data / _HDF5) as file:
            for episode in chosen:
                where = f"{data / _HDF5}, episode {episode.number}"
                shape_by_path = shapes(file, f"episode_{episode.number}/infos")
                kinds = {tuple(map(_name, path)): Kind(*kind_fields) for path, kind_fields in shape_by_path.items()}
                yield EpisodeInfos(where, episode.steps, kinds)
    else:
        for episode in chosen:
            folder = data / str(episode.number)
            entries = _arrow_entries(folder, kind, episode.steps, "infos")
            kinds = {path[1:]: _kind(values) for path, values in entries_below(entries)}
            yield EpisodeInfos(str(folder), episode.steps, kinds)


def _kind(values: Any) -> Kind:
    return Kind(None, (len(values),)) if isinstance(values, list) else Kind(values.dtype, values.shape)


def described_episodes(data: Path, kind: str) -> list[dict[str, Any]]:
    """What the files say of each episode, in order: "id", "total_steps", "seed", "options" and others, as JSON."""
    all_episodes = episodes(data, kind)
    out = []
    if kind == "hdf5":
        with opened(data / _HDF5) as file:
            for episode in all_episodes:
                where = f"{data / _HDF5}, episode {episode.number}"
                content = _nested(attributes(file[f"episode_{episode.number}"]), where)
                out.append({**content, "id": episode.number, "total_steps": episode.steps})
        return out
    for episode in all_episodes:
        fields = described(data / str(episode.number) / "metadata.json")
        out.append({**{name: fields.any(name) for name in fields}, "id": episode.number, "total_steps": episode.steps})
    return out


def _nested(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Attributes by name. Minari writes nested options as "options/a/b"."""
    nested: dict[str, Any] = {}
    for name, value in tree.items():
        *above, last = name.split("/")
        holder = nested
        for key in above[:_MOST_NESTED]:
            holder = holder.setdefault(key, {})
            if not isinstance(holder, dict):
                break
        if len(above) > _MOST_NESTED or not isinstance(holder, dict) or last in holder:
            raise CorruptDatasetError(
                f"{where}: the attribute {name[:80]!r} is nested too deeply, or within another one"
            )
        holder[last] = value
    return nested


def _steps(episode: MinariEpisode, where: str, entries: dict[str, Any]) -> Steps:
    return Steps(episode, where, {tuple(map(_name, path)): column for path, column in entries_below(entries)})


def _name(key: str) -> str:
    place = key.removeprefix("_index_")  # a part of a Tuple
    return place if place.isdigit() else key


def _of_hdf5(path: Path) -> Iterator[MinariEpisode]:
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
                yield MinariEpisode(int(number), *steps)


def _of_arrow(data: Path, kind: str) -> Iterator[MinariEpisode]:
    for folder in data.iterdir():
        if _is_number(folder.name):
            steps = described(folder / "metadata.json").whole("total_steps", most=MOST_ROWS)
            with faults(f"{folder}: its {kind} files"):
                rows = sum(_count(path, kind) for path in folder.glob(f"*.{kind}"))
            if rows != steps + 1:
                raise CorruptDatasetError(f"{folder} has {rows} rows, {steps + 1} are needed for {steps} steps")
            yield MinariEpisode(int(folder.name), steps)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def _arrow_entries(folder: Path, kind: str, steps: int, *names: str) -> dict[str, Any]:
    """The columns of an episode with one of these names, by default all."""
    pyarrow = required("pyarrow", "datasets")
    files = sorted(folder.glob(f"*.{kind}"), key=lambda path: (len(path.name), path.name))  # part-2 before part-10
    with faults(f"{folder}: its {kind} files"):
        table = pyarrow.concat_tables([_table(file, kind) for file in files]).combine_chunks()
        table.validate(full=True)
        if len(table) != steps + 1:
            raise CorruptDatasetError(f"{folder} has {len(table)} rows, {steps + 1} are needed for {steps} steps")
        out = {}
        for name in names or table.column_names:
            if name in table.column_names and name != "episode_id":
                column = table[name].chunk(0).slice(0, steps + (name in ONE_MORE))
                read = _infos if name == "infos" else values
                out[name] = read(column, f"{folder}, {name}")
        return out


def _infos(column: Any, where: str, metadata: Any = None) -> Any:
    """As `values`, where single values may be missing: these are zero, or empty text. Infos of no values are left out."""
    types = required("pyarrow", "datasets").types
    if types.is_struct(column.type):
        inner = zip(column.type, column.flatten(), strict=True)
        return {
            field.name: _infos(child, f"{where}/{field.name}", field.metadata)
            for field, child in inner
            if child.null_count < len(child)
        }
    if not column.null_count:
        return values(column, where, metadata)
    present = values(column.drop_null(), where, metadata)
    if isinstance(present, list):
        return [text or "" for text in column.to_pylist()]
    out = np.zeros((len(column), *present.shape[1:]), present.dtype)
    out[column.is_valid().to_numpy(zero_copy_only=False)] = present
    return out


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
