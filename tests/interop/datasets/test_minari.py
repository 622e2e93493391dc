"""Minari datasets, as the minari package writes them."""

import dataclasses
import io
import json
import pickle
from pathlib import Path
from typing import Any

import h5py
import minari
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from minari.data_collector import EpisodeBuffer
from PIL import Image

from interop.datasets.errors import CorruptDatasetError
from interop.datasets.minari_data import MinariExperienceReplay, MinariSource
from interop.datasets.rows import leaf
from interop.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, Unbounded
from tests.interop.datasets import sources_minari as made

FORMATS = ["hdf5", "arrow", "parquet"]


@pytest.mark.parametrize("jpeg", [True, False])
@pytest.mark.parametrize("data_format", FORMATS)
def test_all_kinds_of_spaces(tmp_path: Path, data_format: str, jpeg: bool) -> None:
    buffers = made.make(tmp_path / "minari", np.random.default_rng(0), data_format, jpeg)
    data = MinariExperienceReplay(made.DATASET, 4, root=tmp_path / "root", from_local=tmp_path / "minari")
    rows = data[:]
    assert rows["episode"].tolist() == np.repeat(np.arange(len(made.LENGTHS)), made.LENGTHS).tolist()

    def equal(found: torch.Tensor, expected: list[Any]) -> None:
        array = np.concatenate(expected)
        assert found.numpy().dtype == array.dtype
        np.testing.assert_array_equal(found.numpy(), array)

    for side, cut in ((rows, slice(None, -1)), (rows["next"], slice(1, None))):
        seen, stored = side["observation"], [each.observations for each in buffers]
        for key in ("position", "grid"):
            equal(seen[key], [each[key][cut] for each in stored])
        for key in ("image", "depth"):
            equal(seen[key], [(through_jpeg(each[key]) if jpeg else each[key])[cut] for each in stored])
        for place in (0, 1):
            equal(seen["pair", str(place)], [each["pair"][place][cut] for each in stored])
        assert seen.get("mission").tolist() == [text for each in stored for text in each["mission"][cut]]
        equal(side["info", "success"], [each.infos["success"][cut] for each in buffers])
        equal(side["info", "inner", "force"], [each.infos["inner"]["force"][cut] for each in buffers])
    equal(rows["action"], [each.actions for each in buffers])
    for key, name in (("reward", "rewards"), ("terminated", "terminations"), ("truncated", "truncations")):
        equal(rows["next", key], [np.array(getattr(each, name))[:, None] for each in buffers])
    assert (rows["next", "done"] == rows["next", "terminated"] | rows["next", "truncated"]).all()
    assert sorted(rows.keys()) == ["action", "episode", "info", "next", "observation"]


def through_jpeg(images: np.ndarray) -> np.ndarray:
    """Images as Pillow reads what Pillow, for minari, wrote."""
    files = [io.BytesIO() for _ in images]
    for image, file in zip(images, files, strict=True):
        Image.fromarray(image).save(file, "JPEG")
    return np.array([Image.open(file) for file in files])


@pytest.fixture
def line(tmp_path: Path) -> Path:
    return made.line(tmp_path / "minari")


def opened(data: Path, tmp_path: Path, **more: Any) -> MinariExperienceReplay:
    return MinariExperienceReplay("toy/line-v0", 2, root=tmp_path / "root", from_local=data, **more)


def test_an_example_by_hand(line: Path, tmp_path: Path) -> None:
    rows = opened(line, tmp_path)[:]
    o, p = [[0.0, 0.5], [1, 1.5], [2, 2.5], [3, 3.5]], [[10.0, 10.5], [11, 11.5], [12, 12.5]]
    assert rows["observation"].tolist() == o[:3] + p[:2]
    assert rows["next", "observation"].tolist() == o[1:] + p[1:]
    assert rows["next", "reward"].tolist() == [[1], [2], [3], [4], [5]]
    assert rows["next", "done"].flatten().tolist() == [False, False, True, False, True]
    assert rows["next", "terminated"].flatten().tolist() == [False, False, True, False, False]
    assert rows["next", "truncated"].flatten().tolist() == [False, False, False, False, True]
    assert rows["episode"].tolist() == [0, 0, 0, 1, 1] and rows["action"].tolist() == [0, 1, 2, 1, 2]
    assert rows["info", "x"].tolist() == [0, 1, 2, 0, 11]
    assert rows["next", "info", "x"].tolist() == [1, 2, 3, 11, 12]
    assert sorted(rows["next"].keys()) == ["done", "info", "observation", "reward", "terminated", "truncated"]


def test_entries_of_other_tools(tmp_path: Path) -> None:
    """State, entries under other names, infos of one value a step, empty groups, no steps, old files."""

    def edit(file: h5py.File) -> None:
        for number, steps in enumerate((3, 2)):
            group = file[f"episode_{number}"]
            group["state/qpos"] = np.arange(steps + 1, dtype=np.float32) + number
            group["task"], group["extra/weight"] = np.arange(steps), np.ones((steps, 2))
            group["infos/note"] = [f"note {step}" for step in range(steps)]
            group["infos/goal"] = np.arange(steps + 1)
            group.create_group("empty")
            del group["rewards"]
            group["rewards"] = np.arange(steps)  # no floats
        file.create_group("episode_2")
        file.create_group("about")

    data = made.line(tmp_path / "minari", edit=edit)
    made.described(data, total_episodes=3, data_format=None, jpeg_encoding=None)
    rows = opened(data, tmp_path)[:]
    assert rows["state", "qpos"].tolist() == [0, 1, 2, 1, 2]
    assert rows["next", "state", "qpos"].tolist() == [1, 2, 3, 2, 3]
    assert rows["task"].tolist() == [0, 1, 2, 0, 1] and rows["extra", "weight"].shape == (5, 2)
    assert rows["info"].get("note").tolist() == ["", "note 0", "note 1", "", "note 0"]
    assert rows["next", "info"].get("note").tolist() == ["note 0", "note 1", "note 2", "note 0", "note 1"]
    assert rows["info", "goal"].tolist() == [0, 1, 2, 0, 1] and rows["next", "info", "goal"].tolist() == [1, 2, 3, 1, 2]
    assert rows["next", "reward"].dtype == torch.float64 and "empty" not in [*rows.keys()]


@pytest.mark.parametrize("data_format", FORMATS)
def test_collected_episodes(tmp_path: Path, data_format: str) -> None:
    made.collect(tmp_path / "minari", "cart/pole-v3", 3, data_format)
    data = MinariExperienceReplay("cart/pole-v3", 4, root=tmp_path / "root", from_local=tmp_path / "minari")
    with made.root(tmp_path / "minari"):
        episodes = [*minari.load_dataset("cart/pole-v3")]
    rows = data[:]
    np.testing.assert_array_equal(rows["observation"], np.concatenate([each.observations[:-1] for each in episodes]))
    np.testing.assert_array_equal(
        rows["next", "observation"], np.concatenate([each.observations[1:] for each in episodes])
    )
    np.testing.assert_array_equal(rows["action"], np.concatenate([each.actions for each in episodes]))
    assert rows["next", "done"].sum() == 3 and rows["observation"].dtype == torch.float32
    said = data.metadata
    assert (said["namespace"], said["dataset_name"], said["version"]) == ("cart", "pole", 3)
    assert said["action_space"] == Categorical(2) and said["observation_space"].shape == (4,)
    assert said["env_spec"]["id"] == "CartPole-v1" and said["total_episodes"] == 3
    assert json.loads((tmp_path / "root/cart/pole-v3/env_metadata.json").read_text())["action_space"]["n"] == 2


def test_long_episodes_are_read_in_pieces(tmp_path: Path) -> None:
    steps = 9000
    rewards, flags = list(range(steps)), [False] * steps
    observations = np.arange(steps + 1)[:, None] + np.zeros((1, 50))
    episodes = [EpisodeBuffer(0, None, None, observations, rewards, rewards, flags, flags, {"x": np.arange(steps)})]
    episodes += [dataclasses.replace(episodes[0], id=1)]
    data = made.write(tmp_path / "minari", "toy/line-v0", episodes, Box(-np.inf, np.inf, (50,)), Discrete(steps))
    source = MinariSource("toy/line-v0")
    pieces = [piece for part in source.parts(data) for piece in source.read(pickle.loads(pickle.dumps(part)))]
    assert max(map(len, pieces)) < 9000
    rows = torch.cat(pieces)
    assert rows["observation"][:, 3].tolist() == 2 * rewards and rows["episode"].tolist() == [0] * steps + [1] * steps
    assert (rows["next", "observation"][:, 3] == rows["observation"][:, 3] + 1).all()
    assert (rows["next", "info", "x"] == rows["next", "reward"].flatten()).all()
    assert rows["info", "x"].tolist() == 2 * [0, *rewards[:-1]]


SPACES = {
    '{"type": "Box", "dtype": "float32", "shape": [2], "low": [0, -Infinity], "high": [1, 2]}': Bounded(
        torch.tensor([0, -torch.inf]), torch.tensor([1.0, 2]), dtype=torch.float32
    ),
    '{"type": "Box", "dtype": "float64", "shape": [1], "low": [-Infinity], "high": [Infinity]}': Unbounded(
        (1,), dtype=torch.float64
    ),
    '{"type": "Discrete", "dtype": "int64", "start": 0, "n": 4}': Categorical(4),
    '{"type": "Discrete", "dtype": "int64", "start": -1, "n": 3}': Bounded(-1, 1, (), dtype=torch.int64),
    '{"type": "MultiDiscrete", "dtype": "int64", "nvec": [2, 3], "start": [0, 0]}': MultiCategorical([2, 3]),
    '{"type": "MultiBinary", "n": [2, 3]}': Binary(shape=(2, 3)),
    '{"type": "Text", "max_length": 3, "min_length": 1, "charset": "ab"}': None,
    '{"type": "Own", "size": 3}': None,
    '{"type": "Tuple", "subspaces": [{"type": "MultiBinary", "n": 2}, {"type": "Own"}]}': Composite(
        {"0": Binary(2), "1": None}
    ),
    '{"type": "Dict", "subspaces": {"a": {"type": "Discrete", "dtype": "int64", "start": 0, "n": 4}}}': Composite(
        {"a": Categorical(4)}
    ),
}


@pytest.mark.parametrize("space", [*SPACES, None])
def test_specs_of_spaces(line: Path, tmp_path: Path, space: str | None) -> None:
    """Whatever the space is, the values are read as they are."""
    made.described(line, observation_space=space)
    data = opened(line, tmp_path)
    assert data.metadata["observation_space"] == SPACES.get(space)
    assert data[:]["observation"].shape == (5, 2)


def _longer(file: h5py.File) -> None:
    del file["episode_1/rewards"]
    file["episode_1/rewards"] = np.zeros(3)


def _other_dtype(file: h5py.File) -> None:
    del file["episode_1/actions"]
    file["episode_1/actions"] = np.zeros(2, np.float32)


def _wrong_info(file: h5py.File) -> None:
    del file["episode_1/infos/x"]
    file["episode_1/infos/x"] = np.zeros(7)


def _text_in_one(file: h5py.File) -> None:
    file["episode_0/infos/y"], file["episode_1/infos/y"] = np.zeros(4), "one for all"


def _group_in_one(file: h5py.File) -> None:
    file["episode_0/infos/y"], file["episode_1/infos/y/z"] = np.zeros(4), np.zeros(3)


def _no_actions(file: h5py.File) -> None:
    for number in (0, 1):
        del file[f"episode_{number}/actions"]


def _no_number(file: h5py.File) -> None:
    file.move("episode_1", "episode_one")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_longer, ["6", "5", "total_steps"]),
        (_other_dtype, ["episode 1", "actions", "float32", "int64", "episode 0"]),
        (_wrong_info, ["episode 1", "infos/x", "7 rows", "2 steps"]),
        (_text_in_one, ["episode 0", "episode 1", "infos/y", "text"]),
        (_group_in_one, ["episode 0", "episode 1", "infos/y", "group"]),
        (_no_actions, ["episode 0", "'actions'"]),
        (_no_number, ["one"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_episodes_that_do_not_fit(tmp_path: Path, edit: Any, words: list[str]) -> None:
    data = made.line(tmp_path / "minari", edit=edit)
    with pytest.raises(CorruptDatasetError) as caught:
        opened(data, tmp_path)
    assert all(word in str(caught.value) for word in [str(data), *words])
    assert not (tmp_path / "root" / "toy" / "line-v0").exists()


def test_steps_that_disagree(tmp_path: Path) -> None:
    data = made.line(tmp_path / "minari", edit=_longer)
    made.described(data, total_steps=6)
    with pytest.raises(RuntimeError, match="episode 1: actions has 2 rows, 3 are needed for 3 steps"):
        opened(data, tmp_path)


def _text(path: Path) -> None:
    path.write_text("not this")


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FILES = [(each, "metadata.json") for each in FORMATS] + [("hdf5", "main_data.hdf5")]
FILES += [(each, f"0/{name}") for each in FORMATS[1:] for name in ("metadata.json", f"part-0.{each}")]


@pytest.mark.parametrize("damage", [_text, _half, Path.unlink])
@pytest.mark.parametrize(("data_format", "name"), FILES)
def test_damaged_files(tmp_path: Path, data_format: str, name: str, damage: Any) -> None:
    data = made.collect(tmp_path / "minari", "toy/line-v0", 2, data_format)
    damage(data / name)
    with pytest.raises(CorruptDatasetError) as caught:
        opened(data, tmp_path)
    assert str(data) in str(caught.value)


def test_damaged_images(tmp_path: Path) -> None:
    made.make(tmp_path, np.random.default_rng(0))
    with h5py.File(tmp_path / made.DATASET / "data" / "main_data.hdf5", "a") as file:
        images = file["episode_3/observations/image"]
        images[2] = images[2][:300]
    with pytest.raises(CorruptDatasetError, match="episode 3, observations/image, image 2: this is no JPEG"):
        MinariExperienceReplay(made.DATASET, 4, root=tmp_path / "root", from_local=tmp_path)


def test_unsigned_integers_that_storages_do_not_have() -> None:
    for dtype in (np.uint32, np.uint64):
        assert leaf(np.array([1, 2**32 - 1], dtype)).tolist() == [1, 2**32 - 1]
    assert leaf(np.array([1], np.uint16)).dtype == torch.uint16
    with pytest.raises(CorruptDatasetError, match="18446744073709551615 is no int64"):
        leaf(np.array([1, 2**64 - 1], np.uint64))


def test_formats_of_the_future(line: Path, tmp_path: Path) -> None:
    made.described(line, data_format="zarr")
    with pytest.raises(CorruptDatasetError, match=r"'zarr'.*upgrade"):
        opened(line, tmp_path)
