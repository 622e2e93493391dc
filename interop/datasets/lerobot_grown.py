"""What a LeRobot dataset has already, to which episodes are appended."""

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from interop.datasets import parquet
from interop.datasets.errors import CorruptDatasetError, DatasetError
from interop.datasets.lerobot_features import NUMBERING, WrittenFeature
from interop.datasets.lerobot_json import read_json, read_table
from interop.datasets.lerobot_meta import info_of, tasks_of
from interop.datasets.lerobot_stats import Stats

if TYPE_CHECKING:
    import pyarrow as pa

WRITTEN_ANEW = ("meta/info.json", "meta/stats.json", "meta/tasks.parquet")


@dataclass(frozen=True)
class Existing:
    """What is there. `schema` is that of `meta/episodes`; `last_files` the highest chunk and file, by kind and video key."""

    info: Mapping[str, Any] | None = None
    tasks: tuple[str, ...] = ()
    episodes: int = 0
    rows: int = 0
    stats: Mapping[str, Stats] = field(default_factory=dict)
    schema: "pa.Schema | None" = None
    last_files: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def existing(folder: Path) -> Existing:
    """Read `meta/` of a dataset.

    Raises:
        DatasetError: no dataset of v3.0, or one whose episodes or tasks are not numbered from 0, or without statistics.
        CorruptDatasetError: `meta/` is damaged.
    """
    if not (folder / "meta/info.json").exists():
        raise DatasetError(f"{folder} is no LeRobot dataset, it has no meta/info.json: write to another folder")
    info = info_of(folder)
    if info.is_v2:
        raise DatasetError(
            f"{folder} is a dataset of {info.version}, which does not grow: convert it by lerobot to v3.0"
        )
    tasks = tasks_of(folder, info)
    if sorted(tasks) != [*range(len(tasks))]:
        raise DatasetError(f"{folder}/meta/tasks.parquet does not number the tasks from 0: it has {sorted(tasks)[:8]}")
    path = folder / "meta/stats.json"
    if not path.exists():
        raise DatasetError(
            f"{path} is missing, to which the statistics of new episodes are added: let lerobot compute it"
        )
    numbers, schema, last_files = _episodes(folder)
    if not np.array_equal(np.sort(numbers), np.arange(len(numbers))) or info.total_episodes != len(numbers):
        raise DatasetError(
            f"{folder}/meta/episodes does not number {info.total_episodes} episodes from 0, it has {len(numbers)}"
        )
    if info.total_frames is None:
        raise DatasetError(f"{folder}/meta/info.json has no total_frames, from which new rows are numbered")
    return Existing(
        read_json(folder / "meta/info.json"),
        tuple(tasks[number] for number in range(len(tasks))),
        len(numbers),
        info.total_frames,
        _stats(path),
        schema,
        last_files,
    )


def _stats(path: Path) -> dict[str, Stats]:
    try:
        return {
            name: {kind: np.asarray(values, np.float64) for kind, values in each.items()}
            for name, each in read_json(path).items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise CorruptDatasetError(f"{path} does not have numbers by feature and statistic: {error}") from error


def _episodes(folder: Path) -> tuple[np.ndarray, "pa.Schema", dict[str, tuple[int, int]]]:
    """The numbers of the episodes, the schema of their table, and the last file of each kind."""
    numbers: list[np.ndarray] = []
    schemas: list[pa.Schema] = []
    last: dict[str, tuple[int, int]] = {}
    for path in sorted((folder / "meta/episodes").glob("*/*.parquet")):
        with parquet.opened(path) as file:
            schemas.append(file.schema)
        kinds = [name.removesuffix("/file_index") for name in file.schema.names if name.endswith("/file_index")]
        ends = ("chunk_index", "file_index")
        table = read_table(path, ["episode_index", *(f"{kind}/{end}" for kind in kinds for end in ends)])
        numbers.append(table["episode_index"].to_numpy())
        for kind in kinds:
            pairs = zip(*(table[f"{kind}/{end}"].to_pylist() for end in ends), strict=True)
            last[kind] = max([*pairs, last.get(kind, (0, 0))])
    if not schemas:
        raise DatasetError(f"{folder}/meta/episodes has no files")
    return np.concatenate(numbers), schemas[0], last


def check_alike(there: Existing, features: Sequence[WrittenFeature], fps: int, where: Path) -> None:
    """ValueError, naming a feature, unless rows of these features fit into the dataset."""
    assert there.info is not None
    if there.info.get("fps") != fps:
        raise ValueError(f"{where} has {there.info.get('fps')} frames a second, got fps={fps}")
    stored = there.info["features"]
    had = {name: (each["dtype"], tuple(each["shape"])) for name, each in stored.items() if name not in NUMBERING}
    new = {feature.name: (feature.kind, feature.shape) for feature in features}
    for name in {**had, **new}:
        if had.get(name) != new.get(name):
            here, came = (_shown(each.get(name)) for each in (had, new))
            raise ValueError(
                f"the feature {name} is {here} in {where}, and {came} in the buffer: episodes of one dataset have the same "
                "features. Use names=, exclude=, image_keys= and use_videos= to make them alike"
            )


def _shown(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if kind is None else f"{kind[0]} {[*kind[1]]}"


def link_files(folder: Path, to: Path) -> None:
    """Give the files of a dataset a second name below `to`, or a copy where there are no hard links.

    Files that are written anew are left out: a write to a second name would change the first one.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_dir() or name.as_posix() in WRITTEN_ANEW:
            continue
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = Path(os.path.realpath(path))
        with contextlib.suppress(OSError):
            os.link(source, target)
            continue
        shutil.copyfile(source, target)
