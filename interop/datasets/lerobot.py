"""LeRobot: robot episodes in Parquet files and videos, of any such repository on the Hugging Face hub."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

from interop.datasets import lerobot_meta
from interop.datasets.errors import CorruptDatasetError, DatasetError
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.grouping import grouped
from interop.datasets.hub import hub_download, hub_files
from interop.datasets.images import stacked
from interop.datasets.lerobot_meta import Episode
from interop.datasets.rows import channels_first, following, nested
from interop.datasets.source import Part, Source
from interop.datasets.video import Video
from interop.optional import required

_CHUNK = 32  # rows whose frames are in memory at once
_SCALARS = ("timestamp", "frame_index", "episode_index", "task_index")  # upstream has one value each a row
_FLAGS = ("done", "terminated", "truncated")


@dataclass(frozen=True)
class LeRobotSource(Source):
    """A repository with `meta/info.json`. `video`: whether videos are downloaded and decoded."""

    family = "lerobot"

    video: bool = True
    tolerance_s: float = 1e-4

    def download(self, folder: Path) -> Mapping[str, str]:
        kinds = ("meta/", "data/", "videos/") if self.video else ("meta/", "data/")
        files = [file for file in hub_files(self.dataset_id) if file.path.startswith(kinds)]
        if not any(file.path == "meta/info.json" for file in files):
            raise DatasetError(f"{self.dataset_id} on the Hugging Face hub is no LeRobot dataset: no meta/info.json")
        if any(file.path.startswith("videos/") for file in files):
            required("av", "video")  # now, and not after the download
        return hub_download(self.dataset_id, files, folder)

    def metadata(self, folder: Path) -> dict[str, Any]:
        """ "info", "tasks" by number and, where there are such files in `meta/`, "stats" and "episodes_stats"."""
        tasks = {str(number): task for number, task in lerobot_meta.tasks_of(folder).items()}
        return {"info": lerobot_meta.info_of(folder), "tasks": tasks, **lerobot_meta.statistics_of(folder)}

    def parts(self, folder: Path) -> list[Part]:
        info = lerobot_meta.info_of(folder)
        features = info["features"]
        if missing := {"episode_index", "timestamp"} - features.keys():
            raise CorruptDatasetError(f"{folder}/meta/info.json: there is no feature {', '.join(missing)}")
        videos = [key for key, feature in features.items() if self.video and feature["dtype"] == "video"]
        if depth := [key for key in videos if _is_depth(features[key])]:
            raise DatasetError(
                f"{folder}: {depth[0]} is a video of depths, which is not decoded here: pass video=False"
            )
        pictures = ("image", "video")
        size = sum((2 if each["dtype"] in pictures else 8) * int(np.prod(each["shape"])) for each in features.values())
        episodes = lerobot_meta.episodes_of(folder, info, videos)
        return grouped(folder, ((each, each.length, each.length * size) for each in episodes))

    def read(self, part: Part) -> Iterator[TensorDict]:
        info, tasks = lerobot_meta.info_of(part.path), lerobot_meta.tasks_of(part.path)
        videos: dict[str, Video] = {}
        for path, group in groupby(part.which, key=lambda episode: episode.data):
            for episode, table in _tables(path, list(group)):
                rows = _rows(table, info["features"], tasks, f"{path}, episode {episode.number}")
                for key, file, start in episode.videos:
                    if key not in videos or videos[key].path != file:
                        videos[key] = Video(file, start, self.tolerance_s)
                keys = {key: _key(key, info["features"]) for key in videos}
                yield from _with_frames(rows, episode, videos, keys) if keys else [rows]


def _tables(path: Path, episodes: Sequence[Episode]) -> Iterator[tuple[Episode, Any]]:
    """The rows of consecutive episodes of a file."""
    first, last = episodes[0].number, episodes[-1].number
    table = lerobot_meta.read_table(path, filters=[("episode_index", ">=", first), ("episode_index", "<=", last)])
    start = 0
    for episode in episodes:
        rows = table.slice(start, episode.length)
        start += episode.length
        if len(rows) < episode.length or rows["episode_index"].unique().to_pylist() != [episode.number]:
            raise CorruptDatasetError(f"{path}: episode {episode.number} is not in {episode.length} consecutive rows")
        yield episode, rows
    if start != len(table):
        raise CorruptDatasetError(f"{path}: episodes {first} to {last} have {len(table)} rows, {start} in meta/")


def _rows(table: Any, features: Mapping[str, Any], tasks: Mapping[int, str], where: str) -> TensorDict:
    """The columns of an episode, with what TED has: the following observation, and flags of the end."""
    entries: dict[str, Any] = {}
    for name, feature in features.items():
        if feature["dtype"] == "video" or name == "index":
            continue
        if name not in table.column_names:
            raise CorruptDatasetError(f"{where}: there is no column {name}, which is in meta/info.json")
        values = _values(table[name], feature, f"{where}, {name}")
        inner = entries
        for group in (key := _key(name, features))[:-1]:
            inner = inner.setdefault(group, {})
        inner[key[-1]] = values.reshape(-1) if name in _SCALARS else values
    entries["episode"] = entries.pop("episode_index")
    if "task_index" in entries:
        numbers = entries["task_index"].tolist()
        if missing := set(numbers) - tasks.keys():
            raise CorruptDatasetError(f"{where}: there are no texts in meta/ of the tasks {sorted(missing)}")
        entries["task"] = [tasks[number] for number in numbers]
    rows = nested({key: each for key, each in entries.items() if key != "next"}, len(table), where)
    then = nested(entries.get("next", {}), len(table), where)
    never = torch.zeros(len(rows), 1, dtype=torch.bool)
    given = {flag: then.get(flag, never).bool().reshape(-1, 1) for flag in _FLAGS}
    done = given["done"].clone()
    done[-1] = True
    terminated = given["terminated"] if "terminated" in then else given["done"] & ~given["truncated"]
    truncated = given["truncated"] | (done & ~terminated)
    then.update({"terminated": terminated, "truncated": truncated, "done": terminated | truncated})
    if "observation" in rows and "observation" not in then:
        then["observation"] = following(rows.get("observation"))
    return rows.update({"next": then, **dict.fromkeys(_FLAGS, never)})


def _key(name: str, features: Collection[str]) -> tuple[str, ...]:
    """A name, divided at its dots. "a.b" is not divided where "a" is a feature as well."""
    key: list[str] = []
    start = 0
    for end in [place for place, each in enumerate(name) if each == "."] + [len(name)]:
        if name[:end] not in features or end == len(name):
            key.append(name[start:end])
            start = end + 1
    return tuple(key)


def _values(found: Any, feature: Mapping[str, Any], where: str) -> Any:
    """A column as an array [T, *shape], or as a list of text."""
    if feature["dtype"] == "string":
        return found.to_pylist()
    if feature["dtype"] == "image":
        images = [each["bytes"] for each in found.to_pylist() if each and each["bytes"]]
        if len(images) < len(found):
            raise CorruptDatasetError(f"{where}: {len(found) - len(images)} images are not in the file")
        return channels_first(stacked(images, where))
    arrow = required("pyarrow", "datasets")
    flat = found.combine_chunks()
    while isinstance(flat, arrow.ExtensionArray | arrow.ListArray | arrow.LargeListArray | arrow.FixedSizeListArray):
        flat = flat.storage if isinstance(flat, arrow.ExtensionArray) else flat.flatten()
    values = flat.to_numpy(zero_copy_only=False)
    shape = (len(found), *feature["shape"])
    if values.dtype.kind not in "biuf" or values.size != np.prod(shape):
        raise CorruptDatasetError(
            f"{where}: is no column of {feature['dtype']} of shape {feature['shape']} without gaps"
        )
    return values.reshape(shape)


def _with_frames(
    rows: TensorDict, episode: Episode, videos: Mapping[str, Video], keys: Mapping[str, tuple[str, ...]]
) -> Iterator[TensorDict]:
    """The rows of an episode with the frames of its videos, some rows at a time."""
    seconds = rows["timestamp"].double().tolist()
    frames = {key: map(videos[key].at, [start + each for each in seconds]) for key, _, start in episode.videos}
    ahead = {key: [next(each)] for key, each in frames.items()}
    for start in range(0, len(rows), _CHUNK):
        piece = rows[start : start + _CHUNK]
        for key, each in frames.items():
            images = [*ahead[key], *islice(each, len(piece))]
            ahead[key] = images[-1:]
            if len(images) == len(piece):  # behind the last row
                images.append(np.zeros_like(images[0]))
            pair = torch.from_numpy(np.stack(images))
            piece[keys[key]] = pair[:-1]
            if keys[key][0] == "observation":
                piece["next", *keys[key]] = pair[1:]
        yield piece


def _is_depth(feature: Mapping[str, Any]) -> bool:
    said = {**(feature.get("video_info") or {}), **(feature.get("info") or {})}
    return bool(said.get("is_depth_map") or said.get("video.is_depth_map"))


class LeRobotExperienceReplay(BaseDatasetExperienceReplay):
    """Robot episodes in the LeRobot format, v2.0, v2.1 or v3.0 (https://github.com/huggingface/lerobot).

    An episode is a recording; the licence is on its page of the hub. Rows have the features in `meta/info.json`, whose names
    are keys at each dot:

    - "observation.state" is at ("observation", "state") and so on, of the shape and dtype that upstream says. Images and
      frames of videos are uint8 [3, H, W]. ("next", "observation") is that of the next row, and zeros, or empty text, in the
      last row of an episode: upstream has none.
    - "action"; "next.reward" and others at ("next", "reward") [1].
    - ("next", "terminated") bool [1]: `next.done`, unless `next.truncated` is set there. ("next", "truncated"): the last row
      of an episode, if it is not terminated. ("next", "done"): either. "done", "terminated" and "truncated" bool [1], False.
    - "timestamp", in seconds, "frame_index", "task_index": [], and "task" text. `episode_index` is "episode" int64 [].
      `index` is left out: it is the number of the row.

    `metadata` has "info", "tasks" by number and, where upstream has such files, "stats" and "episodes_stats". Decoded videos
    take 2 * 3 * H * W bytes of disk a row.

    Args:
        repo_id: a dataset repository on the hub.
        batch_size: rows of a batch.
        root: the folder of the family, by default `~/.cache/fbuf/lerobot`.
        video: "decode" for the frames of videos, by PyAV; False or "skip" for none, and no download of videos.
        tolerance_s: seconds by which the time of a frame may differ from the `timestamp` of its row.
        **more: as for `BaseDatasetExperienceReplay`.

    Raises:
        DatasetError: no LeRobot dataset, another version of the format, videos of depths.
        ImportError: PyAV is not installed.
    """

    def __init__(
        self,
        repo_id: str,
        batch_size: int | None = None,
        *,
        root: str | os.PathLike[str] | None = None,
        video: Literal["decode", "skip", False] = "decode",
        tolerance_s: float = 1e-4,
        **more: Any,
    ) -> None:
        if video not in ("decode", "skip", False):
            raise ValueError(f"video must be 'decode', 'skip' or False, got {video!r}")
        super().__init__(LeRobotSource(repo_id, video == "decode", tolerance_s), batch_size, root=root, **more)
