"""D4RL: flat files, in which an episode ends at a terminal or a time-out."""

import sys
from functools import partial
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from interop import LazyTensorStorage, TensorDictReplayBuffer
from interop.datasets import d4rl, grouping
from interop.datasets.d4rl import D4RLExperienceReplay, D4RLSource
from interop.datasets.errors import CorruptDatasetError, DownloadError, MissingDatasetError
from interop.shared.published_folder import RECORD
from interop.transforms import Reward2GoTransform
from tests.interop.datasets import sources_d4rl, sources_law
from tests.interop.datasets.sources_d4rl import ROWS, flags
from tests.interop.datasets.sources_toy import edit

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
        return sources_law.qlearning_dataset(env.get_dataset(), terminate_on_end)

    monkeypatch.setitem(sys.modules, "gym", SimpleNamespace(make=make_env))
    monkeypatch.setitem(sys.modules, "d4rl", SimpleNamespace(qlearning_dataset=qlearning_dataset))
    rb = D4RLExperienceReplay(ID, 4, root=tmp_path / "a", from_env=True, size=3)
    assert asked == [(ID, {"size": 3})] and rb.metadata == {"algorithm": "SAC"} and ("next", "info") in rb[:].keys(True)
    for terminate_on_end in (True, False):
        root, options = tmp_path / str(terminate_on_end), {"terminate_on_end": terminate_on_end}
        rows = D4RLExperienceReplay(ID, 4, root=root, direct_download=False, **options)[:]
        assert asked[1:] == [(ID, {}), terminate_on_end]
        del asked[1:]
        made = sources_law.qlearning_dataset(held, terminate_on_end)
        np.testing.assert_array_equal(rows["observation"], made["observations"])
        np.testing.assert_array_equal(rows["next", "reward"].squeeze(1), made["rewards"])
        known = ~rows["next", "done"].squeeze(1)
        np.testing.assert_array_equal(rows["next", "observation"][known], made["next_observations"][known])
        np.testing.assert_array_equal(rows["next", "terminated"].squeeze(1), made["terminals"])
        # d4rl leaves the timed-out step 8 out unless terminate_on_end, and does not tell where
        assert rows["next", "truncated"].flatten().nonzero().tolist() == [[8 if terminate_on_end else 7]]


@pytest.mark.parametrize("end", ["terminals", "timeouts"])
@pytest.mark.parametrize("part_bytes", [1 << 25, 1])
def test_a_row_that_ends_an_episode_needs_no_successor(tmp_path, monkeypatch, end, part_bytes):
    monkeypatch.setattr(grouping, "_BYTES", part_bytes)
    none = np.zeros(8, np.bool_)
    held = {
        "observations": np.arange(8, dtype=np.float32)[:, None],
        "actions": np.ones((8, 1), np.float32),
        "rewards": np.arange(8, dtype=np.float32) * 10,
        **{name: flags(8, (3, 7)) if name == end else none for name in ("terminals", "timeouts")},
        "infos/qpos": np.arange(8)[:, None],
    }
    sources_d4rl.write(tmp_path / "some.hdf5", held)
    rows = rows_of(tmp_path)
    assert rows["next", "reward"].flatten().tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
    assert rows["next", "done"].flatten().nonzero().flatten().tolist() == [3, 7]
    assert rows["next", "observation"].flatten().tolist() == [1, 2, 3, 0, 5, 6, 7, 0]
    assert rows["done"].flatten().nonzero().flatten().tolist() == [4]
    assert rows["info", "qpos"].flatten().tolist() == [*range(8)] and not rows["next", "info", "qpos"][-1]
    held[end][7] = False
    sources_d4rl.write(tmp_path / "some.hdf5", held)
    assert len(rows_of(tmp_path)) == 7
    held["next_observations"] = held["observations"] + 1
    sources_d4rl.write(tmp_path / "some.hdf5", held)
    assert rows_of(tmp_path)["next", "observation"].flatten().tolist() == [1, 2, 3, 0, 5, 6, 7, 8]


def test_the_last_step_of_a_part_is_done(whole):
    """Also that of the last episode, which goes on, and as upstream's that of the padding."""
    folder, held = whole
    parts = D4RLExperienceReplay(ID, 4, root=folder / "root", from_local=folder, split_trajs=True)[:]
    done, mask = parts["next", "done"].squeeze(-1), parts["mask"]
    lengths = mask.sum(1)
    assert lengths.tolist() == [5, 4, 3, 7] and done[:, -1].all()
    assert done[torch.arange(4), lengths - 1].all() and (done & mask).sum() == 4
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), transform=Reward2GoTransform(gamma=0.5))
    rb.extend(parts)
    found = rb[:]["next", "reward"].squeeze(-1)
    start = 0
    for place, length in enumerate(lengths.tolist()):
        expected, going = [], 0.0
        for reward in held["rewards"][start : start + length][::-1].tolist():
            going = reward + 0.5 * going
            expected.insert(0, going)
        torch.testing.assert_close(found[place, :length], torch.tensor(expected))
        assert not found[place, length:].any()
        start += length


def test_rows_of_an_earlier_version_are_not_read(whole):
    folder, _ = whole
    make = partial(D4RLExperienceReplay, ID, 4, root=folder / "root", from_local=folder)
    edit(make().data_path / RECORD, lambda held: held.pop("rows_version"))
    with pytest.raises(ValueError, match=r"earlier version.*download='force'"):
        make()
    assert len(make(download="force")) == len(make()) == ROWS - 1


def test_a_page_in_the_place_of_the_file_is_refused(tmp_path, server, monkeypatch):
    monkeypatch.setitem(d4rl.D4RL_URLS, ID, server.at("moved.hdf5"))
    (server.folder / "moved.hdf5").write_text("<html>Moved</html>")
    with pytest.raises((CorruptDatasetError, DownloadError), match=r"moved\.hdf5"):
        D4RLExperienceReplay(ID, 4, root=tmp_path / "root")
