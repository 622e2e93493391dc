"""Where Minari datasets come from: the hub, the local Minari folder, a folder of the user's."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import minari
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from minari.data_collector import EpisodeBuffer

from interop import ReplayBuffer
from interop.datasets.errors import CorruptDatasetError, DownloadError, MissingDatasetError
from interop.datasets.minari_data import MinariExperienceReplay
from interop.transforms import CatTensors, Compose
from tests.interop.datasets import sources_minari as made
from tests.interop.datasets.server import Answer, Server, publish_minari

LINE = "toy/line-v0"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def test_a_local_dataset_is_converted_anew(home: Path, tmp_path: Path) -> None:
    data = made.line(home)
    first = MinariExperienceReplay(LINE, 2, root=tmp_path / "root", load_from_local_minari=True)
    with h5py.File(data / "main_data.hdf5", "a") as file:
        file["episode_0/rewards"][0] = 9.0
    again = MinariExperienceReplay(LINE, 2, root=tmp_path / "root", load_from_local_minari=True, download=False)
    assert first[:]["next", "reward"][0] == 1 and again[:]["next", "reward"][0] == 9
    shutil.rmtree(home)
    converted = MinariExperienceReplay(LINE, 2, root=tmp_path / "root", download=False)
    assert (converted[:] == again[:]).all() and converted.metadata == again.metadata
    with pytest.raises(FileNotFoundError, match=f"no local Minari dataset '{LINE}'"):
        MinariExperienceReplay(LINE, 2, root=tmp_path / "root", load_from_local_minari=True)
    assert len(MinariExperienceReplay(LINE, 2, root=tmp_path / "root")) == 5


def test_the_folder_of_minari_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINARI_DATASETS_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    made.line(tmp_path / ".minari" / "datasets")
    assert len(MinariExperienceReplay(LINE, 2, root=tmp_path / "root", load_from_local_minari=True)) == 5


@pytest.mark.parametrize("inner", ["", "toy/line-v0", "toy/line-v0/data"])
def test_folders_of_a_dataset(tmp_path: Path, inner: str) -> None:
    made.line(tmp_path / "minari")
    assert len(MinariExperienceReplay(LINE, 2, root=tmp_path / "root", from_local=tmp_path / "minari" / inner)) == 5


def test_folders_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(CorruptDatasetError, match=r"no metadata\.json"):
        MinariExperienceReplay(LINE, 2, root=tmp_path / "root", from_local=tmp_path)
    with pytest.raises(ValueError, match="not both"):
        MinariExperienceReplay(LINE, 2, root=tmp_path / "root", from_local=tmp_path, load_from_local_minari=True)


@pytest.fixture
def remote(hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A hub with two datasets in the namespace "toy"."""
    made.line(tmp_path / "upstream")
    made.collect(tmp_path / "upstream", "toy/inner/cart-v1", 2, "parquet")
    publish_minari(hub, tmp_path / "upstream" / "toy")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "elsewhere"))
    return hub


@pytest.mark.parametrize(("dataset_id", "rows"), [(LINE, 5), ("toy/inner/cart-v1", None)])
def test_downloads(remote: Server, tmp_path: Path, dataset_id: str, rows: int | None) -> None:
    data = MinariExperienceReplay(dataset_id, 2, root=tmp_path / "root")
    local = tmp_path / "upstream" / dataset_id
    expected = MinariExperienceReplay(dataset_id, 2, root=tmp_path / "other", from_local=local)
    assert (data[:] == expected[:]).all() and len(data) == (rows or len(expected))
    assert data.metadata == expected.metadata and data.metadata["dataset_id"] == dataset_id
    assert not (tmp_path / "elsewhere").exists() and os.environ["MINARI_DATASETS_PATH"] == str(tmp_path / "elsewhere")
    asked = len(remote.requests)
    assert len(MinariExperienceReplay(dataset_id, 2, root=tmp_path / "root")) == len(data)
    assert len(remote.requests) == asked


def test_ids(remote: Server, tmp_path: Path) -> None:
    assert sorted(MinariExperienceReplay.available_datasets) == ["toy/inner/cart-v1", LINE]
    for unknown in ("toy/lines-v0", "tpy/line-v0"):
        with pytest.raises(ValueError, match=f"no dataset '{unknown}'.* 'toy/line-v0'"):
            MinariExperienceReplay(unknown, 2, root=tmp_path / "root")
    door(tmp_path / "upstream")  # minari cannot list datasets without a namespace
    shutil.copytree(tmp_path / "upstream/door-human-v1", remote.folder / "datasets/farama-minari/door-human-v1")
    with pytest.raises(ValueError, match="no dataset 'toy/lines-v0'"):
        MinariExperienceReplay("toy/lines-v0", 2, root=tmp_path / "root")
    with pytest.raises(MissingDatasetError):
        MinariExperienceReplay(LINE, 2, root=tmp_path / "root", download=False)
    assert not (tmp_path / "root").exists() or not [*(tmp_path / "root").rglob("*.json")]


def test_downloads_that_fail(remote: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "datasets/farama-minari/toy/line-v0/data/main_data.hdf5"
    remote.answer(path, Answer(status=404))
    with pytest.raises(DownloadError, match="from_local"):
        MinariExperienceReplay(LINE, 2, root=tmp_path / "root")
    monkeypatch.setenv("MINARI_REMOTE", "gcp://minari-remote")
    with pytest.raises(DownloadError, match=r"minari.download_dataset\('toy/line-v0'\)"):
        MinariExperienceReplay(LINE, 2, root=tmp_path / "root")


def door(folder: Path) -> None:
    """Like D4RL's door: states, and infos of every step."""
    rng, steps = np.random.default_rng(0), 50
    flags = [False] * steps
    episodes = [
        EpisodeBuffer(
            number, None, None, rng.normal(size=(steps + 1, 39)), rng.random((steps, 28), np.float32),
            rng.normal(size=steps), flags, [*flags[1:], True], {"success": rng.random(steps + 1) < 0.5},
        )
        for number in range(3)
    ]  # fmt: skip
    spaces = Box(-np.inf, np.inf, (39,), np.float64), Box(-1, 1, (28,), np.float32)
    data = made.write(folder, "door-human-v1", episodes, *spaces)
    with h5py.File(data / "main_data.hdf5", "a") as file:
        for group in file.values():
            for name, size in {"door_body_pos": 3, "qpos": 30, "qvel": 30}.items():
                group[f"state/{name}"] = rng.normal(size=(steps + 1, size))


def test_the_example_of_a_batch(hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door(tmp_path / "upstream")
    shutil.copytree(tmp_path / "upstream/door-human-v1", hub.folder / "datasets/farama-minari/door-human-v1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = MinariExperienceReplay("door-human-v1", batch_size=32, download="force")
    for sample in data:  # noqa: B007
        break
    assert data.data_path == tmp_path / "cache/fbuf/minari/door-human-v1"
    shapes = {key: [*value.shape] for key, value in sample.items(True, True)}
    both = {"observation": [32, 39], ("info", "success"): [32], ("state", "door_body_pos"): [32, 3]}
    both |= {("state", name): [32, 30] for name in ("qpos", "qvel")}
    later = {("next", *((key,) if isinstance(key, str) else key)): shape for key, shape in both.items()}
    flags = {("next", key): [32, 1] for key in ("done", "reward", "terminated", "truncated")}
    assert shapes == {"action": [32, 28], "episode": [32], "index": [32], **both, **later, **flags}
    assert sample["observation"].dtype == torch.float64 and sample["action"].dtype == torch.float32


def test_the_example_of_preprocessing(hub: Server, tmp_path: Path) -> None:
    rng, steps = np.random.default_rng(0), 40
    goals = {"achieved_goal": 2, "desired_goal": 2, "observation": 27}
    episode = EpisodeBuffer(
        0, None, None, {key: rng.normal(size=(steps + 1, size)) for key, size in goals.items()},
        rng.random((steps, 8), np.float32), rng.normal(size=steps), [False] * steps, [False] * (steps - 1) + [True], {},
    )  # fmt: skip
    space = Dict({key: Box(-np.inf, np.inf, (size,), np.float64) for key, size in goals.items()})
    with made.root(tmp_path / "upstream"):
        minari.namespace.create_namespace("antmaze")
    made.write(tmp_path / "upstream", "antmaze/large-v0", [episode], space, Box(-1, 1, (8,), np.float32))
    publish_minari(hub, tmp_path / "upstream" / "antmaze")

    data = MinariExperienceReplay(
        list(MinariExperienceReplay.available_datasets)[0],  # noqa: RUF015
        batch_size=32,
        root=tmp_path / "root",
    )
    assert "MinariExperienceReplay" in str(data)
    cat_tensors = CatTensors(
        in_keys=[("observation", "observation"), ("observation", "achieved_goal"), ("observation", "desired_goal")],
        out_key="obs",
    )
    cat_next_tensors = CatTensors(
        in_keys=[
            ("next", "observation", "observation"),
            ("next", "observation", "achieved_goal"),
            ("next", "observation", "desired_goal"),
        ],
        out_key=("next", "obs"),
    )
    t = Compose(cat_tensors, cat_next_tensors)

    def func(td: Any) -> Any:
        td = td.select(
            "action",
            "episode",
            ("next", "done"),
            ("next", "observation"),
            ("next", "reward"),
            ("next", "terminated"),
            ("next", "truncated"),
            "observation",
        )
        return t(td)

    with TemporaryDirectory(dir=tmp_path) as tmpdir:
        new_storage = data.preprocess(func, num_workers=0, pbar=True, mp_start_method="fork", dest=tmpdir)
        rb = ReplayBuffer(storage=new_storage)
        assert "ReplayBuffer" in str(rb)
        rows = rb[:]
        assert rows["obs"].shape == (steps, 31) and rows["next", "obs"].shape == (steps, 31)
        np.testing.assert_array_equal(rows["obs"][:, 4:], episode.observations["observation"][:-1])
