"""Where the rows of each episode of a LeRobot dataset are: in all files of `data/`, by their `episode_index`.

The files that `meta/` names may be stale. Upstream's reader uses them for downloads only.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from interop.datasets.errors import CorruptDatasetError
from interop.datasets.lerobot_json import read_table
from interop.datasets.lerobot_meta import LeRobotInfo, Listed

Found = Mapping[int, Mapping[Path, int]]  # rows of each episode in each file


@dataclass(frozen=True)
class Episode:
    """The location of an episode. `videos` maps features to the file and the start of the episode in seconds."""

    number: int
    length: int
    data: tuple[Path, ...]
    videos: tuple[tuple[str, Path, float], ...]

    def __str__(self) -> str:
        return f"episode {self.number}"


def data_files(folder: Path, info: LeRobotInfo) -> list[Path]:
    """The Parquet files of `data/` that upstream reads, in its order. Hidden files are left out."""
    data = folder / "data"
    paths = {*data.glob("*/*.parquet"), *(data.rglob("*.parquet") if info.is_v2 else ())}
    return sorted(path for path in paths if not path.name.startswith("."))


def rows_of_episodes(folder: Path, info: LeRobotInfo) -> Found:
    """Count the rows of each episode in each file, in the order of their first rows. Reads one column."""
    rows_by_episode: dict[int, dict[Path, int]] = {}
    for path in data_files(folder, info):
        column = read_table(path, ["episode_index"])["episode_index"]
        numbers = column.to_numpy()
        if column.null_count or numbers.dtype.kind not in "iu":
            raise CorruptDatasetError(f"{path}: episode_index is {column.type}, no column of integers without gaps")
        episodes, first, counts = np.unique(numbers, return_index=True, return_counts=True)
        for place in np.argsort(first):
            rows_by_episode.setdefault(int(episodes[place]), {})[path] = int(counts[place])
    return rows_by_episode


def located(
    folder: Path, info: LeRobotInfo, listed: Mapping[int, Listed], chosen: Collection[int] | None
) -> list[Episode]:
    """The location of each episode, in the order of the data.

    CorruptDatasetError, which names it, for an episode that is only in `meta/` or only in `data/`, or has another number of
    rows there; and for other totals in `meta/info.json`, unless episodes are chosen.
    """
    rows_by_episode = rows_of_episodes(folder, info)
    for number, episode in listed.items():
        files = rows_by_episode.get(number, {})
        where = f"{', '.join(map(str, files)) or folder / 'data'}: episode {number} has"
        if sum(files.values()) != episode.length:
            stale = "" if files or not info.data_path or episode.data.exists() else f". {episode.data} is missing"
            raise CorruptDatasetError(f"{where} {sum(files.values())} rows, {episode.length} in meta/{stale}")
    if chosen is None:
        for number, files in rows_by_episode.items():
            if number not in listed:
                rows = sum(files.values())
                raise CorruptDatasetError(
                    f"{next(iter(files))} has {rows} rows of episode {number}, which meta/ does not list"
                )
        _check_totals(folder, info, listed)
    return [
        Episode(
            number,
            listed_episode.length,
            tuple(rows_by_episode[number]),
            tuple((key, *at) for key, at in listed_episode.videos.items()),
        )
        for number in rows_by_episode
        if (listed_episode := listed.get(number)) is not None
    ]


def _check_totals(folder: Path, info: LeRobotInfo, listed: Mapping[int, Listed]) -> None:
    rows = sum(episode.length for episode in listed.values())
    path = folder / "meta/info.json"
    if info.total_episodes not in (None, len(listed)):
        few = [number for number in range(min(info.total_episodes or 0, 2 * len(listed))) if number not in listed][:4]
        gaps = f", and none of {', '.join(map(str, few))}" if few else ""
        raise CorruptDatasetError(f"{path}: total_episodes is {info.total_episodes}, there are {len(listed)}{gaps}")
    if info.total_frames not in (None, rows):
        raise CorruptDatasetError(f"{path}: total_frames is {info.total_frames}, the episodes have {rows} rows")
