"""LeRobot: robot episodes in Parquet files and videos, from any LeRobot repository on the Hugging Face hub."""

import difflib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, groupby, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.utils import NestedKey

from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.data.arguments import not_negative, required, whole
from interop.datasets.errors import CorruptDatasetError, DatasetError
from interop.datasets.experience_replay import BaseDatasetExperienceReplay
from interop.datasets.grouping import grouped
from interop.datasets.hub import HubFile, hub_download, hub_files
from interop.datasets.lerobot_columns import unsupported, values_of
from interop.datasets.lerobot_json import read_json, read_table
from interop.datasets.lerobot_meta import Feature, LeRobotInfo, episodes_of, info_of, tasks_of
from interop.datasets.lerobot_rows import Episode, data_files, located, rows_of_episodes
from interop.datasets.rows import following, leaf
from interop.datasets.source import Part, Source
from interop.datasets.video import frames_at
from interop.sample_units import SampleUnit
from interop.samplers import Sampler
from interop.shared.source_files import files_below
from interop.transforms import Transform
from interop.writers import Writer

if TYPE_CHECKING:
    import pyarrow as pa

_CHUNK = 32  # rows with frames in memory at once
_SCALARS = ("timestamp", "frame_index", "episode_index", "task_index")  # one value per row
_FLAGS = ("done", "terminated", "truncated")


@dataclass(frozen=True)
class LeRobotSource(Source):
    """A repository with `meta/info.json`.

    Args:
        video: download and decode videos.
        tolerance_s: as for `LeRobotExperienceReplay`.
        episodes: the numbers of the episodes to read, sorted; None for all.
        exclude: the names of features that are left out, sorted; None for none.
        revision: of the repository; None for its main branch.
    """

    family = "lerobot"

    video: bool = True
    tolerance_s: float = 1e-4
    episodes: tuple[int, ...] | None = None
    exclude: tuple[str, ...] | None = None
    revision: str | None = None

    def download(self, folder: Path) -> Mapping[str, str]:
        files = hub_files(self.dataset_id, revision=self.revision)
        if not any(file.path == "meta/info.json" for file in files):
            raise DatasetError(f"{self.dataset_id} on the Hugging Face hub is no LeRobot dataset: no meta/info.json")
        get = partial(hub_download, self.dataset_id, folder=folder, revision=self.revision)
        sums = get([file for file in files if file.path.startswith("meta/")])
        info = info_of(folder)
        features = self._features(folder, info)
        videos = [name for name, feature in features.items() if feature.kind == "video"]
        if videos:
            required("av", "video")  # fail before the download
        data = [file for file in files if file.path.startswith("data/")]
        if self.episodes is None:
            named = {file.path for file in files if _is_video_of(file, videos)}
            return sums | get([*data, *(file for file in files if file.path in named)])
        listed = episodes_of(folder, info, videos, self.episodes).values()
        paths = {at for episode in listed for at in (episode.data, *(path for path, _ in episode.videos.values()))}
        sums |= get([file for file in files if folder / file.path in paths])
        rows_by_episode = rows_of_episodes(folder, info)
        if any(sum(rows_by_episode.get(episode.number, {}).values()) < episode.length for episode in listed):
            sums |= get(data)  # `meta/` names other files than those that have the rows
        return sums

    def inputs(self, folder: Path) -> list[Path]:
        videos = files_below(folder / "videos") if self.video else []
        return [*files_below(folder / "meta"), *data_files(folder, info_of(folder)), *videos]

    def metadata(self, folder: Path) -> dict[str, Any]:
        info = info_of(folder)
        stats = {path.stem: read_json(path) for path in sorted((folder / "meta").glob("*stats.json*"))}
        return {"info": read_json(folder / "meta/info.json"), "tasks": tasks_of(folder, info), **stats}

    def parts(self, folder: Path) -> list[Part]:
        info = info_of(folder)
        features = self._features(folder, info)
        videos = [name for name, feature in features.items() if feature.kind == "video"]
        if videos and info.fps is None:
            raise CorruptDatasetError(
                f"{folder}/meta/info.json: there is no fps, which gives the times of video frames"
            )
        listed = episodes_of(folder, info, videos, self.episodes)
        if missing := [number for number in self.episodes or () if number not in listed]:
            there = [*episodes_of(folder, info, [], None)]
            raise ValueError(
                f"{self.dataset_id} has no episodes {missing}: it has {len(there)}, from {min(there)} to {max(there)}"
            )
        size = sum(map(_bytes, features.values()))
        return grouped(
            folder,
            (
                (episode, episode.length, episode.length * size)
                for episode in located(folder, info, listed, self.episodes)
            ),
        )

    def read(self, part: Part) -> Iterator[TensorDict]:
        info = info_of(part.path)
        features = self._features(part.path, info)
        tasks = tasks_of(part.path, info)
        columns = [name for name, feature in features.items() if feature.kind != "video" and name != "index"]
        has_videos = len(columns) + ("index" in features) < len(features)
        needed = ["episode_index", *(["frame_index"] if has_videos else []), *columns]
        for paths, episodes in groupby(part.which, key=lambda episode: episode.data):
            for episode, table in _tables(paths, list(episodes), list(dict.fromkeys(needed))):
                where = f"{', '.join(map(str, paths))}, {episode}"
                rows = _rows(table, features, tasks, where)
                frames = _frames(table, where) if "frame_index" in needed else None
                if frames is None or info.fps is None or not has_videos:
                    yield rows
                    continue
                # Exact, unlike the column of float32 timestamps, whose steps grow with the time.
                times = frames / info.fps
                videos = {
                    _key(key, features): frames_at(file, (start + times).tolist(), self.tolerance_s)
                    for key, file, start in episode.videos
                }
                yield from _with_frames(rows, videos, [_key(name, features) for name in features])

    def _features(self, folder: Path, info: LeRobotInfo) -> dict[str, Feature]:
        """The features to read. ValueError for names to exclude that there are not; DatasetError for kinds that are not
        supported, and names that collide with those of the rows."""
        exclude = self.exclude or ()
        for name in exclude:
            if name not in info.features:
                near = difflib.get_close_matches(name, info.features, n=4, cutoff=0.4) or [*info.features]
                raise ValueError(f"exclude: {self.dataset_id} has no feature {name!r}, near are {', '.join(near)}")
        read = {
            name: feature
            for name, feature in info.features.items()
            if name not in exclude and (self.video or feature.kind != "video")
        }
        if "episode_index" not in info.features:
            raise CorruptDatasetError(f"{folder}/meta/info.json: there is no feature episode_index")
        faults = {name: unsupported(described) or _collides(name, described, read) for name, described in read.items()}
        if wrong := [name for name, fault in faults.items() if fault]:
            also = "" if len(wrong) == 1 else f" (also {', '.join(wrong[1:])})"
            or_all = " or video=False" if all(read[name].kind == "video" for name in wrong) else ""
            raise DatasetError(
                f"{folder}: the feature {wrong[0]} is {faults[wrong[0]]}{also}. To read the others, pass "
                f"exclude={sorted({*exclude, *wrong})}{or_all}"
            )
        return read


def _is_video_of(file: HubFile, features: Collection[str]) -> bool:
    """Whether the file is a video of one of the features, whose name is a folder in its path."""
    return file.path.startswith("videos/") and not {*Path(file.path).parts}.isdisjoint(features)


def _bytes(feature: Feature) -> int:
    return int(np.prod(feature.shape, dtype=float)) * (2 if feature.kind in ("image", "video") else 8)


def _collides(name: str, feature: Feature, features: Collection[str]) -> str | None:
    """Why the name of a feature cannot be a key of rows, or None."""
    key = _key(name, features)
    if not all(key) or "/" in name or "\0" in name:
        return "a name with an empty part, a slash or a NUL, which cannot be a key"
    if key == ("next",) or (key[0] == "next" and key[1] in _FLAGS and len(key) > 2):
        return f"in the way of the entries ('next', {', '.join(map(repr, _FLAGS))})"
    is_number = feature.kind not in ("string", "image", "video") and feature.shape in ((), (1,))
    if not is_number and (name in _SCALARS or (key[0] == "next" and key[1] in _FLAGS)):
        return f"{feature.kind} of shape {[*feature.shape]}, where one number a row is needed"
    return None


def _tables(
    paths: Sequence[Path], episodes: Sequence[Episode], columns: list[str]
) -> Iterator[tuple[Episode, "pa.Table"]]:
    """Yield each episode of some files with its rows."""
    numbers = [episode.number for episode in episodes]
    bounds = ("episode_index", min(numbers), max(numbers))
    tables = [read_table(path, columns, bounds) for path in paths]
    pyarrow = required("pyarrow", "datasets")
    compute = required("pyarrow.compute", "datasets")
    for episode in episodes:
        pieces = [table.filter(compute.equal(table["episode_index"], episode.number)) for table in tables]
        try:
            rows = pieces[0] if len(pieces) == 1 else pyarrow.concat_tables(pieces)
        except pyarrow.ArrowException as error:
            raise CorruptDatasetError(
                f"{', '.join(map(str, paths))}: {episode} has columns that differ: {error}"
            ) from error
        if len(rows) != episode.length:
            raise CorruptDatasetError(f"{paths[0]}: {episode} has {len(rows)} rows, {episode.length} in meta/")
        yield episode, rows


def _frames(table: "pa.Table", where: str) -> np.ndarray:
    """The numbers of the frames. CorruptDatasetError if the rows are not in their order."""
    frames = np.asarray(values_of(table["frame_index"], Feature("int64", (1,)), f"{where}, frame_index"))[:, 0]
    if (np.diff(frames) < 0).any():
        raise CorruptDatasetError(f"{where}: the rows are not in the order of frame_index")
    return frames


def _rows(table: "pa.Table", features: Mapping[str, Feature], tasks: Mapping[int, str], where: str) -> TensorDict:
    """The columns of an episode in TED format: with next observations and end flags.

    What is derived never replaces a feature.
    """
    rows = TensorDict({"next": TensorDict({}, [len(table)])}, [len(table)])
    keys = {name: _key(name, features) for name in features if name != "index"}
    root = {key[0] for key in keys.values()}
    if "episode" not in root and "episode_index" in keys:
        keys["episode_index"] = ("episode",)
    for name, key in keys.items():
        if features[name].kind == "video":
            continue
        try:
            values = values_of(table[name], features[name], f"{where}, {name}")
        except CorruptDatasetError as error:
            raise CorruptDatasetError(f"{error}. To read the other columns, pass exclude={[name]}") from error
        rows[key] = leaf(values.reshape(-1) if name in _SCALARS and isinstance(values, np.ndarray) else values)
    if "task_index" in keys and "task" not in root:
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
    if "observation" in rows:
        then["observation"] = _completed(then.get("observation", None), following(rows.get("observation")))
    return rows.update({flag: never for flag in _FLAGS if flag not in root})


def _completed(value: Any, derived: Any) -> Any:
    """Add the derived entries that are not given."""
    if value is None:
        return derived
    if isinstance(value, TensorDict) and isinstance(derived, TensorDict):
        for key in derived.keys():  # noqa: SIM118
            value[key] = _completed(value.get(key, None), derived.get(key))
    return value


def _key(name: str, features: Collection[str]) -> tuple[str, ...]:
    """Split a name at its dots. "a.b" is not split if "a" is a feature too."""
    key: list[str] = []
    names = name.split(".")
    for part, before in zip(names, ["", *accumulate(names, "{}.{}".format)], strict=False):
        if before in features:
            key[-1] += f".{part}"
        else:
            key.append(part)
    return tuple(key)


def _with_frames(
    rows: TensorDict, videos: Mapping[tuple[str, ...], Iterator[np.ndarray]], keys: Sequence[tuple[str, ...]]
) -> Iterator[TensorDict]:
    """Yield the rows of an episode with decoded video frames, a chunk at a time. `keys` are those of the features."""
    pairs = {key: pairwise(chain(frames, [None])) for key, frames in videos.items()}
    derived = {("next", *key) for key in videos if key[0] == "observation" and not _is_taken(("next", *key), keys)}
    for piece in rows.split(_CHUNK):
        for key, pair in pairs.items():
            now, then = zip(*islice(pair, len(piece)), strict=True)
            piece[key] = torch.from_numpy(np.stack(now))
            if ("next", *key) in derived:
                last = [np.zeros_like(now[0])] if then[-1] is None else then[-1:]
                piece["next", *key] = torch.from_numpy(np.stack([*then[:-1], *last]))
        yield piece


def _is_taken(key: tuple[str, ...], keys: Sequence[tuple[str, ...]]) -> bool:
    """Whether one of the keys is the key, above it or below it."""
    return any(key[: len(key_read)] == key_read[: len(key)] for key_read in keys)


class LeRobotExperienceReplay(BaseDatasetExperienceReplay):
    """Robot episodes in the LeRobot format, v2.0, v2.1 or v3.0 (https://github.com/huggingface/lerobot).

    An episode is a recording. The licence is on the hub page. Rows have the features of `meta/info.json`, with upstream's
    shapes and dtypes, in the order of upstream's data files. Names are split at their dots into nested keys:

    - ("observation", "state"), "action", ("next", "reward") [1] and others. Images and video frames are uint8 [3, H, W],
      depth images uint16 or float32 [1, H, W] in the unit of the file. ("next", "observation") is that of the next row; in
      the last row of an episode, zeros or empty text.
    - ("next", "terminated") bool [1]: `next.done` without `next.truncated`. ("next", "truncated"): the last row of an
      episode, unless terminated. ("next", "done"): either. "done", "terminated" and "truncated" bool [1], False.
    - "timestamp", in seconds, "frame_index", "task_index" and "episode" []; "task" text. `index` is omitted.

    Features of these names are kept: of a feature `done`, "done" has its values. Where a feature is named `episode`, the
    number of the episode is "episode_index".

    The rows of an episode are found by `episode_index` in all files of `data/`, and its video frames by `frame_index / fps`
    from its start in the video: the nearest frame. `metadata` has "info", "tasks" by number and, if upstream has them,
    "stats" and "episodes_stats". Decoded videos take 2 * 3 * H * W bytes of disk per row.

    Args:
        repo_id: a dataset repository on the hub.
        batch_size: rows per batch.
        video: "decode" decodes video frames with PyAV; False or "skip" neither downloads nor decodes videos.
        tolerance_s: the maximum difference in seconds between the time of a row and that of its video frame.
        episodes: the numbers of the episodes to load. Only their files are downloaded. All by default.
        exclude: names of features to leave out, as in `meta/info.json`, such as "observation.images.depth".
        revision: a branch, tag or commit of the repository; its main branch by default.

    The other arguments are those of `BaseDatasetExperienceReplay`.

    Raises:
        DatasetError: no LeRobot dataset, an unsupported version, or features of kinds that are not supported: videos of
            depths, lists of any length, language annotations and others. The message names them for `exclude`.
        CorruptDatasetError: besides damaged files, an episode that `meta/` lists twice, or that is only in `meta/` or only
            in `data/`, or has another length there; totals that differ from `meta/info.json`; rows that are not in the order
            of `frame_index`; no video frame within the tolerance.
        ValueError: an episode or feature that the dataset has not.
        ImportError: PyAV is not installed.
    """

    def __init__(
        self,
        repo_id: str,
        batch_size: int | None = None,
        *,
        video: Literal["decode", "skip", False] = "decode",
        tolerance_s: float = 1e-4,
        episodes: Sequence[int] | None = None,
        exclude: Sequence[str] = (),
        revision: str | None = None,
        root: str | os.PathLike[str] | None = None,
        download: bool | Literal["force"] = True,
        from_local: str | os.PathLike[str] | None = None,
        split_trajs: bool = False,
        num_workers: int = 0,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
        transform_factory: Callable[[], Transform | Callable[[Any], Any]] | None = None,
        dim_extend: int | None = None,
        checkpointer: StorageCheckpointerBase | type[StorageCheckpointerBase] | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        sample_unit: SampleUnit | None = None,
        consume_after_n_samples: int | None = None,
        priority_key: NestedKey | None = "td_error",
    ) -> None:
        if video not in ("decode", "skip", False):
            raise ValueError(f"video must be 'decode', 'skip' or False, got {video!r}")
        if isinstance(exclude, str) or not all(isinstance(name, str) for name in exclude):
            raise TypeError(f"exclude must be a list of names of features, got {exclude!r}")
        if revision is not None and not (isinstance(revision, str) and revision):
            raise ValueError(f"revision must name a branch, tag or commit, got {revision!r}")
        chosen = None if episodes is None else tuple(sorted({whole("episodes", number, 0) for number in episodes}))
        if episodes is not None and (not chosen or len(chosen) < len(episodes)):
            raise ValueError(f"episodes must be one or more different numbers, got {episodes!r}")
        source = LeRobotSource(
            repo_id,
            video == "decode",
            not_negative("tolerance_s", tolerance_s),
            chosen,
            tuple(sorted({*exclude})) or None,
            revision,
        )
        super().__init__(
            source,
            batch_size,
            root=root,
            download=download,
            from_local=from_local,
            split_trajs=split_trajs,
            num_workers=num_workers,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            transform_factory=transform_factory,
            dim_extend=dim_extend,
            checkpointer=checkpointer,
            generator=generator,
            shared=shared,
            compilable=compilable,
            delayed_init=delayed_init,
            sample_unit=sample_unit,
            consume_after_n_samples=consume_after_n_samples,
            priority_key=priority_key,
        )
