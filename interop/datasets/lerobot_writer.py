"""The writer of a LeRobot dataset (v3.0): episodes go in piece by piece, and become rows, videos and `meta/`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from interop.data.arguments import required
from interop.datasets.hub_features import library_metadata
from interop.datasets.lerobot_features import NUMBERING, WrittenFeature, described_features
from interop.datasets.lerobot_files import EpisodeList, Numbered, Tables, Videos
from interop.datasets.lerobot_grown import Existing
from interop.datasets.lerobot_stats import ImageStats, NumberStats, Stats, as_lists, together

_VERSION = "v3.0"
_PARQUET = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
_AT_ONCE = 256  # statistics of so many episodes are joined at once


@dataclass(frozen=True)
class Format:
    """How a dataset is written.

    Args:
        fps: rows a second.
        codec, crf: the encoder of videos and its quality; see `VideoWriter`.
        robot_type: the name of the robot, or None.
    """

    fps: int
    codec: str
    crf: int
    robot_type: str | None


class LeRobotWriter:
    """Writes episodes to a folder, behind those that are there.

    Memory holds a piece of an episode, what the encoders look ahead, the statistics of an episode, and the texts of tasks.

    Args:
        folder: it has the files of `there`, but those that are written anew.
        features: of the rows.
        how: the format.
        there: what the dataset has already.
    """

    def __init__(self, folder: Path, features: Sequence[WrittenFeature], how: Format, there: Existing) -> None:
        self._folder = folder
        self._features = features
        self._how = how
        self._info = dict(there.info or _new_info(features, how))
        self._tasks = {task: number for number, task in enumerate(there.tasks)}
        self._episodes = there.episodes
        self._rows = there.rows
        self._stats: list[dict[str, Stats]] = [dict(there.stats)] if there.stats else []
        chunks_size = self._info.get("chunks_size", 1000)
        most = self._info.get("data_files_size_in_mb", 100)
        most_video = self._info.get("video_files_size_in_mb", 200)
        last = there.last_files

        def numbered(form: str, video_key: str = "") -> Numbered:
            return Numbered(folder, form, chunks_size, video_key)

        self._data = Tables(numbered(self._info["data_path"]), last.get("data"), most)
        listed = Tables(numbered(f"meta/episodes/{_PARQUET}"), last.get("meta/episodes"), most)
        self._listed = EpisodeList(listed, there.schema)
        self._videos = {
            feature.name: Videos(
                numbered(self._info["video_path"], feature.name), last.get(f"videos/{feature.name}"), most_video,
                how.codec, how.fps, (feature.shape[0], feature.shape[1]), how.crf,
            )
            for feature in features
            if feature.is_video
        }  # fmt: skip
        self._schema: Any = None
        self._file = 0, 0
        self._length = 0
        self._done = 0
        self._episode_tasks: dict[str, None] = {}
        self._running: dict[str, NumberStats | ImageStats] = {}

    def begin(self, length: int) -> None:
        """Start an episode of so many rows."""
        self._length = length
        self._done = 0
        self._episode_tasks = {}
        self._file = self._data.begin()
        for videos in self._videos.values():
            videos.begin()
        self._running = {
            feature.name: NumberStats(length, int(np.prod(feature.shape)))
            if feature.image is None
            else ImageStats(length, feature.image.channels)
            for feature in self._features
            if feature.kind != "string"
        } | {name: NumberStats(length, 1) for name in NUMBERING}

    def append(self, values: Mapping[str, Any], tasks: Sequence[str]) -> None:
        """Append rows to the episode: arrays and lists of text by feature, and the task of each row."""
        pa = required("pyarrow", "datasets")
        count = len(tasks)
        self._episode_tasks |= dict.fromkeys(tasks)
        columns: dict[str, Any] = {}
        for feature in self._features:
            here = values[feature.name]
            if feature.image is not None:
                pixels = feature.image.pixels(here)
                self._running[feature.name].add(pixels)
                if feature.is_video:
                    self._videos[feature.name].append(pixels)
                    continue
            elif feature.kind != "string":
                self._running[feature.name].add(here.reshape(count, *feature.shape))
            columns[feature.name] = feature.column(here)
        for name, numbers in self._numbers(tasks).items():
            self._running[name].add(numbers[:, None])
            columns[name] = pa.array(numbers)
        table = pa.table(columns)
        if self._schema is None:
            self._schema = table.schema.with_metadata(library_metadata(self._library_features()))
        self._data.append(table.cast(self._schema))
        self._done += count

    def end(self) -> None:
        """End the episode."""
        stats = {name: running.result() for name, running in self._running.items()}
        row: dict[str, Any] = {
            "episode_index": self._episodes,
            "tasks": [*self._episode_tasks],
            "length": self._length,
            "data/chunk_index": self._file[0],
            "data/file_index": self._file[1],
            "dataset_from_index": self._rows,
            "dataset_to_index": self._rows + self._length,
        }
        for videos in self._videos.values():
            row |= videos.end()
        for name, each in as_lists(stats).items():
            row |= {f"stats/{name}/{kind}": values for kind, values in each.items()}
        self._listed.append(row)
        self._stats.append(stats)
        if len(self._stats) > _AT_ONCE:
            self._stats = [_joined(self._stats)]
        self._episodes += 1
        self._rows += self._length

    def close(self) -> None:
        """Write the ends of all files, and what `meta/` says of the dataset."""
        self._data.close()
        for videos in self._videos.values():
            videos.close()
        self._listed.close()
        meta = self._folder / "meta"
        _write_tasks(meta / "tasks.parquet", [*self._tasks])
        (meta / "stats.json").write_text(json.dumps(as_lists(_joined(self._stats)), indent=4))
        self._info |= {
            "total_episodes": self._episodes,
            "total_frames": self._rows,
            "total_tasks": len(self._tasks),
            "splits": {"train": f"0:{self._episodes}"},
        }
        (meta / "info.json").write_text(json.dumps(self._info, indent=4, ensure_ascii=False))

    def discard(self) -> None:
        """Close all files after an error. What was written is no dataset."""
        self._data.close()
        for videos in self._videos.values():
            videos.close()

    def _numbers(self, tasks: Sequence[str]) -> dict[str, np.ndarray]:
        """The features that number the next rows."""
        frames = np.arange(self._done, self._done + len(tasks))
        for task in tasks:
            self._tasks.setdefault(task, len(self._tasks))
        return {
            "timestamp": (frames / self._how.fps).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(len(tasks), self._episodes),
            "index": self._rows + frames,
            "task_index": np.array([self._tasks[task] for task in tasks], np.int64),
        }

    def _library_features(self) -> dict[str, Any]:
        features = {each.name: each.library_feature() for each in self._features if not each.is_video}
        numbering = {name: {"dtype": kind, "_type": "Value"} for name, kind in NUMBERING.items()}
        return features | numbering


def _new_info(features: Sequence[WrittenFeature], how: Format) -> dict[str, Any]:
    """The content of `meta/info.json` of a new dataset."""
    described = described_features(features)
    for feature in features:
        if feature.is_video:
            described[feature.name]["info"] = {
                "video.height": feature.shape[0],
                "video.width": feature.shape[1],
                "video.codec": {"libsvtav1": "av1", "libx264": "h264", "libx265": "hevc"}.get(how.codec, how.codec),
                "video.pix_fmt": "yuv420p",
                "video.fps": how.fps,
                "video.channels": 3,
                "is_depth_map": False,
                "has_audio": False,
            }
    return {
        "codebase_version": _VERSION,
        "robot_type": how.robot_type,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": how.fps,
        "data_path": f"data/{_PARQUET}",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        if any(feature.is_video for feature in features)
        else None,
        "features": described,
    }


def _joined(parts: Sequence[Mapping[str, Stats]]) -> dict[str, Stats]:
    """The statistics of all features over several parts, of those that each part has."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: together([part[name] for part in parts]) for name in names}


def _write_tasks(path: Path, tasks: Sequence[str]) -> None:
    """Write the table of tasks: a pandas frame with the texts as its index, as upstream reads it."""
    pa = required("pyarrow", "datasets")
    text = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    number = {"pandas_type": "int64", "numpy_type": "int64", "metadata": None}
    frame = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [{"name": "task_index", "field_name": "task_index", **number}, text],
        "pandas_version": "2.2.0",
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    required("pyarrow.parquet", "datasets").write_table(
        table.replace_schema_metadata({"pandas": json.dumps(frame)}), path, write_page_checksum=True
    )
