"""LeRobot datasets of all versions that are on the hub."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from interop.datasets.errors import CorruptDatasetError, DatasetError
from interop.datasets.lerobot import LeRobotExperienceReplay, LeRobotSource
from tests.interop.datasets import sources_lerobot as upstream
from tests.interop.datasets.server import Server

TOP, WRIST = ("observation", "images", "top"), ("observation", "images", "wrist")
ENDS = (np.cumsum(upstream.LENGTHS) - 1).tolist()


@pytest.fixture
def replay(tmp_path: Path) -> Any:
    """The class, of a dataset whose files are in the folder "files"."""
    return partial(LeRobotExperienceReplay, upstream.DATASET, 4, root=tmp_path / "root", from_local=tmp_path / "files")


def change(path: Path, **columns: Any) -> None:
    """Write columns of a Parquet file anew."""
    table = pq.read_table(path)
    pq.write_table(pa.table({name: columns.get(name, table[name]) for name in table.column_names}), path)


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_rows(replay: Any, tmp_path: Path, version: str) -> None:
    episodes = upstream.make(tmp_path / "files", np.random.default_rng(0), version)
    rows = replay()[:]
    given = {name: torch.from_numpy(np.concatenate([each[name] for each in episodes])) for name in episodes[0]}
    assert (rows["observation", "state"] == given["observation.state"]).all()
    assert (rows["action"] == given["action"]).all()
    assert (rows["next", "reward"][:, 0] == given["next.reward"]).all()
    assert (rows["next", "success"][:, 0] == given["next.success"]).all()
    for name in ("timestamp", "frame_index", "task_index"):
        assert (rows[name] == given[name]).all() and rows[name].dtype == given[name].dtype
    assert (rows["episode"] == given["episode_index"]).all() and "index" not in rows.keys()  # noqa: SIM118
    assert list(rows["task"]) == [upstream.TASKS[number] for number in given["task_index"]]
    assert (rows[WRIST] == given[upstream.IMAGE].movedim(-1, 1)).all()
    assert rows[TOP].dtype == torch.uint8 and rows[TOP].shape[1:] == (3, 16, 32)
    assert ((rows[TOP].int() - given[upstream.VIDEO].movedim(-1, 1).int()).abs() <= 1).all()
    inside = torch.ones(len(rows), dtype=torch.bool)
    inside[ENDS] = False
    for key in (TOP, WRIST, ("observation", "state")):
        assert (rows["next", *key][inside] == rows[key].roll(-1, 0)[inside]).all()
        assert not rows["next", *key][~inside].any()
    assert rows["next", "done"].flatten().nonzero().flatten().tolist() == ENDS
    assert rows["next", "terminated"].flatten().nonzero().flatten().tolist() == [ENDS[0], ENDS[2]]
    assert (rows["next", "truncated"] == rows["next", "done"] & ~rows["next", "terminated"]).all()
    for flag in ("done", "terminated", "truncated"):
        assert rows[flag].shape == rows["next", flag].shape == (len(rows), 1) and not rows[flag].any()


@pytest.mark.parametrize("video", [False, "skip"])
def test_without_videos(replay: Any, tmp_path: Path, video: Any) -> None:
    upstream.make(tmp_path / "files", np.random.default_rng(0))
    for path in (tmp_path / "files").rglob("*.mp4"):
        path.unlink()
    dataset = replay(video=video)
    assert dataset[0]["observation", "images"].keys() == {"wrist"}
    assert dataset.sample().shape == (4,)


@pytest.mark.parametrize("version", ["v2.0", "v3.0"])
def test_parts_begin_anywhere_in_a_file(tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream.make(tmp_path, np.random.default_rng(0), version)
    source = LeRobotSource(upstream.DATASET)
    (whole,) = source.parts(tmp_path)
    monkeypatch.setattr("interop.datasets.grouping._BYTES", 1)
    parts = source.parts(tmp_path)
    assert [part.rows for part in parts] == [*upstream.LENGTHS]
    rows = torch.cat([*source.read(whole)])
    assert (torch.cat([piece for part in parts for piece in source.read(part)]) == rows).all()


@pytest.mark.parametrize(
    ("given", "terminated", "truncated"),
    [
        ({}, [0, 0, 0], [0, 0, 1]),
        ({"done": [0, 0, 1]}, [0, 0, 1], [0, 0, 0]),
        ({"done": [0, 1, 0]}, [0, 1, 0], [0, 0, 1]),
        ({"done": [0, 0, 1], "truncated": [0, 0, 1]}, [0, 0, 0], [0, 0, 1]),
        ({"done": [0, 0, 1], "terminated": [0, 0, 0]}, [0, 0, 0], [0, 0, 1]),
    ],
)
def test_what_ends_an_episode(
    replay: Any, tmp_path: Path, given: dict[str, list[int]], terminated: list[int], truncated: list[int]
) -> None:
    flags = {f"next.{name}": [*map(bool, values)] for name, values in given.items()}
    features = {"action": SCALAR, **{name: {"dtype": "bool", "shape": [1]} for name in flags}}
    small(tmp_path / "files", features, {"action": [1, 2, 3], **flags})
    rows = replay()[:]
    assert rows["next", "terminated"].flatten().tolist() == terminated
    assert rows["next", "truncated"].flatten().tolist() == truncated
    assert rows["action"].tolist() == [[1], [2], [3]] and "observation" not in rows["next"]


SCALAR = {"dtype": "int64", "shape": [1]}


def small(folder: Path, features: dict[str, Any], columns: dict[str, Any], /, **info: Any) -> None:
    """A dataset v2.0 of one episode of three rows."""
    features = {"episode_index": SCALAR, "timestamp": SCALAR, **features}
    columns = {"episode_index": [0, 0, 0], "timestamp": [0, 1, 2], **columns}
    upstream.table(folder / "data/000.parquet", columns)
    upstream.text(folder / "meta/episodes.jsonl", json.dumps({"episode_index": 0, "length": 3}))
    upstream.text(folder / "meta/tasks.jsonl", "")
    said = {"codebase_version": "v2.0", "features": features, "data_path": "data/{episode_index:03d}.parquet", **info}
    upstream.text(folder / "meta/info.json", json.dumps(said))


def test_kinds_of_columns(replay: Any, tmp_path: Path) -> None:
    lists = pa.array([[[1, 2]], [[3, 4]], [[5, 6]]], pa.list_(pa.list_(pa.int32(), 2)))
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(6, dtype=np.int32).reshape(3, 1, 2))
    columns = {"a.b.c": lists, "pairs": tensors, "note": ["x", "longer", "y"]}
    pair = {"dtype": "int32", "shape": [1, 2]}
    features = {"a.b.c": pair, "pairs": pair, "note": {"dtype": "string", "shape": [1]}}
    small(tmp_path / "files", features, columns)
    rows = replay()[:]
    assert rows["pairs"].tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert rows["a", "b", "c"].tolist() == [[[1, 2]], [[3, 4]], [[5, 6]]] and list(rows["note"]) == ["x", "longer", "y"]


def test_names_that_begin_with_another_name(replay: Any, tmp_path: Path) -> None:
    names = ("action", "action.arm", "observation.state", "observation.state.arm.left")
    small(tmp_path / "files", dict.fromkeys(names, SCALAR), {name: [0, 0, 0] for name in names})
    rows = replay()[:]
    assert {"action", "action.arm", "observation"} <= set(rows.keys())
    assert rows["observation"].keys() == rows["next", "observation"].keys() == {"state", "state.arm"}
    assert rows["observation", "state.arm", "left"].shape == (3, 1)


# ------------------------------------------------------------------ the hub


@pytest.mark.parametrize("video", ["decode", False])
def test_download(hub: Server, tmp_path: Path, video: Any) -> None:
    upstream.make(hub.folder / "datasets" / upstream.DATASET, np.random.default_rng(0))
    dataset = LeRobotExperienceReplay(upstream.DATASET, root=tmp_path, video=video)
    assert len(dataset) == sum(upstream.LENGTHS) and dataset.data_path == tmp_path / upstream.DATASET
    assert any(request.path.endswith(".mp4") for request in hub.requests) == bool(video)


def test_a_repository_of_something_else(hub: Server, tmp_path: Path) -> None:
    upstream.text(hub.folder / "datasets/me/mine/data/a.csv", "1,2")
    with pytest.raises(DatasetError, match=r"me/mine .* is no LeRobot dataset: no meta/info.json"):
        LeRobotExperienceReplay("me/mine", root=tmp_path)


# ------------------------------------------------------------------ bad files


@pytest.mark.parametrize("version", ["v1.6", "v3.1", "v4.0", None])
def test_other_versions(replay: Any, tmp_path: Path, version: str | None) -> None:
    small(tmp_path / "files", {}, {}, codebase_version=version)
    with pytest.raises(DatasetError, match=f"codebase_version is {version!r}.*v2.0, v2.1, v3.0"):
        replay()


def test_videos_of_depths(replay: Any, tmp_path: Path) -> None:
    depth = {"dtype": "video", "shape": [4, 4, 1], "info": {"video.is_depth_map": True}}
    small(tmp_path / "files", {"observation.depth": depth}, {}, video_path="a.mp4")
    with pytest.raises(DatasetError, match=r"observation.depth is a video of depths.*video=False"):
        replay()


def test_paths_out_of_the_folder(replay: Any, tmp_path: Path) -> None:
    for path in ("../secret.parquet", "/secret.parquet"):
        small(tmp_path / "files", {}, {}, data_path=path)
        with pytest.raises(CorruptDatasetError, match="out of the folder"):
            replay()


DATA, VIDEO = "data/chunk-000/file-000.parquet", f"videos/{upstream.VIDEO}/chunk-000/file-000.mp4"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("meta/info.json", "info.json is missing"),
        ("meta/tasks.parquet", "tasks.parquet is missing"),
        ("meta/episodes/chunk-000/file-000.parquet", "no episodes"),
        (DATA, "file-000.parquet is missing"),
        (VIDEO, "file-000.mp4 cannot be read"),
    ],
)
def test_missing_and_truncated_files(replay: Any, tmp_path: Path, name: str, text: str) -> None:
    upstream.make(tmp_path / "files", np.random.default_rng(0))
    path = tmp_path / "files" / name
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(CorruptDatasetError, match=text):
        replay()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptDatasetError, match=path.name):
        replay()


@pytest.mark.parametrize(
    ("column", "values", "text"),
    [
        ("episode_index", [0] * 4 + [1] * 41, "episode 0 has 4 rows, 5 in meta/"),
        ("task_index", [7] * 45, r"no texts in meta/ of the tasks \[7\]"),
        ("action", [[1.0, 2.0]] * 45, r"action: is no column of float32 of shape \[2, 3\]"),
        ("next.reward", [None] * 45, "next.reward: is no column"),
        ("frame_index", [*range(44), None], r"frame_index: is no column of int64 of shape \[1\] without gaps"),
        (upstream.IMAGE, [{"bytes": None, "path": "a.png"}] * 45, "images are not in the file"),
        ("frame_index", [60] * 45, r"no frame within 0.0001 s of 6.0000 s"),
        ("frame_index", [*range(44, -1, -1)], "the rows are not in the order of frame_index"),
    ],
)
def test_columns_that_do_not_fit(replay: Any, tmp_path: Path, column: str, values: Any, text: str) -> None:
    upstream.make(tmp_path / "files", np.random.default_rng(0))
    change(tmp_path / "files" / DATA, **{column: values})
    with pytest.raises(CorruptDatasetError, match=text):
        replay()


@pytest.mark.parametrize("features", [{"action": {"dtype": "int64"}}, {"action": [1]}, None])
def test_features_that_are_not_described(replay: Any, tmp_path: Path, features: Any) -> None:
    small(tmp_path / "files", {}, {}, features=features)
    with pytest.raises(CorruptDatasetError, match=r"meta does not describe all features"):
        replay()


def test_meta_without_places(replay: Any, tmp_path: Path) -> None:
    upstream.make(tmp_path / "files", np.random.default_rng(0))
    path = tmp_path / "files/meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["data/file_index"]), path)
    with pytest.raises(CorruptDatasetError, match="does not describe all features and episodes"):
        replay()


def test_arguments(replay: Any, tmp_path: Path) -> None:
    upstream.make(tmp_path / "files", np.random.default_rng(0))
    with pytest.raises(ValueError, match="video must be"):
        replay(video="yes")
