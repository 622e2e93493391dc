"""The files in `meta/` of a LeRobot dataset: where its episodes are."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interop.datasets.errors import CorruptDatasetError, DatasetError
from interop.optional import required

VERSIONS = ("v2.0", "v2.1", "v3.0")


@dataclass(frozen=True)
class Episode:
    """Where an episode is. `videos`: of each key the file, and the second in it at which the episode begins."""

    number: int
    length: int
    data: Path
    videos: tuple[tuple[str, Path, float], ...]

    def __str__(self) -> str:
        return f"episode {self.number}"


def info_of(folder: Path) -> dict[str, Any]:
    """`meta/info.json`. DatasetError for a version of the format that is not one of `VERSIONS`, or without features."""
    (info,) = _json(folder / "meta/info.json")
    version = info.get("codebase_version") if isinstance(info, Mapping) else None
    if version not in VERSIONS:
        raise DatasetError(
            f"{folder}/meta/info.json: codebase_version is {version!r}, this program reads "
            f"{', '.join(VERSIONS)}. The lerobot package converts older datasets"
        )
    try:
        for name, feature in info["features"].items():
            info["features"][name] = {**feature, "dtype": str(feature["dtype"]), "shape": [*map(int, feature["shape"])]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptDatasetError(f"{folder}/meta/info.json does not describe all features: {error!r}") from error
    return dict(info)


def tasks_of(folder: Path) -> dict[int, str]:
    """The text of each task."""
    if (path := folder / "meta/tasks.jsonl").exists():
        return {task["task_index"]: task["task"] for task in _json(path, lines=True)}
    table = read_table(folder / "meta/tasks.parquet")
    (text,) = (name for name in table.column_names if name in ("task", "__index_level_0__"))
    return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True))


def statistics_of(folder: Path) -> dict[str, Any]:
    """ "stats" and "episodes_stats" as they are in files of these names, as far as these are there."""
    found: dict[str, Any] = {}
    if (path := folder / "meta/stats.json").exists():
        (found["stats"],) = _json(path)
    if (path := folder / "meta/episodes_stats.jsonl").exists():
        found["episodes_stats"] = _json(path, lines=True)
    return found


def episodes_of(folder: Path, info: Mapping[str, Any], video_keys: Sequence[str]) -> list[Episode]:
    """All episodes in order. CorruptDatasetError where the place of one is missing, or out of the folder."""
    if (path := folder / "meta/episodes.jsonl").exists():
        rows = _json(path, lines=True)
    else:
        files = sorted((folder / "meta/episodes").glob("*/*.parquet"))
        rows = [row for path in files for row in read_table(path, leave_out="stats/").to_pylist()]
    if not rows:
        raise CorruptDatasetError(f"{folder}/meta has no episodes.jsonl, and no episodes/*/*.parquet with rows")
    try:
        return [_episode(folder, info, video_keys, row) for row in sorted(rows, key=lambda row: row["episode_index"])]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CorruptDatasetError(f"{folder}/meta does not tell where all episodes are: {error!r}") from error


def read_table(path: Path, leave_out: str | None = None, **options: Any) -> Any:
    """The table in a Parquet file, without columns of a prefix. CorruptDatasetError where it is missing or damaged."""
    parquet, pyarrow = required("pyarrow.parquet", "datasets"), required("pyarrow", "datasets")
    try:
        columns = leave_out and [name for name in parquet.read_schema(path).names if not name.startswith(leave_out)]
        return parquet.read_table(path, columns=columns, **options)
    except (OSError, pyarrow.ArrowException) as error:
        raise CorruptDatasetError(f"{path} is missing, or no whole Parquet file: {error}") from error


def _episode(folder: Path, info: Mapping[str, Any], video_keys: Sequence[str], row: Mapping[str, Any]) -> Episode:
    number: int = row["episode_index"]
    names = {"episode_index": number, "episode_chunk": number // info.get("chunks_size", 1000)}

    def file(template: str, group: str, **more: str) -> Path:
        indices = {name: row.get(f"{group}/{name}") for name in ("chunk_index", "file_index")}
        return _inside(folder, template.format(**names, **indices, **more))

    starts = {key: float(row.get(f"videos/{key}/from_timestamp", 0)) for key in video_keys}
    videos = ((key, file(info["video_path"], f"videos/{key}", video_key=key), start) for key, start in starts.items())
    return Episode(number, row["length"], file(info["data_path"], "data"), tuple(videos))


def _inside(folder: Path, name: str) -> Path:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CorruptDatasetError(f"{folder}/meta/info.json: {name} leads out of the folder")
    return folder / name


def _json(path: Path, lines: bool = False) -> list[Any]:
    """The values in a file, of which there is one, or one a line."""
    try:
        text = path.read_text()
        return [json.loads(each) for each in (filter(str.strip, text.splitlines()) if lines else [text])]
    except (OSError, ValueError) as error:
        raise CorruptDatasetError(f"{path} is missing, or no JSON: {error}") from error
