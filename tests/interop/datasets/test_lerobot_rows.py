"""The rows of a LeRobot dataset: all of `data/`, by the episode of each row. Nothing that is derived replaces them."""

import io
import json
import shutil
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from interop.datasets.errors import CorruptDatasetError, DatasetError, DownloadError
from interop.datasets.lerobot import LeRobotExperienceReplay, LeRobotSource
from tests.interop.datasets import sources_lerobot as upstream
from tests.interop.datasets.loaders import equal
from tests.interop.datasets.server import Server
from tests.interop.datasets.test_lerobot import SCALAR, TOP, change, small
from tests.interop.datasets.test_video import color, encode

DATA = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
def replay(tmp_path: Path, files: Path) -> Any:
    return partial(LeRobotExperienceReplay, upstream.DATASET, 4, root=tmp_path / "root", from_local=files)


def say(files: Path, **info: Any) -> None:
    """Change entries of `meta/info.json`."""
    path = files / "meta/info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **info}))


def grays(frames: torch.Tensor) -> torch.Tensor:
    """The colors of frames of one color; the codec rounds them."""
    return frames.float().mean((1, 2, 3))


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_all_data_files_in_their_order(replay: Any, files: Path, seed: int) -> None:
    """However rows are divided over files, and whatever files `meta/` names."""
    rng = np.random.default_rng(seed)
    upstream.make(files, rng)
    tables = [pq.read_table(path) for path in sorted(files.glob("data/*/*.parquet"))]
    rows = pa.concat_tables(tables).to_pandas().astype({"index": "int64"})
    shutil.rmtree(files / "data")
    episodes = [rows[rows.episode_index == number] for number in rng.permutation(3)]
    rows = pd.concat(episodes, ignore_index=True)
    cuts = [0, *sorted(rng.integers(0, len(rows), rng.integers(0, 4))), len(rows)]
    for number, (start, stop) in enumerate(pairwise(cuts)):
        path = files / f"data/chunk-{number // 2:03d}/file-{number % 2:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({name: [*rows[name][start:stop]] for name in rows}, tables[0].schema), path)
    change(files / EPISODES, **{"data/file_index": rng.integers(0, 5, 3), "data/chunk_index": rng.integers(0, 5, 3)})
    found = replay()[:]
    assert found["episode"].tolist() == [*rows.episode_index] and found["frame_index"].tolist() == [*rows.frame_index]
    assert found["action"].flatten(1).tolist() == [np.stack(each).flatten().tolist() for each in rows.action]
    frames = np.array([0, 5, 45])[rows.episode_index] + rows.frame_index
    assert (grays(found[TOP]) - torch.tensor([*frames]) * 5 % 256).abs().max() <= 1
    assert found["next", "done"].sum() == 3


def drop(path: Path, which: int, twice: bool = False) -> None:
    """Remove a row of a table or a line of a file, or add it again at the end."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        kept = (
            pa.concat_tables([table, table.slice(which, 1)]) if twice else table.filter(np.arange(len(table)) != which)
        )
        pq.write_table(kept, path)
    else:
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines, lines[which]] if twice else [*lines[:which], *lines[which + 1 :]]))


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
@pytest.mark.parametrize("which", range(3))
def test_episodes_that_are_listed_twice_or_not(replay: Any, files: Path, version: str, which: int) -> None:
    upstream.make(files, np.random.default_rng(0), version)
    listing = files / (EPISODES if version == "v3.0" else "meta/episodes.jsonl")
    whole = listing.read_bytes()
    drop(listing, which)
    with pytest.raises(
        CorruptDatasetError, match=rf"data/.* has {upstream.LENGTHS[which]} rows of episode {which}, which"
    ):
        replay()
    listing.write_bytes(whole)
    drop(listing, which, twice=True)
    with pytest.raises(CorruptDatasetError, match=rf"{listing.name}: episode {which} is listed twice"):
        replay()
    listing.write_bytes(whole)
    assert len(replay()) == 48


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_episodes_without_their_rows(replay: Any, files: Path, version: str) -> None:
    upstream.make(files, np.random.default_rng(0), version)
    last = sorted((files / "data").rglob("*.parquet"))[-1]
    content = last.read_bytes()
    last.unlink()
    with pytest.raises(
        CorruptDatasetError, match=rf"data: episode 2 has 0 rows, 3 in meta/\. .*{last.name} is missing"
    ):
        replay()
    last.write_bytes(content)
    shutil.copy(last, last.with_name("file-009.parquet"))
    with pytest.raises(CorruptDatasetError, match=r"file-009.parquet.*: episode 2 has 6 rows, 3 in meta/"):
        replay()
    assert len(replay(episodes=[0, 1])) == 45


def test_an_episode_that_is_nowhere(replay: Any, files: Path) -> None:
    upstream.make(files, np.random.default_rng(0), "v2.0")
    drop(files / "meta/episodes.jsonl", 1)
    next(files.glob("data/*/episode_000001.parquet")).unlink()
    with pytest.raises(CorruptDatasetError, match=r"info.json: total_episodes is 3, there are 2, and none of 1"):
        replay()
    say(files, total_episodes=2)
    with pytest.raises(CorruptDatasetError, match=r"info.json: total_frames is 48, the episodes have 8 rows"):
        replay()
    say(files, total_frames=8)
    assert replay()[:]["episode"].tolist() == [0] * 5 + [2] * 3


def test_entries_of_info_that_are_optional(replay: Any, files: Path) -> None:
    upstream.make(files, np.random.default_rng(0))
    path = files / "meta/info.json"
    info = json.loads(path.read_text())
    for name in ("total_episodes", "total_frames", "total_tasks", "chunks_size", "data_path"):
        del info[name]
    path.write_text(json.dumps(info))
    assert len(replay()) == 48
    for name, feature in (("fps", upstream.VIDEO), ("video_path", upstream.VIDEO), ("features", "episode_index")):
        path.write_text(json.dumps({key: value for key, value in info.items() if key != name}))
        with pytest.raises(CorruptDatasetError, match=rf"(there is no {name}|'{name}' is missing)"):
            replay(download="force")
        assert feature in info["features"]


def test_an_episode_has_several_tasks(replay: Any, files: Path) -> None:
    upstream.make(files, np.random.default_rng(0))
    change(files / DATA, task_index=[0, 1] * 22 + [0])
    assert list(replay()[:]["task"])[:3] == [upstream.TASKS[0], upstream.TASKS[1], upstream.TASKS[0]]


# ------------------------------------------------------------------ times


def test_frames_after_half_an_hour(replay: Any, files: Path) -> None:
    """Steps of float32 are 0.0001 seconds there and more."""
    frames = np.arange(61_600, 61_640)
    video = {"dtype": "video", "shape": [16, 32, 3]}
    features = {"frame_index": SCALAR, "timestamp": {"dtype": "float32", "shape": [1]}, "observation.top": video}
    small(files, features, {}, fps=30, video_path="videos/{video_key}.mp4")
    columns = {"episode_index": frames * 0, "frame_index": frames, "timestamp": np.float32(frames / 30)}
    upstream.table(files / "data/000.parquet", columns)
    upstream.text(files / "meta/episodes.jsonl", json.dumps({"episode_index": 0, "length": 40}))
    (files / "videos").mkdir()
    encode(files / "videos/observation.top.mp4", [0, *frames], fps=30)
    rows = replay()[:]
    assert abs(frames / 30 - np.float32(frames / 30)).max() > 1e-4
    assert (grays(rows["observation", "top"]) - torch.tensor([color(each) for each in range(1, 41)])).abs().max() <= 1


@pytest.mark.parametrize("tolerance", [0.1, 0.25, 1000.0])
def test_a_tolerance_of_frames(replay: Any, files: Path, tolerance: float) -> None:
    upstream.make(files, np.random.default_rng(0))
    rows = replay(tolerance_s=tolerance)[:]
    assert (grays(rows[TOP]) - torch.arange(48) * 5 % 256).abs().max() <= 1


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf")])
def test_tolerances_that_are_none(replay: Any, tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance_s must be finite and at least 0"):
        replay(tolerance_s=tolerance)


# ------------------------------------------------------------------ names


@pytest.mark.parametrize("name", ["done", "terminated", "truncated", "task", "episode", "done.left", "is_init", "mask"])
def test_features_are_not_replaced(replay: Any, files: Path, name: str) -> None:
    columns = {name: [7, 0, 9], "task_index": [0, 0, 0]}
    small(files, {name: SCALAR, "task_index": SCALAR}, columns)
    upstream.text(files / "meta/tasks.jsonl", json.dumps({"task_index": 0, "task": "push"}))
    rows = replay()[:]
    assert rows[tuple(name.split("."))].tolist() == [[7], [0], [9]]
    assert rows["episode_index" if name == "episode" else "episode"].tolist() == [0, 0, 0]
    assert name == "task" or list(rows["task"]) == ["push"] * 3
    assert rows["next", "done"].tolist() == [[False], [False], [True]]
    for flag in {"done", "terminated", "truncated"} - {name.split(".")[0]}:
        assert not rows[flag].any()


def test_next_observations_of_upstream_are_kept_and_others_added(replay: Any, files: Path) -> None:
    video = {"dtype": "video", "shape": [16, 32, 3]}
    numbers = dict.fromkeys(("observation.a", "observation.b", "next.observation.a"), SCALAR)
    features = {**numbers, "frame_index": SCALAR, "observation.top": video, "next.observation.top": video}
    columns = {name: [1, 2, 3] for name in numbers} | {"next.observation.a": [5, 6, 7], "frame_index": [0, 1, 2]}
    small(files, features, columns, fps=3, video_path="{video_key}.mp4")
    encode(files / "observation.top.mp4", fps=3)
    encode(files / "next.observation.top.mp4", fps=3)
    then = replay()[:]["next", "observation"]
    assert then["a"].tolist() == [[5], [6], [7]] and then["b"].tolist() == [[2], [3], [0]]
    assert (then["top"][2] > 0).all(), "upstream's, no zeros"


@pytest.mark.parametrize(
    ("name", "feature", "text"),
    [
        ("next", SCALAR, r"in the way of the entries \('next', 'done', 'terminated', 'truncated'\)"),
        ("next.done.left", SCALAR, "in the way of the entries"),
        ("a..b", SCALAR, "a name with an empty part"),
        ("a/b", SCALAR, "a name with an empty part, a slash"),
        ("next.done", {"dtype": "int64", "shape": [2]}, r"int64 of shape \[2\], where one number a row is needed"),
        ("next.truncated", {"dtype": "string", "shape": [1]}, "string of shape"),
        ("language_events", {"dtype": "language", "shape": [1]}, "of kind 'language'"),
        ("sound", {"dtype": "audio", "shape": [1]}, "of kind 'audio'"),
        ("at", {"dtype": "timestamp[s]", "shape": [1]}, "of kind"),
        ("names", {"dtype": "string", "shape": [2]}, "several texts a row"),
        ("points", {"dtype": "float32", "shape": [-1]}, "lists of any length"),
        ("depth", {"dtype": "video", "shape": [4, 4, 1], "info": {"is_depth_map": True}}, "a video of depths"),
    ],
)
def test_features_that_are_left_out_by_name(replay: Any, files: Path, name: str, feature: Any, text: str) -> None:
    small(
        files, {name: feature, "action": SCALAR, "next.reward": SCALAR}, {"action": [1, 2, 3], "next.reward": [4, 5, 6]}
    )
    with pytest.raises(DatasetError, match=rf"the feature {name} is .*{text}.*pass exclude=\['{name}'\]"):
        replay()
    rows = replay(exclude=[name])[:]
    assert rows["action"].tolist() == [[1], [2], [3]] and rows["next", "reward"].tolist() == [[4], [5], [6]]


def test_several_features_that_are_left_out(replay: Any, files: Path) -> None:
    odd = {name: {"dtype": "language", "shape": [1]} for name in "xyz"}
    small(files, {**odd, "action": SCALAR}, {"action": [1, 2, 3]})
    with pytest.raises(DatasetError, match=r"the feature y is .*\(also z\).*exclude=\['x', 'y', 'z'\]"):
        replay(exclude=["x"])
    assert replay(exclude=["z", "y", "x"])[:]["action"].tolist() == [[1], [2], [3]]
    for wrong, error, text in [
        (["actoin"], ValueError, "no feature 'actoin', near are action"),
        ("xyz", TypeError, "list"),
    ]:
        with pytest.raises(error, match=text):
            replay(exclude=wrong, download="force")


def test_a_column_that_does_not_fit_is_left_out(replay: Any, files: Path) -> None:
    small(files, {"a": SCALAR, "b": {"dtype": "image", "shape": [4, 4, 3]}}, {"a": [1, 2, 3], "b": ["p.png"] * 3})
    with pytest.raises(CorruptDatasetError, match=r"b: 3 images are not in the file.*exclude=\['b'\]"):
        replay()
    assert set(replay(exclude=["b", "timestamp"])[:].keys()) == {
        "a",
        "episode",
        "next",
        "done",
        "terminated",
        "truncated",
    }


def test_videos_that_are_left_out_are_not_downloaded(hub: Server, tmp_path: Path) -> None:
    upstream.make(hub.folder / "datasets" / upstream.DATASET, np.random.default_rng(0))
    rows = LeRobotExperienceReplay(upstream.DATASET, root=tmp_path, exclude=[upstream.VIDEO])[:]
    assert rows["observation", "images"].keys() == {"wrist"}
    assert not any(request.path.endswith(".mp4") for request in hub.requests)


# ------------------------------------------------------------------ columns


def column(replay: Any, files: Path, kind: str, shape: list[int], values: Any) -> Any:
    small(files, {"a": {"dtype": kind, "shape": shape}}, {"a": values})
    return replay(download="force")[:]["a"]


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("float32", pa.float64()),
        ("float16", pa.float32()),
        ("int32", pa.int64()),
        ("int64", pa.float64()),
        ("bool", pa.int64()),
    ],
)
def test_kinds_are_those_of_info(replay: Any, files: Path, kind: str, stored: Any) -> None:
    """As upstream, which casts the files to the features."""
    found = column(replay, files, kind, [2], pa.array([[0, 1], [1, 0], [1, 1]], pa.list_(stored)))
    assert found.dtype == getattr(torch, kind) and found.tolist() == [[0, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("kind", "shape", "values"),
    [
        ("int64", [2], [[1], [2, 3], [4, 5, 6]]),
        ("int64", [2, 2], [[[1, 2], [3, 4]], [[1, 2, 3], [4]], [[5, 6], [7, 8]]]),
        ("int64", [2], [[1, 2], None, [4, 5]]),
        ("int64", [2], [[1, 2], [3, None], [4, 5]]),
        ("int64", [2], [1, 2, 3]),
        ("int64", [1], [[1], [], [2]]),
        ("int8", [1], [1, 2, 300]),
        ("int64", [1], [1.5, 2.0, 3.0]),
        ("float32", [1], ["1", "2", "3"]),
        ("string", [1], ["x", None, "z"]),
        ("string", [1], [1, 2, 3]),
    ],
)
def test_columns_of_other_kinds_and_shapes(replay: Any, files: Path, kind: str, shape: list[int], values: Any) -> None:
    with pytest.raises(CorruptDatasetError, match=rf"episode 0, a: is no column of {kind}"):
        column(replay, files, kind, shape, values)


def test_columns_of_several_layouts(replay: Any, files: Path) -> None:
    expected = [[1], [2], [3]]
    for values in (
        [1, 2, 3],
        expected,
        pa.array(expected, pa.large_list(pa.int32())),
        pa.array(expected, pa.list_(pa.int8(), 1)),
    ):
        assert column(replay, files, "int64", [1], values).tolist() == expected
    assert column(replay, files, "float32", [0], [[], [], []]).shape == (3, 0)
    permuted = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int64(), (2, 3), permutation=[1, 0]),
        pa.array([[*range(6)]] * 3, pa.list_(pa.int64(), 6)),
    )
    assert column(replay, files, "int64", [3, 2], permuted).tolist() == [[[0, 3], [1, 4], [2, 5]]] * 3
    words = pa.array(["a", "b", "a"])
    for texts in (words, words.cast(pa.large_string()), words.dictionary_encode()):
        assert list(column(replay, files, "string", [1], texts)) == ["a", "b", "a"]


@pytest.mark.parametrize(
    "options", [{}, {"compression": "tiff_deflate"}, {"compression": "tiff_lzw"}, {"big_endian": True}]
)
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_depths_as_tiff(replay: Any, files: Path, dtype: str, options: dict[str, Any]) -> None:
    depths = np.random.default_rng(0).uniform(0, 60000, (3, 4, 6)).astype(dtype)
    images = []
    for depth in depths:
        file = io.BytesIO()
        Image.fromarray(depth).save(file, "TIFF", **options)
        images.append(file.getvalue())
    small(files, {"observation.depth": {"dtype": "image", "shape": [4, 6, 1], "info": {"is_depth_map": True}}}, {
        "observation.depth": [{"bytes": image, "path": "frame.tiff"} for image in images]
    })  # fmt: skip
    data = replay()
    rows = data[:]
    assert rows["observation", "depth"].dtype == getattr(torch, dtype)
    assert (rows["observation", "depth"][:, 0].numpy() == depths).all()
    assert (rows["next", "observation", "depth"][:2, 0].numpy() == depths[1:]).all()
    batch = data.sample()
    assert (batch["observation", "depth"][:, 0].numpy() == depths[batch["index"]]).all()


def test_images_as_bytes(replay: Any, files: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 3), np.uint8)
    found = column(replay, files, "image", [4, 6, 3], [upstream.png(image) for image in images])
    assert (found.numpy() == images.transpose(0, 3, 1, 2)).all()


# ------------------------------------------------------------------ tasks


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("escaped", [True, False])
def test_ends_of_lines_in_texts(replay: Any, files: Path, ends: str, escaped: bool) -> None:
    """JSON allows all of these characters in text."""
    texts = [f"line{each}line" for each in "\u2028\u2029\u0085\x7f\u00a0"]
    small(files, {"task_index": SCALAR}, {"task_index": [1, 4, 2]})
    lines = [
        json.dumps({"task_index": number, "task": text}, ensure_ascii=escaped) for number, text in enumerate(texts)
    ]
    (files / "meta/tasks.jsonl").write_bytes(ends.join([*lines, "", ""]).encode())
    data = replay()
    assert list(data[:]["task"]) == [texts[1], texts[4], texts[2]] and [*data.metadata["tasks"].values()] == texts


def test_the_texts_of_tasks_are_the_index_of_a_frame(replay: Any, files: Path) -> None:
    upstream.make(files, np.random.default_rng(0))
    source, path, texts = LeRobotSource(upstream.DATASET), files / "meta/tasks.parquet", list(upstream.TASKS)
    frame = pd.DataFrame({"author": ["me", "you"], "task_index": [0, 1], "note": ["x", "y"]}, index=texts)
    for each in (frame, frame.rename_axis("sentence"), frame.rename_axis("task"), frame[["task_index"]]):
        each.to_parquet(path)
        assert source.metadata(files)["tasks"] == {0: texts[0], 1: texts[1]}
    for columns in ({"author": [3, 4], "task": texts}, {"task": texts, "author": ["me", "you"]}, {"text": texts}):
        upstream.table(path, {**columns, "task_index": [0, 1]})
        assert source.metadata(files)["tasks"] == {0: texts[0], 1: texts[1]}
    assert {*replay(video=False)[:]["task"]} == {*texts}
    for table in (
        {"a": texts, "b": texts, "task_index": [0, 1]},
        {"task": texts},
        {"task": [1, 2], "task_index": [0, 1]},
    ):
        upstream.table(path, table)
        with pytest.raises(CorruptDatasetError, match=r"tasks.parquet must have a column task_index"):
            source.metadata(files)


# ------------------------------------------------------------------ episodes and revisions


@pytest.mark.parametrize(
    ("episodes", "version"), [([2, 0], "v2.1"), ([0], "v3.0"), (range(1, 3), "v3.0"), (np.array([1]), "v2.0")]
)
def test_episodes(replay: Any, files: Path, episodes: Any, version: str) -> None:
    upstream.make(files, np.random.default_rng(0), version)
    every = replay()[:]
    rows = replay(episodes=episodes, download="force")[:]
    assert equal(rows, every[torch.isin(every["episode"], torch.tensor([*episodes]))])


def test_episodes_with_gaps_in_their_numbers(replay: Any, files: Path) -> None:
    upstream.make(files, np.random.default_rng(0))
    for path in files.glob("*/**/*.parquet"):
        if "episode_index" in (table := pq.read_table(path)).column_names:
            change(path, episode_index=np.array([4, 70, 9])[table["episode_index"].to_numpy()])
    assert replay()[:]["episode"].unique_consecutive().tolist() == [4, 70, 9]
    assert replay(episodes=[9], download="force")[:]["episode"].tolist() == [9] * 3
    with pytest.raises(ValueError, match=r"has no episodes \[0, 5\]: it has 3, from 4 to 70"):
        replay(episodes=[5, 0, 9], download="force")


@pytest.mark.parametrize(
    ("episodes", "error"),
    [([], ValueError), ([-1], ValueError), ([0, 0], ValueError), ([True], TypeError), ([0.5], TypeError)],
)
def test_episodes_that_are_none(replay: Any, files: Path, episodes: Any, error: type[Exception]) -> None:
    upstream.make(files, np.random.default_rng(0))
    with pytest.raises(error, match="episodes must"):
        replay(episodes=episodes)


@pytest.mark.parametrize("stale", [False, True])
def test_only_the_files_of_the_episodes_are_downloaded(hub: Server, tmp_path: Path, stale: bool) -> None:
    folder = hub.folder / "datasets" / upstream.DATASET
    upstream.make(folder, np.random.default_rng(0), "v3.0" if stale else "v2.1")
    if stale:
        change(folder / EPISODES, **{"data/file_index": [0, 0, 7]})
    rows = LeRobotExperienceReplay(upstream.DATASET, root=tmp_path, episodes=[2])[:]
    assert rows["episode"].tolist() == [2] * 3
    asked = {request.path.rpartition("/")[2] for request in hub.requests if request.path.endswith((".parquet", ".mp4"))}
    in_both = {"file-000.parquet", "file-001.parquet", "file-000.mp4"}
    assert asked == (in_both | {"tasks.parquet"} if stale else {"episode_000002.parquet", "episode_000002.mp4"})


def test_revisions(hub: Server, tmp_path: Path) -> None:
    main = upstream.make(hub.folder / "datasets" / upstream.DATASET, np.random.default_rng(0))
    old = upstream.make(hub.folder / "revisions" / upstream.DATASET / "v2.1", np.random.default_rng(1), "v2.1")
    for revision, expected in (("v2.1", old), (None, main)):
        rows = LeRobotExperienceReplay(upstream.DATASET, root=tmp_path / str(revision), revision=revision)[:]
        assert (rows["action"].numpy() == np.concatenate([each["action"] for each in expected])).all()
    with pytest.raises(ValueError, match=r"was made from \{'revision': None\}, not \{'revision': 'v2.1'\}"):
        LeRobotExperienceReplay(upstream.DATASET, root=tmp_path / "None", revision="v2.1")
    with pytest.raises(DownloadError, match=upstream.DATASET):
        LeRobotExperienceReplay(upstream.DATASET, root=tmp_path / "other", revision="v9")
    with pytest.raises(ValueError, match="revision must name"):
        LeRobotExperienceReplay(upstream.DATASET, root=tmp_path / "other", revision="")


# ------------------------------------------------------------------ what meta/ says

WRONG = [0, -3, "7", None, 1.5, float("inf"), float("nan"), 10**40, [], {}, True]


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize("name", ["fps", "chunks_size", "total_episodes", "total_frames"])
def test_numbers_of_info(replay: Any, files: Path, name: str, value: Any) -> None:
    small(files, {"action": SCALAR}, {"action": [1, 2, 3]}, **{name: value})
    if (name, value) == ("fps", 1.5):
        assert len(replay()) == 3
        return
    with pytest.raises(CorruptDatasetError, match=rf"info.json.*{name}"):
        replay()


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize("name", ["episode_index", "length"])
def test_numbers_of_episodes(replay: Any, files: Path, name: str, value: Any) -> None:
    small(files, {"action": SCALAR}, {"action": [1, 2, 3]})
    upstream.text(files / "meta/episodes.jsonl", json.dumps({"episode_index": 0, "length": 3, name: value}))
    if (name, value) == ("episode_index", 0) and value is not False:
        assert len(replay()) == 3
        return
    with pytest.raises(CorruptDatasetError, match=rf"episodes.jsonl.*'{name}' should be a whole number"):
        replay()


@pytest.mark.parametrize("value", [-1, None, 10**18], ids=str)
@pytest.mark.parametrize(
    "name",
    ["data/file_index", f"videos/{upstream.VIDEO}/chunk_index", f"videos/{upstream.VIDEO}/from_timestamp", "length"],
)
def test_numbers_of_tables(replay: Any, files: Path, name: str, value: Any) -> None:
    upstream.make(files, np.random.default_rng(0))
    change(files / EPISODES, **{name: [1, value, 1]})
    with pytest.raises(
        CorruptDatasetError, match=rf"file-000.parquet, episode 1: '{name}' should be a (whole )?number"
    ):
        replay()


@pytest.mark.parametrize("value", ["x", None, 1.5, float("inf"), [], -1], ids=str)
def test_numbers_of_tasks(replay: Any, files: Path, value: Any) -> None:
    small(files, {"task_index": SCALAR}, {"task_index": [0, 0, 0]})
    upstream.text(files / "meta/tasks.jsonl", json.dumps({"task_index": value, "task": "push"}))
    with pytest.raises(CorruptDatasetError, match=r"tasks.jsonl.*'task_index' should be a whole number"):
        replay()
    upstream.text(files / "meta/tasks.jsonl", json.dumps({"task_index": 0, "task": None}))
    with pytest.raises(CorruptDatasetError, match=r"tasks.jsonl.*'task' should be a text"):
        replay()


@pytest.mark.parametrize("value", [["x"], [None], [2.5], [float("inf")], [10**40], [[1]], 3, None, "1", [-2]], ids=str)
def test_shapes(replay: Any, files: Path, value: Any) -> None:
    small(files, {"action": {"dtype": "int64", "shape": value}}, {"action": [1, 2, 3]})
    with pytest.raises(CorruptDatasetError, match=r"meta does not describe all features.*features action"):
        replay()


@pytest.mark.parametrize("name", ["info.json", "tasks.jsonl", "episodes.jsonl", "stats.json", "episodes_stats.jsonl"])
@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b"{", b"\xff\xfe\xff", b"9" * 5000], ids=range(5)
)
def test_json_that_is_none(replay: Any, files: Path, name: str, content: bytes) -> None:
    small(files, {"action": SCALAR}, {"action": [1, 2, 3]})
    (files / "meta" / name).write_bytes(content)
    with pytest.raises(CorruptDatasetError, match=rf"{name}(, line 1)?: no JSON that can be read"):
        replay()


@pytest.mark.parametrize("content", ["3", "null", '"x"', "[1]", "{}"])
@pytest.mark.parametrize("name", ["tasks.jsonl", "episodes.jsonl"])
def test_lines_of_other_values(replay: Any, files: Path, name: str, content: str) -> None:
    small(files, {"action": SCALAR}, {"action": [1, 2, 3]})
    upstream.text(files / "meta" / name, content)
    with pytest.raises(CorruptDatasetError, match=name):
        replay()


@pytest.mark.parametrize("name", ["data_path", "video_path"])
@pytest.mark.parametrize(
    "path",
    [
        "data/{chunk_index:099999999999d}.parquet",
        "data/{chunk_index:0999d}.parquet",
        "data/{episode_index:>99999999}.parquet",
        "data/{episode_index:.99999999f}.parquet",
        "data/{video_key:99999999}.parquet",
        "data/{video_key!r}.parquet",
        "data/{episode_index.real}.parquet",
        "data/{video_key[0]}.parquet",
        "data/{chunk_index:{episode_index}}.parquet",
        "data/{0}.parquet",
        "data/{}.parquet",
        "data/{user}.parquet",
        "data/{episode_index",
        "data/\0.parquet",
        "a" * 5000,
        7,
        [],
        "../a",
        "/a",
    ],
    ids=str,
)
def test_formats_of_paths(replay: Any, files: Path, name: str, path: Any) -> None:
    small(files, {"action": SCALAR}, {"action": [1, 2, 3]}, **{name: path})
    began = time.monotonic()
    with pytest.raises(CorruptDatasetError, match=rf"info.json: '?{name}'? .*(should be|leads out of the folder)"):
        replay()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "path", ["{episode_index}", "{episode_index:d}/x", "{{a}}-{episode_chunk:03d}", "{episode_index:06d}", "x"]
)
def test_formats_that_upstream_may_write(replay: Any, files: Path, path: str) -> None:
    small(files, {"action": SCALAR}, {"action": [1, 2, 3]}, data_path=path, video_path=None)
    assert len(replay()) == 3


def test_two_columns_of_one_name(replay: Any, files: Path) -> None:
    small(files, {"action": SCALAR}, {"action": [1, 2, 3]})
    table = pq.read_table(path := files / "data/000.parquet")
    for name in ("action", "episode_index"):
        pq.write_table(table.append_column(name, pa.array([4, 5, 6])), path)
        with pytest.raises(CorruptDatasetError, match=f"000.parquet: 2 columns are named {name}"):
            replay()
