"""RoboSet: demonstrations in order of their numbers, then of the files."""

import numpy as np
import pytest
import torch

from interop.datasets import grouping
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.roboset import RobosetExperienceReplay, RobosetSource
from tests.interop.datasets import sources_roboset

ID = "DAPG(expert)/door_v2d-v1"


def rows_of(folder):
    source = RobosetSource(ID)
    return torch.cat([rows for part in source.parts(folder) for rows in source.read(part)])


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("part_bytes", [1 << 24, 300, 1])
def test_rows(tmp_path, rng, monkeypatch, part_bytes):
    trials = sources_roboset.make(tmp_path, rng)
    monkeypatch.setattr(grouping, "_BYTES", part_bytes)
    rows = rows_of(tmp_path)

    def joined(key):
        return np.concatenate([held[key] for *_, held in trials])

    def shifted(key):
        return np.concatenate(
            [values for *_, held in trials for values in (held[key][1:], np.zeros_like(held[key][:1]))]
        )

    infos = {("info", *key.split("/")[1:]): key for key in ("env_infos/solved", "env_infos/obs_dict/qpos")}
    same = {"observation": "observations", "action": "actions", "time": "time", **infos}
    expected = {key: joined(name) for key, name in same.items()}
    nexts = {"observation": "observations", **infos}
    expected |= {("next", *([key] if isinstance(key, str) else key)): shifted(name) for key, name in nexts.items()}
    done = joined("done")[:, None]
    expected |= {"done": done, ("next", "done"): done, ("next", "terminated"): done}
    expected |= dict.fromkeys(["terminated", "truncated", ("next", "truncated")], np.zeros_like(done))
    expected["next", "reward"] = joined("rewards")[:, None]
    for key, place in ("episode", 0), ("seed", 1):
        expected[key] = np.concatenate([np.full(len(each[2]["done"]), each[place]) for each in trials])
    assert [each[:2] for each in trials] == [(0, 0), (0, 1), (2, 0), (2, 1), (10, 0), (10, 1)]
    assert set(rows.keys(True, True)) == set(expected)
    for key, values in expected.items():
        torch.testing.assert_close(rows[key], torch.from_numpy(values), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("key", "values", "words"),
    [
        ("rewards", np.zeros(9), ["rewards has 9 rows", "3 steps"]),
        ("env_infos/obs_dict/qpos", np.zeros((2, 4)), ["qpos has 2 rows", "3 steps"]),
        ("time", 3.0, ["time has 0 rows", "3 steps"]),
        ("done", None, ["no 'done'"]),
        ("actions", None, ["no 'actions'"]),
    ],
)
def test_trials_that_do_not_fit_are_refused(tmp_path, rng, key, values, words):
    held = {**sources_roboset.trial(rng, 3), key: values}
    sources_roboset.write(tmp_path / "a.h5", {"Trial7": {key: each for key, each in held.items() if each is not None}})
    with pytest.raises(CorruptDatasetError) as caught:
        rows_of(tmp_path)
    assert all(word in str(caught.value) for word in ["a.h5", "Trial7", *words])


def test_folders_without_trials_are_refused(tmp_path, rng):
    with pytest.raises(CorruptDatasetError, match="has no files DAPG"):
        RobosetSource(ID).parts(tmp_path)
    sources_roboset.write(tmp_path / "a.h5", {"Other": sources_roboset.trial(rng, 3)})
    assert RobosetSource(ID).parts(tmp_path) == []


def test_the_buffer(tmp_path, hub, rng):
    repo = hub.folder / "datasets" / "jdvakil" / "RoboSet_Sim"
    trials = sources_roboset.make(repo / ID, rng)
    sources_roboset.make(repo / "DAPG(human)" / "door_v2d-v1", rng)
    rb = RobosetExperienceReplay(ID, 4, root=tmp_path / "root")
    count = sum(len(held["done"]) for *_, held in trials)
    assert len(rb) == count and rb.sample()["next", "reward"].shape == (4, 1)
    split = RobosetExperienceReplay(ID, 4, root=tmp_path / "root", download=False, split_trajs=True)
    assert len(split) == 6 and split[:]["mask"].sum() == count
    assert len(RobosetExperienceReplay.available_datasets) == len(set(RobosetExperienceReplay.available_datasets)) == 20
    with pytest.raises(ValueError, match=r"no dataset 'DAPG\(robot\)/door_v2d-v1'.*'DAPG\(expert\)/door_v2d-v1'"):
        RobosetExperienceReplay("DAPG(robot)/door_v2d-v1", 4, root=tmp_path / "root")


def test_a_trajectory_ends_with_its_file(tmp_path, rng):
    for name in ("a.h5", "b.h5"):
        held = sources_roboset.trial(rng, 3)
        held["done"][:] = False
        sources_roboset.write(tmp_path / "files" / name, {"Trial4": held})
    split = RobosetExperienceReplay(ID, root=tmp_path, from_local=tmp_path / "files", split_trajs=True)
    assert split[:]["seed"].tolist() == [[0] * 3, [1] * 3]
