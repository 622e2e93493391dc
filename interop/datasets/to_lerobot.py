"""Export of a replay buffer to a LeRobot dataset, a new one or one that grows."""

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tensordict.utils import NestedKey

from interop.buffers import ReplayBuffer
from interop.data.arguments import required, whole
from interop.data.keys import entries_below
from interop.data.trajectory_keys import KeyPath
from interop.datasets.dataset_card import card, keys_in_words
from interop.datasets.lerobot_features import LEROBOT, TASK, WrittenFeature, features_to_write
from interop.datasets.lerobot_grown import Existing, check_alike, existing, link_files
from interop.datasets.lerobot_writer import Format, LeRobotWriter
from interop.datasets.progress import progress
from interop.datasets.stored_episodes import StoredEpisodes, stored_episodes
from interop.datasets.video import VideoWriter
from interop.shared.published_folder import publish

_AT_ONCE = 1 << 25  # bytes of rows in memory
_MOST_ROWS = 4096  # in memory


def to_lerobot(
    rb: ReplayBuffer,
    path: str | os.PathLike[str],
    *,
    fps: int,
    image_keys: Collection[NestedKey] = (),
    names: Mapping[NestedKey, str] | None = None,
    task: str | None = None,
    append: bool = False,
    use_videos: bool = True,
    vcodec: str = "libsvtav1",
    crf: int = 30,
    robot_type: str | None = None,
    licence: str | None = None,
    next_observations: bool = False,
    traj_key: NestedKey | None = None,
    end_keys: Sequence[NestedKey] | None = None,
    only_named_keys: bool = False,
    exclude: Collection[NestedKey] = (),
) -> Path:
    """Write the trajectories of a buffer as episodes of a LeRobot dataset (v3.0), for the `lerobot` package.

    Writes the stored rows without transforms, trajectory by trajectory in the order of their ends, about 30 MB in memory
    at a time. The buffer is locked meanwhile. The folder appears atomically, and grows atomically: a kill leaves the old
    dataset or the new one. Entries are checked before the first byte is written.

    | stored | written |
    |---|---|
    | a tensor at ("a", "b") | the feature "a.b", of the same dtype; of one number a row, of shape [1] |
    | an entry of `image_keys` | a video, or PNG images, which are exact |
    | text | a feature of the kind "string" |
    | text at "task" | the tasks |
    | ("next", "reward"), ("next", "done") and so on | "next.reward", "next.done" |
    | ("next", X), where X is stored too | only by `next_observations`, as readers take it from the next row |
    | "done", "terminated", "truncated" of the root | only if they are set in any row |
    | "timestamp", "frame_index", "episode_index", "task_index", and ids at "episode" | numbered anew |

    `meta/` has the statistics of each episode and of the dataset. They are those of upstream, over finite values; quantiles
    are of rows in equal distances, 10,000 at most. `LeRobotExperienceReplay(name, from_local=path)` reads the dataset.

    Args:
        rb: the buffer.
        path: a folder that does not exist; with `append`, also one of a LeRobot dataset.
        fps: rows a second.
        image_keys: the keys of images, uint8 [C, H, W], [H, W, C] or [H, W].
        names: the names of features by key, where they are not the keys: policies of lerobot look for
            "observation.state", and for names that begin with "observation.images.".
        task: the task of all rows in words, if they have none themselves; by default an empty text.
        append: add episodes to the dataset at `path`, of the same features. Its files get second names (hard links), so that
            this takes no time and no disk for what is there; its files in `meta/` are replaced.
        use_videos: write videos, which lose details; False for PNG images.
        vcodec: the encoder of FFmpeg, as PyAV has it: "libsvtav1", "h264", "hevc".
        crf: its quality: 0 is the best. The default is that of lerobot.
        robot_type: the name of the robot, of a new dataset.
        licence: a licence identifier of the hub, for the card of a new dataset.
        next_observations: write ("next", X) too. Otherwise the last next observation of each episode is lost.
        traj_key, end_keys, only_named_keys: the entries that mark trajectory ends, as for `SliceSampler`.
        exclude: the keys of entries that are left out.

    Returns: the folder.

    Raises:
        FileExistsError: `path` exists, without `append`; it is not modified.
        DatasetError, CorruptDatasetError: with `append`, `path` is no such dataset, or it is damaged.
        ValueError: with `append`, features or `fps` differ; names collide or have a dot, slash or NUL; the encoder does not
            write such images; rows differ in keys, shapes or dtypes; rows have a task, and `task` is given.
        TypeError: an entry is ragged, bytes, without values or of a dtype that is not read back; images are of other shapes.
        KeyError: a key of `image_keys`, `names` or `exclude` is not stored.
        RuntimeError: the buffer is empty, or has no entry that marks trajectory ends.
        ImportError: pyarrow, or PyAV for videos, is not installed.
    """
    required("pyarrow.parquet", "datasets")
    how = Format(whole("fps", fps, 1), vcodec, whole("crf", crf, 0), robot_type)
    folder = Path(os.path.realpath(path))
    if os.path.lexists(folder) and not append:
        raise FileExistsError(f"{folder} is there already: write to another folder, or add episodes by append=True")
    with stored_episodes(rb, traj_key, end_keys, only_named_keys, exclude) as stored:
        features, has_tasks = features_to_write(
            stored, image_keys, names or {}, use_videos=use_videos, next_observations=next_observations
        )
        if has_tasks and task is not None:
            raise ValueError(f"the rows have tasks, got task={task!r} too: leave it out, or pass exclude=['task']")
        _check_encoder(features, how)

        def make(scratch: Path) -> None:
            data = scratch / "data"
            data.mkdir(parents=True)
            there = Existing()
            if append and folder.exists() and any(folder.iterdir()):
                there = existing(folder)
                check_alike(there, features, how.fps, folder)
                link_files(folder, data)
            else:
                (data / "README.md").write_bytes(_card(folder.name, licence, features, stored))
            (data / "meta").mkdir(exist_ok=True)
            writer = LeRobotWriter(data, features, how, there)
            try:
                with progress(f"Writing {folder}", stored.rows, "row") as advance:
                    for rows in _write(stored, features, writer, None if has_tasks else task or ""):
                        advance(rows)
                writer.close()
            except BaseException:
                with contextlib.suppress(Exception):
                    writer.discard()
                raise

        publish(folder, None, make, when="always" if append else "missing", replaces_foreign=append, exchanges=True)
    return folder


def _write(
    stored: StoredEpisodes, features: Sequence[WrittenFeature], writer: LeRobotWriter, task: str | None
) -> Iterator[int]:
    """Write all rows. Yields how many, piece by piece."""
    lengths = stored.lengths()
    step = max(1, min(_MOST_ROWS, _AT_ONCE // max(stored.read(0, 1).bytes(), 1)))
    done = 0  # rows of the episode
    for start in range(0, stored.rows, step):
        stop = min(start + step, stored.rows)
        found: dict[KeyPath, Any] = dict(entries_below(stored.read(start, stop)))
        values: dict[str, Any] = {each.name: LEROBOT.values(found[each.path], each.path) for each in features}
        tasks: Any = [task] * (stop - start) if task is not None else LEROBOT.values(found[TASK], TASK)
        numbers = stored.number(start, stop)
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), stop - start]
        for first, last in pairwise(bounds):
            length = int(lengths[numbers[first]])
            if not done:
                writer.begin(length)
            writer.append({name: column[first:last] for name, column in values.items()}, list(tasks[first:last]))
            done += last - first
            if done == length:
                writer.end()
                done = 0
        yield stop - start


def _check_encoder(features: Sequence[WrittenFeature], how: Format) -> None:
    """ValueError, before anything is written, for an encoder that is missing or does not take images of these sizes."""
    for feature in features:
        if not feature.is_video:
            continue
        height, width, channels = feature.shape
        advice = "pass use_videos=False for PNG images, another vcodec, or images of another size"
        if height % 2 or width % 2:
            raise ValueError(f"{feature.path}: videos have an even number of pixels, got {height} x {width}: {advice}")
        with tempfile.TemporaryDirectory() as scratch:
            try:
                writer = VideoWriter(Path(scratch) / "one.mp4", how.codec, how.fps, height, width, how.crf)
                try:
                    writer.append(np.zeros((1, height, width, channels), np.uint8))
                finally:
                    writer.close()
            except ValueError as error:
                raise ValueError(f"{feature.path}: {error}: {advice}") from error


def _card(name: str, licence: str | None, features: Sequence[WrittenFeature], stored: StoredEpisodes) -> bytes:
    """The dataset card."""
    front = {
        "license": licence,
        "task_categories": ["robotics"],
        "tags": ["LeRobot"],
        "configs": [{"config_name": "default", "data_files": "data/*/*.parquet"}],
    }
    keys = keys_in_words(stored.marked_by)
    lines = [
        f"A LeRobot dataset (v3.0), written from a replay buffer. `meta/info.json` describes it. Episodes end by {keys}.",
        "",
        "| feature | kind | shape |",
        "|---|---|---|",
        *(f"| `{each.name}` | {each.kind} | {[*each.shape]} |" for each in features),
    ]
    return card(front, name, lines).encode(errors="replace")
