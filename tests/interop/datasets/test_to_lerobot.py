import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from interop.datasets import LeRobotExperienceReplay, to_lerobot
from interop.datasets.errors import DatasetError
from interop.datasets.lerobot_stats import ImageStats, NumberStats, together
from tests.interop.datasets import sources_lerobot
from tests.interop.datasets.recorded import KINDS, STORAGES, Failing, buffer, killed, texts, trajectories, wrapped

pytest.importorskip("pyarrow")
pytest.importorskip("av")

MODULE = sys.modules["interop.datasets.to_lerobot"]
TOP = ("observation", "images", "top")
STATE = ("observation", "state")


def episode(length: int, seed: int, task: str, size: tuple[int, int] = (64, 96)) -> TensorDict:
    """Images of one color each, which videos keep but for a rounding."""
    rng = np.random.default_rng(seed)
    colors = torch.from_numpy(rng.integers(0, 256, (length + 1, 3, 1, 1), np.uint8)).expand(-1, -1, *size)
    state = torch.from_numpy(rng.normal(size=(length + 1, 4)).astype("float32"))
    end, never = torch.arange(length).unsqueeze(1) == length - 1, torch.zeros(length, 1, dtype=torch.bool)
    return TensorDict(
        {
            "observation": {"state": state[:-1], "images": {"top": colors[:-1].contiguous()}},
            "action": torch.from_numpy(rng.normal(size=(length, 2))),
            "grid": torch.from_numpy(rng.integers(9, size=(length, 2, 3))),
            "note": texts(*map(str, range(length))),
            "task": texts(*[task] * length),
            "done": never,
            "terminated": never,
            "truncated": never,
            "next": {
                "observation": {"state": state[1:], "images": {"top": colors[1:].contiguous()}},
                "reward": torch.from_numpy(rng.normal(size=(length, 1)).astype("float32")),
                "done": end,
                "terminated": end if seed % 2 else never,
                "truncated": never if seed % 2 else end,
            },
        },
        [length],
    )


EPISODES = [episode(5, 0, "push"), episode(8, 1, "lift"), episode(3, 2, "push")]
MORE = [episode(4, 3, "drop"), episode(6, 4, "push")]


def written(folder: Path, *rows: TensorDict, fps: int = 10, image_keys: Any = (TOP,), **how: Any) -> Path:
    return to_lerobot(buffer(*rows), folder, fps=fps, image_keys=image_keys, **how)


def loaded(path: Path) -> TensorDict:
    root = path.parent / "root" / str(len([*path.parent.glob("root/*")]))
    return LeRobotExperienceReplay("mine", 4, from_local=path, root=root)[:]


def check(found: TensorDict, rows: TensorDict, *, exact: bool = True) -> None:
    """Whether all entries of the rows are there, but the last next observation of an episode, which is zero."""
    last = rows["next", "done"].flatten()
    for key, value in rows.items(True, True):
        here = found[key]
        if not isinstance(value, torch.Tensor):
            assert [*here] == [*value]
            continue
        if key[:2] == ("next", "observation"):
            value = value.masked_fill(last.reshape(-1, *[1] * (value.ndim - 1)), 0)
        assert here.dtype == value.dtype
        if key[-2:] == ("images", "top") and not exact:
            assert (here.int() - value.int()).abs().max() <= 6
            continue
        torch.testing.assert_close(here, value, rtol=0, atol=0)


def info(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta/info.json").read_text())


@pytest.mark.parametrize("how", [{"use_videos": False}, {"vcodec": "h264", "crf": 1}], ids=["png", "video"])
def test_rows_come_back_and_grow(how, tmp_path):
    exact = not how.get("use_videos", True)
    folder = written(tmp_path / "data", *EPISODES, **how)
    check(loaded(folder), torch.cat(EPISODES), exact=exact)
    before = {path: path.stat() for path in folder.rglob("*") if path.is_file() and path.parent.name != "meta"}
    written(folder, *MORE, append=True, **how)
    found = loaded(folder)
    check(found, torch.cat([*EPISODES, *MORE]), exact=exact)
    assert found["episode"].unique().tolist() == [0, 1, 2, 3, 4] and found["task_index"].unique().tolist() == [0, 1, 2]
    for path, stat in before.items():
        assert (path.stat().st_ino, path.stat().st_size, path.stat().st_nlink) == (stat.st_ino, stat.st_size, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "root"}
    totals = {"total_episodes": 5, "total_frames": 26, "total_tasks": 3, "splits": {"train": "0:5"}, "fps": 10}
    assert totals.items() <= info(folder).items()


def test_statistics_do_not_depend_on_the_number_of_writes(tmp_path):
    one = written(tmp_path / "one", *EPISODES, *MORE, use_videos=False)
    two = written(tmp_path / "two", *EPISODES, use_videos=False)
    written(two, *MORE, use_videos=False, append=True)
    first, second = (json.loads((each / "meta/stats.json").read_text()) for each in (one, two))
    assert first.keys() == second.keys()
    for name, stats in first.items():
        for kind, values in stats.items():
            np.testing.assert_allclose(values, second[name][kind], atol=1e-9)
    action = torch.cat([*EPISODES, *MORE])["action"].numpy()
    for kind, wanted in (("mean", action.mean(0)), ("std", action.std(0)), ("min", action.min(0)), ("count", [26])):
        np.testing.assert_allclose(first["action"][kind], wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_trajectories_of_all_kinds(kind, tmp_path):
    rb, held = KINDS[kind](np.random.default_rng(0))
    found = loaded(to_lerobot(rb, tmp_path / "data", fps=5, next_observations=True))
    rows = torch.cat(held)
    for key in ("observation", ("next", "observation"), ("info", "speed"), ("next", "info", "speed"), "action"):
        value = rows[key]
        wanted = value if value.ndim > 1 else value.unsqueeze(1)
        torch.testing.assert_close(found[key], wanted, rtol=0, atol=0, equal_nan=True)
    lengths = torch.unique_consecutive(found["episode"], return_counts=True)[1]
    assert lengths.tolist() == [*map(len, held)]


@pytest.mark.parametrize("storage", STORAGES)
def test_all_storages(storage, tmp_path):
    rb, held = wrapped(np.random.default_rng(0), storage)
    found = loaded(to_lerobot(rb, tmp_path / "data", fps=5, task="go", names={"observation": "observation.state"}))
    torch.testing.assert_close(found[STATE], torch.cat(held)["observation"], rtol=0, atol=0, equal_nan=True)
    assert {*found["task"]} == {"go"}


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1), (1, 4, 6), (4, 6, 3), (3, 4, 6)])
def test_images_in_all_orders_of_dims(shape, tmp_path):
    rows = trajectories(np.random.default_rng(0), 3)[0]
    image = rows["image"] = torch.randint(256, (3, *shape), dtype=torch.uint8)
    found = loaded(written(tmp_path / "data", rows, image_keys=["image"], use_videos=False))["image"]
    wanted = image.unsqueeze(1) if len(shape) == 2 else image if shape[0] in (1, 3) else image.movedim(-1, 1)
    assert torch.equal(found, wanted)


def test_files_of_a_size_and_chunks(tmp_path):
    how: dict[str, Any] = {"vcodec": "h264", "crf": 1}
    folder = written(tmp_path / "data", EPISODES[0], **how)
    sizes = {"data_files_size_in_mb": 1e-6, "video_files_size_in_mb": 1e-6, "chunks_size": 2}
    (folder / "meta/info.json").write_text(json.dumps(info(folder) | sizes))
    written(folder, *EPISODES[1:], *MORE, append=True, **how)
    assert len([*folder.glob("data/*/*")]) == 5 and len([*folder.glob("videos/*/*/*")]) in (
        3,
        4,
        5,
    )  # encoders look ahead
    assert {path.parent.name for path in folder.glob("data/*/*")} == {"chunk-000", "chunk-001", "chunk-002"}
    check(loaded(folder), torch.cat([*EPISODES, *MORE]), exact=False)


@pytest.mark.parametrize(("error", "match", "key", "value", "how"), [
    (TypeError, "ragged|bfloat16.*cast it", "action", torch.zeros(3).bfloat16(), {}),
    (ValueError, "dot in a name.*rename it by names=", "a.b", torch.zeros(3), {}),
    (ValueError, "a name|slash", "b", torch.zeros(3), {"names": {"b": "x/y"}}),
    (ValueError, "both named 'action'", "b", torch.zeros(3), {"names": {"b": "action"}}),
    (KeyError, "of names is not stored", "b", torch.zeros(3), {"names": {"c": "d"}}),
    (KeyError, "of image_keys is no stored entry", "b", torch.zeros(3), {"image_keys": ["c"]}),
    (TypeError, "images are uint8", "b", torch.zeros(3, 4, 4), {"image_keys": ["b"]}),
    (TypeError, "a video has 3", "b", torch.zeros(3, 1, 4, 4, dtype=torch.uint8), {"image_keys": ["b"]}),
    (ValueError, "even number of pixels", "b", torch.zeros(3, 3, 65, 64, dtype=torch.uint8), {"image_keys": ["b"]}),
    (ValueError, "nothing.*use_videos=False", "b", torch.zeros(3, 3, 64, 64, dtype=torch.uint8),
     {"image_keys": ["b"], "vcodec": "nothing"}),
    (ValueError, "fps must be", "b", torch.zeros(3), {"fps": 0}),
    (ValueError, "the rows have tasks", "task", texts("a", "b", "c"), {"task": "go"}),
    (TypeError, "values of type bytes", "b", texts(b"a", b"b", b"c"), {}),  # type: ignore[arg-type]
])  # fmt: skip
def test_rows_that_do_not_fit(error, match, key, value, how, tmp_path):
    rows = trajectories(np.random.default_rng(0), 3)[0].set(key, value)
    with pytest.raises(error, match=match):
        to_lerobot(buffer(rows), tmp_path / "data", **{"fps": 5, **how})
    assert not [*tmp_path.iterdir()]


def test_datasets_that_episodes_are_not_added_to(tmp_path):
    folder = written(tmp_path / "data", *EPISODES, use_videos=False)
    state = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match="append=True"):
        written(folder, *MORE, use_videos=False)
    for match, how in (
        ("10 frames a second, got fps=5", {"fps": 5}),
        ("action is float64.*missing", {"exclude": ["action"]}),
        ("observation.images.top is image.*video", {"use_videos": True, "vcodec": "h264"}),
        ("next.observation.* is missing", {"next_observations": True, "image_keys": [TOP, ("next", *TOP)]}),
    ):
        with pytest.raises(ValueError, match=match):
            written(folder, *MORE, append=True, **{"use_videos": False, **how})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == state
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(DatasetError, match="no LeRobot dataset"):
        written(tmp_path / "other", *MORE, append=True, use_videos=False)
    sources_lerobot.make(tmp_path / "old", np.random.default_rng(0), "v2.1")
    with pytest.raises(DatasetError, match="convert it by lerobot"):
        written(tmp_path / "old", *MORE, append=True, use_videos=False)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "old", "other"}


@pytest.mark.filterwarnings("ignore:.*fork.*")  # JAX warns of forks; the child does not use it
def test_a_kill_leaves_the_old_dataset_or_the_new_one(tmp_path, monkeypatch):
    folder, rng = tmp_path / "data", np.random.default_rng(0)
    held = trajectories(rng, 3, 2, 4)
    monkeypatch.setattr(MODULE, "_MOST_ROWS", 2)
    failing = buffer(*held, storage=Failing)
    killed(lambda: to_lerobot(failing, folder, fps=5), failing)
    assert not folder.exists()
    to_lerobot(buffer(*held), folder, fps=5)
    killed(lambda: to_lerobot(failing, folder, fps=5, append=True), failing)
    assert len(loaded(folder)) == 9
    pid = os.fork()
    if not pid:
        try:
            monkeypatch.setattr("interop.shared.published_folder._clear", lambda *_: None)
            monkeypatch.setattr("interop.shared.published_folder.flush", _killing(folder.parent))
            to_lerobot(buffer(*held), folder, fps=5, append=True)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(loaded(folder)) == 18
    to_lerobot(buffer(*held), folder, fps=5, append=True)
    assert len(loaded(folder)) == 27 and {path.name for path in tmp_path.iterdir()} == {"data", "root"}


def _killing(at: Path) -> Any:
    """A flush that kills the process at a folder, which is behind the rename."""

    def flush(path: Path) -> None:
        if path == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return flush


def test_statistics_beside_numpy():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2000, 3)) * [1, 100, 1e-3] + [0, 1e4, 0]
    values[3, 0], values[:, 2] = np.nan, np.inf
    running = NumberStats(2000, 3)
    for piece in np.split(values, [7, 900, 901]):
        running.add(piece)
    found, clean = running.result(), values[:, :2]
    wanted = {"min": np.nanmin, "max": np.nanmax, "mean": np.nanmean, "std": np.nanstd}
    for name, function in wanted.items():
        np.testing.assert_allclose(found[name], [*function(clean, axis=0), 0.0], rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(found["q10"][:2], np.nanquantile(clean, 0.1, axis=0))
    assert found["count"].tolist() == [2000] and not found["q50"][2]
    images = rng.integers(0, 256, (50, 4, 6, 3), np.uint8)
    pictures = ImageStats(50, 3)
    for piece in np.split(images, [1, 30]):
        pictures.add(piece)
    pixels, shown = images.reshape(-1, 3) / 255.0, pictures.result()
    for name, wanted_values in (
        ("mean", pixels.mean(0)),
        ("std", pixels.std(0)),
        ("min", pixels.min(0)),
        ("max", pixels.max(0)),
    ):
        np.testing.assert_allclose(shown[name][:, 0, 0], wanted_values)
    np.testing.assert_allclose(shown["q90"][:, 0, 0], np.quantile(pixels, 0.9, axis=0, method="inverted_cdf"))
    halves = []
    for half in (clean[4:900], clean[900:]):
        part = NumberStats(len(half), 2)
        part.add(half)
        halves.append(part.result())
    np.testing.assert_allclose(together(halves)["std"], clean[4:].std(0))


def test_a_constant_memory_for_rows_of_one_episode(tmp_path, monkeypatch):
    """Row groups have a bounded number of rows, and one episode lies in one file."""
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(MODULE, "_AT_ONCE", 1000)
    folder = to_lerobot(buffer(*trajectories(np.random.default_rng(0), 40), size=64), tmp_path / "data", fps=5)
    (path,) = folder.glob("data/*/*.parquet")
    metadata = parquet.read_metadata(path)
    assert metadata.num_row_groups > 2 and metadata.num_rows == 40 and len(loaded(folder)) == 40


def test_an_ensemble_and_an_empty_buffer(tmp_path):
    with pytest.raises(RuntimeError, match="the buffer is empty"):
        to_lerobot(TensorDictReplayBuffer(storage=LazyTensorStorage(3)), tmp_path / "data", fps=5)
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend(TensorDict({"a": torch.zeros(2)}, [2]))
    with pytest.raises(RuntimeError, match="where trajectories end"):
        to_lerobot(rb, tmp_path / "data", fps=5)
