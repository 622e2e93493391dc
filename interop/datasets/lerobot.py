"""LeRobot: robot episodes in Parquet files and videos, from any LeRobot repository on the Hugging Face hub."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

from interop.data.arguments import required
from interop.datasets.errors import CorruptDatasetError, DatasetError
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.grouping import grouped
from interop.datasets.hub import hub_download, hub_files
from interop.datasets.images import stacked
from interop.datasets.lerobot_meta import Episode, episodes_of, info_of, read_json, read_table, tasks_of
from interop.datasets.rows import channels_first, following, leaf
from interop.datasets.source import Part, Source
from interop.datasets.video import frames_at

_CHUNK = 32  # rows with frames in memory at once
_SCALARS = ("timestamp", "frame_index", "episode_index", "task_index")  # one value per row
_FLAGS = ("done", "terminated", "truncated")


@dataclass(frozen=True)
class LeRobotSource(Source):
    """A repository with `meta/info.json`. `video`: download and decode videos."""

    family = "lerobot"

    video: bool = True
    tolerance_s: float = 1e-4

    def download(self, folder: Path) -> Mapping[str, str]:
        kinds = ("meta/", "data/", "videos/") if self.video else ("meta/", "data/")
        files = [file for file in hub_files(self.dataset_id) if file.path.startswith(kinds)]
        if not any(file.path == "meta/info.json" for file in files):
            raise DatasetError(f"{self.dataset_id} on the Hugging Face hub is no LeRobot dataset: no meta/info.json")
        if any(file.path.startswith("videos/") for file in files):
            required("av", "video")  # fail before the download
        return hub_download(self.dataset_id, files, folder)

    def metadata(self, folder: Path) -> dict[str, Any]:
        stats = {path.stem: read_json(path) for path in sorted((folder / "meta").glob("*stats.json*"))}
        return {"info": info_of(folder), "tasks": tasks_of(folder), **stats}

    def parts(self, folder: Path) -> list[Part]:
        info = info_of(folder)
        try:
            every = {name: info["features"][name] for name in (*info["features"], "episode_index", "timestamp")}
            videos = [name for name, feature in every.items() if self.video and feature["dtype"] == "video"]
            size = sum(_bytes(each) for name, each in every.items() if each["dtype"] != "video" or name in videos)
            episodes = episodes_of(folder, info, videos)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CorruptDatasetError(
                f"{folder}/meta does not describe all features and episodes: {error!r}"
            ) from error
        if depth := [name for name in videos if 'is_depth_map": true' in json.dumps(every[name])]:
            raise DatasetError(f"{folder}: {depth[0]} is a video of depths, which is not decoded: pass video=False")
        return grouped(folder, ((each, each.length, each.length * size) for each in episodes))

    def read(self, part: Part) -> Iterator[TensorDict]:
        features, tasks = info_of(part.path)["features"], tasks_of(part.path)
        for path, episodes in groupby(part.which, key=lambda episode: episode.data):
            for episode, table in _tables(path, list(episodes)):
                rows = _rows(table, features, tasks, f"{path}, {episode}")
                seconds = rows["timestamp"].double().numpy()
                videos = {
                    _key(key, features): frames_at(file, (start + seconds).tolist(), self.tolerance_s)
                    for key, file, start in episode.videos
                }
                yield from _with_frames(rows, videos) if videos else [rows]


def _bytes(feature: Mapping[str, Any]) -> int:
    return int(np.prod(feature["shape"])) * (2 if feature["dtype"] in ("image", "video") else 8)


def _tables(path: Path, episodes: Sequence[Episode]) -> Iterator[tuple[Episode, Any]]:
    """Yield each episode of a file with its rows."""
    numbers = [episode.number for episode in episodes]
    table = read_table(path, filters=[("episode_index", ">=", min(numbers)), ("episode_index", "<=", max(numbers))])
    compute = required("pyarrow.compute", "datasets")
    for episode in episodes:
        rows = table.filter(compute.equal(table["episode_index"], episode.number))
        if len(rows) != episode.length:
            raise CorruptDatasetError(f"{path}: {episode} has {len(rows)} rows, {episode.length} in meta/")
        yield episode, rows


def _rows(table: Any, features: Mapping[str, Any], tasks: Mapping[int, str], where: str) -> TensorDict:
    """The columns of an episode in TED format: with next observations and end flags."""
    rows = TensorDict({"next": TensorDict({}, [len(table)])}, [len(table)])
    for name, feature in features.items():
        if feature["dtype"] == "video" or name == "index":
            continue
        if name not in table.column_names:
            raise CorruptDatasetError(f"{where}: there is no column {name}, which is in meta/info.json")
        values = _values(table[name], feature, f"{where}, {name}")
        key = ("episode",) if name == "episode_index" else _key(name, features)
        rows[key] = leaf(values.reshape(-1) if name in _SCALARS else values)
    if "task_index" in features:
        numbers = rows["task_index"].tolist()
        if missing := set(numbers) - tasks.keys():
            raise CorruptDatasetError(f"{where}: there are no texts in meta/ of the tasks {sorted(missing)}")
        rows["task"] = leaf([tasks[number] for number in numbers])
    then = rows["next"]
    never = torch.zeros(len(rows), 1, dtype=torch.bool)
    done, terminated, truncated = (then.get(flag, never).bool().reshape(-1, 1).clone() for flag in _FLAGS)
    if "next.terminated" not in features:
        terminated = done & ~truncated
    done[-1] = True
    truncated |= done & ~terminated
    then.update({"terminated": terminated, "truncated": truncated, "done": terminated | truncated})
    if "observation" in rows and "observation" not in then:
        then["observation"] = following(rows.get("observation"))
    return rows.update(dict.fromkeys(_FLAGS, never))


def _key(name: str, features: Collection[str]) -> tuple[str, ...]:
    """Split a name at its dots. "a.b" is not split if "a" is a feature too."""
    key: list[str] = []
    names = name.split(".")
    for each, before in zip(names, ["", *accumulate(names, "{}.{}".format)], strict=False):
        if before in features:
            key[-1] += f".{each}"
        else:
            key.append(each)
    return tuple(key)


def _values(found: Any, feature: Mapping[str, Any], where: str) -> Any:
    """Convert a column to an array [T, *shape], or a list of text."""
    kind, shape = feature["dtype"], (len(found), *feature["shape"])
    if kind == "string":
        return found.to_pylist()
    if kind == "image":
        images = [each["bytes"] for each in found.to_pylist() if each and each["bytes"]]
        if len(images) < len(found):
            raise CorruptDatasetError(f"{where}: {len(found) - len(images)} images are not in the file")
        return channels_first(stacked(images, where))
    flat = found.combine_chunks()
    flat = getattr(flat, "storage", flat)  # an array with several dims, if `datasets` is imported
    if hasattr(flat, "flatten"):
        flat = required("pyarrow.compute", "datasets").list_flatten(flat, recursive=True)
    values = flat.to_numpy(zero_copy_only=False)
    if flat.null_count or values.dtype.kind not in "biuf" or values.size != np.prod(shape):
        raise CorruptDatasetError(f"{where}: is no column of {kind} of shape {feature['shape']} without gaps")
    return values.reshape(shape)


def _with_frames(rows: TensorDict, videos: Mapping[tuple[str, ...], Iterator[np.ndarray]]) -> Iterator[TensorDict]:
    """Yield the rows of an episode with decoded video frames, a chunk at a time."""
    pairs = {key: pairwise(chain(frames, [None])) for key, frames in videos.items()}
    for piece in rows.split(_CHUNK):
        for key, each in pairs.items():
            now, then = zip(*islice(each, len(piece)), strict=True)
            piece[key] = torch.from_numpy(np.stack(now))
            if key[0] == "observation":
                last = [np.zeros_like(now[0])] if then[-1] is None else then[-1:]
                piece["next", *key] = torch.from_numpy(np.stack([*then[:-1], *last]))
        yield piece


class LeRobotExperienceReplay(BaseDatasetExperienceReplay):
    """Robot episodes in the LeRobot format, v2.0, v2.1 or v3.0 (https://github.com/huggingface/lerobot).

    An episode is a recording. The licence is on the hub page. Rows have the features of `meta/info.json`, with upstream's
    shapes and dtypes. Names are split at their dots into nested keys:

    - ("observation", "state"), "action", ("next", "reward") [1] and others. Images and video frames are uint8 [3, H, W].
      ("next", "observation") is that of the next row; in the last row of an episode, zeros or empty text.
    - ("next", "terminated") bool [1]: `next.done` without `next.truncated`. ("next", "truncated"): the last row of an
      episode, unless terminated. ("next", "done"): either. "done", "terminated" and "truncated" bool [1], False.
    - "timestamp", in seconds, "frame_index", "task_index" and "episode" []; "task" text. `index` is omitted.

    `metadata` has "info", "tasks" by number and, if upstream has them, "stats" and "episodes_stats". Decoded videos take
    2 * 3 * H * W bytes of disk per row.

    Args:
        repo_id: a dataset repository on the hub.
        batch_size: rows per batch.
        video: "decode" decodes video frames with PyAV; False or "skip" neither downloads nor decodes videos.
        tolerance_s: the maximum difference in seconds between a frame's time and the `timestamp` of its row.
        **more: as for `BaseDatasetExperienceReplay`.

    Raises:
        DatasetError: no LeRobot dataset, an unsupported version, or depth videos. ImportError: PyAV is not installed.
    """

    def __init__(
        self, repo_id: str, batch_size: int | None = None, *, video: Literal["decode", "skip", False] = "decode",
        tolerance_s: float = 1e-4, **more: Any,
    ) -> None:  # fmt: skip
        if video not in ("decode", "skip", False):
            raise ValueError(f"video must be 'decode', 'skip' or False, got {video!r}")
        super().__init__(LeRobotSource(repo_id, video == "decode", tolerance_s), batch_size, **more)
