"""The metadata files of a LeRobot dataset (`meta/`), with the locations of its episodes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interop.data.arguments import required
from interop.datasets.errors import CorruptDatasetError, DatasetError

VERSIONS = ("v2.0", "v2.1", "v3.0")


@dataclass(frozen=True)
class Episode:
    """The location of an episode. `videos` maps keys to the file and the start of the episode in seconds."""

    number: int
    length: int
    data: Path
    videos: tuple[tuple[str, Path, float], ...]

    def __str__(self) -> str:
        return f"episode {self.number}"


def info_of(folder: Path) -> dict[str, Any]:
    """Read `meta/info.json`. DatasetError for a format version outside of `VERSIONS`."""
    info: dict[str, Any] = read_json(path := folder / "meta/info.json")
    version = info.get("codebase_version") if isinstance(info, dict) else None
    if version not in VERSIONS:
        raise DatasetError(
            f"{path}: codebase_version is {version!r}, this program reads {', '.join(VERSIONS)}. The lerobot package "
            "converts older datasets"
        )
    return info


def tasks_of(folder: Path) -> dict[int, str]:
    """The text of each task."""
    if (path := folder / "meta/tasks.jsonl").exists():
        return {task["task_index"]: task["task"] for task in read_json(path)}
    table = read_table(folder / "meta/tasks.parquet")
    texts = [name for name in table.column_names if name != "task_index"]
    return dict(zip(table["task_index"].to_pylist(), table[texts[0]].to_pylist(), strict=True))


def episodes_of(folder: Path, info: Mapping[str, Any], video_keys: Sequence[str]) -> list[Episode]:
    """All episodes in order. KeyError or TypeError if the location of one is missing."""
    if (path := folder / "meta/episodes.jsonl").exists():
        rows = read_json(path)
    else:
        tables = map(read_table, (folder / "meta/episodes").glob("*/*.parquet"))
        kept = (table.select([name for name in table.column_names if "stats/" not in name]) for table in tables)
        rows = [row for table in kept for row in table.to_pylist()]
    if not rows:
        raise CorruptDatasetError(f"{folder}/meta has no episodes.jsonl, and no episodes/*/*.parquet with rows")
    return [_episode(folder, info, video_keys, row) for row in sorted(rows, key=lambda row: row["episode_index"])]


def _episode(folder: Path, info: Mapping[str, Any], video_keys: Sequence[str], row: Mapping[str, Any]) -> Episode:
    number: int = row["episode_index"]

    def file(template: str, group: str, **more: str) -> Path:
        indices = {name: row.get(f"{group}/{name}") for name in ("chunk_index", "file_index")}
        chunk = number // info.get("chunks_size", 1000)
        path = Path(template.format(episode_index=number, episode_chunk=chunk, **indices, **more))
        if path.is_absolute() or ".." in path.parts:
            raise CorruptDatasetError(f"{folder}/meta/info.json: {path} leads out of the folder")
        return folder / path

    videos = (
        (key, file(info["video_path"], f"videos/{key}", video_key=key), row.get(f"videos/{key}/from_timestamp", 0.0))
        for key in video_keys
    )
    return Episode(number, row["length"], file(info["data_path"], "data"), tuple(videos))


def read_table(path: Path, **options: Any) -> Any:
    """Read a Parquet file. CorruptDatasetError if it is missing or damaged."""
    parquet, pyarrow = required("pyarrow.parquet", "datasets"), required("pyarrow", "datasets")
    try:
        return parquet.read_table(path, **options)
    except (OSError, pyarrow.ArrowException) as error:
        raise CorruptDatasetError(f"{path} is missing, or no whole Parquet file: {error}") from error


def read_json(path: Path) -> Any:
    """Read a JSON file; a `.jsonl` file gives a list of the values of its lines."""
    try:
        text = path.read_text()
        return [*map(json.loads, filter(str.strip, text.splitlines()))] if path.suffix == ".jsonl" else json.loads(text)
    except (OSError, ValueError) as error:
        raise CorruptDatasetError(f"{path} is missing, or no JSON: {error}") from error
