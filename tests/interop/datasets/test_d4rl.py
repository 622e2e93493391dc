"""D4RL: flat files, in which an episode ends at a terminal or a time-out."""

import sys
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from interop.datasets import d4rl, grouping
from interop.datasets.d4rl import D4RLExperienceReplay, D4RLSource
from interop.datasets.errors import CorruptDatasetError, DownloadError, MissingDatasetError
from tests.interop.datasets import sources_d4rl
from tests.interop.datasets.sources_d4rl import ROWS, flags

ID = "hopper-medium-v2"


def rows_of(folder, **options):
    source = D4RLSource(ID, **options)
    return torch.cat([rows for part in source.parts(folder) for rows in source.read(part)])


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def whole(tmp_path, rng):
    """A folder with a file, and the arrays of this."""
    return tmp_path, sources_d4rl.make(tmp_path, rng)


@pytest.mark.parametrize("part_bytes", [1 << 25, 300, 1])
def test_rows(whole, monkeypatch, part_bytes):
    folder, held = whole
    monkeypatch.setattr(grouping, "_BYTES", part_bytes)
    rows, count = rows_of(folder), ROWS - 1
    done = flags(ROWS, (4, 8, 11))
    after = held["observations"][1:].copy()
    after[done[:-1]] = 0
    expected = {
        "observation": held["observations"][:-1],
        "action": held["actions"][:-1],
        ("info", "qpos"): held["infos/qpos"][:-1],
        ("info", "goal"): held["infos/goal"][:-1],
        ("next", "info", "qpos"): held["infos/qpos"][1:],
        ("next", "info", "goal"): held["infos/goal"][1:],
        ("next", "observation"): after,
    }
    signals = {"reward": held["rewards"], "terminated": held["terminals"], "truncated": held["timeouts"], "done": done}
    for key, values in signals.items():
        expected["next", key] = values[:-1, None]
        expected[key] = np.concatenate([np.zeros_like(values[:1]), values[:-2]])[:, None]
    assert rows.batch_size == (count,) and set(rows.keys(True, True)) == set(expected)
    for key, values in expected.items():
        torch.testing.assert_close(rows[key], torch.from_numpy(values), rtol=0, atol=0)


def test_the_last_terminal_falls_off(tmp_path):
    held = {
        "observations": np.arange(6.0)[:, None],
        "actions": np.zeros((6, 1)),
        "rewards": np.arange(6.0)[:, None],  # as in hammer-*-v0
        "terminals": flags(6, (2,)).astype(np.uint8),
        "timeouts": flags(6, (4,)),
    }
    sources_d4rl.write(tmp_path / "some.hdf5", held)
    rows = rows_of(tmp_path)
    assert (
        rows["next", "reward"].tolist() == [[0], [1], [2], [3], [4]] and rows["next", "reward"].dtype == torch.float32
    )
    assert rows["reward"].tolist() == [[0], [0], [1], [2], [3]]
    assert rows["next", "terminated"].flatten().tolist() == [False, False, True, False, False]
    assert rows["next", "terminated"].dtype == torch.bool
    assert rows["next", "truncated"].flatten().tolist() == [False, False, False, False, True]
    assert rows["done"].flatten().tolist() == [False, False, False, True, False]
    assert rows["next", "observation"].flatten().tolist() == [1, 2, 0, 4, 0]
    assert rows["observation"].flatten().tolist() == [0, 1, 2, 3, 4]


def test_time_outs_that_are_not_done(whole):
    folder, held = whole
    rows = rows_of(folder, use_truncated_as_done=False)
    assert torch.equal(rows["next", "done"], rows["next", "terminated"])
    assert rows["next", "truncated"][8] and not rows["next", "observation"][8].any()  # not that of the next episode
    held["next_observations"] = held["observations"] + 100
    sources_d4rl.write(folder / "some.hdf5", held)
    given = rows_of(folder, use_truncated_as_done=False)["next", "observation"]
    torch.testing.assert_close(given[8], torch.from_numpy(held["next_observations"][8]))
    assert not given[4].any() and (given[:4] > 50).all()


def test_files_without_time_outs(whole):
    folder, held = whole
    del held["timeouts"], held["infos/qpos"], held["infos/goal"]
    sources_d4rl.write(folder / "some.hdf5", held)
    with h5py.File(folder / "some.hdf5", "a") as file:
        file.create_group("infos")
    rows = rows_of(folder)
    signals = {"reward", "terminated", "done"}
    assert set(rows.keys()) == {"observation", "action", "next", *signals}
    assert set(rows["next"].keys()) == {"observation", *signals}
    assert torch.equal(rows["next", "done"], rows["next", "terminated"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"actions": None}, ["'actions'"]),
        ({"rewards": np.zeros(7)}, ["20 rows", "7"]),
        ({"infos/qpos": np.zeros((3, 4))}, ["infos/qpos", "3 rows", "20"]),
        ({"rewards": 3.0}, ["scalar"]),
    ],
)
def test_files_that_do_not_fit_are_refused(whole, change, words):
    folder, held = whole
    sources_d4rl.write(
        folder / "some.hdf5", {name: each for name, each in {**held, **change}.items() if each is not None}
    )
    with pytest.raises(CorruptDatasetError) as caught:
        rows_of(folder)
    assert all(word in str(caught.value) for word in ["some.hdf5", *words])


def test_a_folder_without_the_file(tmp_path, whole, rng):
    (tmp_path / "none").mkdir()
    with pytest.raises(CorruptDatasetError, match=r"must have one HDF5 file, it has \[\]"):
        rows_of(tmp_path / "none")
    sources_d4rl.write(tmp_path / "hopper_medium-v2.hdf5", sources_d4rl.arrays(rng, rows=8))
    assert len(rows_of(tmp_path)) == 7  # the named one, of two


def test_the_buffer(tmp_path, server, monkeypatch, rng):
    monkeypatch.setitem(d4rl.D4RL_URLS, ID, server.at("some.hdf5"))
    sources_d4rl.make(server.folder, rng)
    rb = D4RLExperienceReplay(ID, 4, root=tmp_path / "root")
    assert len(rb) == ROWS - 1 and rb.sample().batch_size == (4,) and rb.metadata["algorithm"] == "SAC"
    again = D4RLExperienceReplay(ID, 4, root=tmp_path / "root", download=False, split_trajs=True)
    assert len(again) == 4 and again[:]["mask"].sum() == ROWS - 1
    with pytest.raises(MissingDatasetError, match="The dataset could not be found in"):
        D4RLExperienceReplay("pen-human-v1", 4, root=tmp_path / "root", download=False)
    with pytest.raises(KeyError, match=r"Env hopper-medium-v7 not found\..*'hopper-medium-v2'"):
        D4RLExperienceReplay("hopper-medium-v7", 4, root=tmp_path / "root")


def test_ids():
    ids = D4RLExperienceReplay.available_datasets
    assert {"maze2d-umaze-v1", "halfcheetah-medium-v0", "pen-human-v0", "walker2d-full-replay-v2"} < set(ids)
    paths = {
        name: url.removeprefix("http://rail.eecs.berkeley.edu/datasets/offline_rl/")
        for name, url in d4rl.D4RL_URLS.items()
    }
    assert paths["maze2d-umaze-v1"] == "maze2d/maze2d-umaze-sparse-v1.hdf5"
    assert paths["halfcheetah-medium-v0"] == "gym_mujoco/halfcheetah_medium.hdf5"
    assert paths["pen-human-v0"] == "hand_dapg/pen-v0_demos_clipped.hdf5"
    v2 = "ant_maze_v2/Ant_maze_{}-maze_noisy_multistart_{}_multigoal_{}_sparse_fixed.hdf5"
    assert paths["antmaze-umaze-v2"] == v2.format("u", False, False)
    assert paths["antmaze-medium-play-v2"] == v2.format("big", True, False)
    assert paths["antmaze-large-diverse-v2"] == v2.format("hardest", True, True)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"terminate_on_end": False}, ValueError),
        ({"size": 3}, RuntimeError),
        ({"from_env": True, "direct_download": True}, ValueError),
        ({"direct_download": False}, ImportError),
        ({"from_env": True}, ImportError),
    ],
)
def test_arguments_that_do_not_fit(tmp_path, options, error):
    with pytest.raises(error, match=r"direct"):
        D4RLExperienceReplay(ID, 4, root=tmp_path, **options)
    assert not list(tmp_path.glob("*/*.json"))


def test_rows_by_the_library(tmp_path, monkeypatch, rng):
    held = {**sources_d4rl.arrays(rng), "metadata/algorithm": b"SAC"}
    asked = []

    def make_env(name, **options):
        asked.append((name, options))
        return SimpleNamespace(get_dataset=lambda: held)

    def qlearning_dataset(env, terminate_on_end):
        asked.append(terminate_on_end)
        names = ["observations", "actions", "rewards", "terminals"]
        return {**{name: env.get_dataset()[name] for name in names}, "next_observations": held["observations"]}

    monkeypatch.setitem(sys.modules, "gym", SimpleNamespace(make=make_env))
    monkeypatch.setitem(sys.modules, "d4rl", SimpleNamespace(qlearning_dataset=qlearning_dataset))
    rb = D4RLExperienceReplay(ID, 4, root=tmp_path / "a", from_env=True, size=3)
    assert asked == [(ID, {"size": 3})] and rb.metadata == {"algorithm": "SAC"} and ("next", "info") in rb[:].keys(True)
    rb = D4RLExperienceReplay(ID, 4, root=tmp_path / "b", direct_download=False, terminate_on_end=True)
    assert asked[1:] == [(ID, {}), True]
    assert len(rb) == ROWS - 1 and torch.equal(rb[:3]["observation"], rb[:3]["next", "observation"])


def test_a_page_in_the_place_of_the_file_is_refused(tmp_path, server, monkeypatch):
    monkeypatch.setitem(d4rl.D4RL_URLS, ID, server.at("moved.hdf5"))
    (server.folder / "moved.hdf5").write_text("<html>Moved</html>")
    with pytest.raises((CorruptDatasetError, DownloadError), match=r"moved\.hdf5"):
        D4RLExperienceReplay(ID, 4, root=tmp_path / "root")
