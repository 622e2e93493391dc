"""Gen-DGRL: archives, unpacked files, what ends an episode, and files that are not what they should be."""

import numpy as np
import pytest
import torch

from interop.datasets import gen_dgrl
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.gen_dgrl import GenDGRLExperienceReplay
from tests.interop.datasets.sources_gen_dgrl import LENGTHS, episode, make, pack

ID = "bigfish-level_1_E"
TOTAL = sum(LENGTHS)


@pytest.fixture
def few(monkeypatch):
    """Categories with few rows at most: disk space for all of them is reserved."""
    for name, (place, _) in gen_dgrl.CATEGORIES.items():
        monkeypatch.setitem(gen_dgrl.CATEGORIES, name, (place, 100))


@pytest.fixture
def upstream(tmp_path, few):
    folder = tmp_path / "upstream"
    folder.mkdir()
    return folder


def load(tmp_path, upstream, **more):
    return GenDGRLExperienceReplay(ID, root=tmp_path / "root", from_local=upstream, **more)


def check(rows, episodes):
    """Whether rows are the steps of episodes."""
    start = 0
    for held in episodes:
        steps = len(held["rewards"])
        part = rows[start : start + steps]
        np.testing.assert_array_equal(part["observation"], held["observations"][:-1])
        np.testing.assert_array_equal(part["next", "observation"], held["observations"][1:])
        np.testing.assert_array_equal(part["action"], held["actions"])
        np.testing.assert_array_equal(part["next", "reward"], held["rewards"])
        np.testing.assert_array_equal(part["next", "terminated"], held["dones"].reshape(-1, 1))
        assert part["next", "done"].squeeze(1).tolist() == [False] * (steps - 1) + [True]
        start += steps
    assert len(rows) == start


def test_keys_shapes_and_dtypes(tmp_path, upstream):
    episodes = make(upstream, np.random.default_rng(0))
    data = load(tmp_path, upstream, batch_size=5)
    assert len(data) == TOTAL and data.data_path == tmp_path / "root" / ID
    check(data[:], episodes)
    flags = dict.fromkeys(("done", "terminated", "truncated"), ((1,), torch.bool))
    expected = {
        "observation": ((3, 64, 64), torch.uint8),
        "action": ((1,), torch.int64),
        **flags,
        ("next", "observation"): ((3, 64, 64), torch.uint8),
        ("next", "reward"): ((1,), torch.float32),
        **{("next", key): each for key, each in flags.items()},
    }
    batch = data.sample()
    found = {key: (each.shape[1:], each.dtype) for key, each in batch.items(True, True)}
    assert found == {**expected, "index": ((), torch.int64)}
    assert not any(batch[key].any() for key in flags) and not batch["next", "truncated"].any()


@pytest.mark.parametrize("most", [TOTAL - 1, 5, 4, 3])
def test_at_most_as_many_rows_as_the_category_has(tmp_path, upstream, monkeypatch, most):
    monkeypatch.setitem(gen_dgrl.CATEGORIES, "level_1_E", ("", most))
    rng = np.random.default_rng(0)
    episodes = [episode(steps, rng) for steps in LENGTHS]
    pack(upstream, episodes)
    data = load(tmp_path, upstream)
    assert len(data) == most
    np.testing.assert_array_equal(data[:3]["observation"], episodes[0]["observations"][:3])


def test_new_rows_replace_old_ones_in_memory_only(tmp_path, upstream):
    make(upstream, np.random.default_rng(0))
    data = load(tmp_path, upstream)
    row = data[3].clone()
    row["action"] = row["action"] * 0 + 99
    data.add(row)
    assert data[0]["action"].item() == 99 and len(data) == TOTAL
    assert load(tmp_path, upstream)[0]["action"].item() != 99


def test_a_file_that_ends_without_done_is_truncated(tmp_path, upstream):
    held = episode(3, np.random.default_rng(0))
    held["dones"][:] = 0
    pack(upstream, [held, episode(2, np.random.default_rng(1))])
    rows = load(tmp_path, upstream)[:]
    assert rows["next", "done"].squeeze(1).tolist() == [False, False, True, False, True]
    assert rows["next", "truncated"].squeeze(1).tolist() == [False, False, True, False, False]
    assert rows["next", "terminated"].squeeze(1).tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("dataset_id", ["bigfish-1M", "bigfish", "bigfsh-1M_E", "", "../bigfish-1M_E"])
def test_unknown_ids(tmp_path, dataset_id):
    with pytest.raises(ValueError, match="nearest of its 128 ids"):
        GenDGRLExperienceReplay(dataset_id, root=tmp_path)


WRONG = {
    "no observations": ({"observations": None}, "no dict of observations"),
    "too few actions": ({"actions": np.zeros((1, 1), np.int64)}, "1 rows"),
    "two actions a step": ({"actions": np.zeros((2, 2))}, "action has 4 rows"),
    "scaled observations": ({"observations": np.full((3, 3, 64, 64), 0.5)}, "whole numbers from 0 to 255"),
    "not a number": ({"observations": np.full((3, 3, 64, 64), np.nan)}, "whole numbers from 0 to 255"),
    "code": ({"dones": divmod}, "would run code"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_episode_names_the_archive_and_its_file(tmp_path, upstream, name):
    change, message = WRONG[name]
    rng = np.random.default_rng(0)
    pack(upstream, [episode(1, rng), {**episode(2, rng), **change}])
    with pytest.raises(CorruptDatasetError, match=rf"bigfish\.tar\.xz, bigfish/2.*_1_2_0_.*{message}"):
        load(tmp_path, upstream)
    assert not (tmp_path / "root" / ID).exists()


def test_a_truncated_archive(tmp_path, upstream):
    make(upstream, np.random.default_rng(0))
    path = upstream / "bigfish.tar.xz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptDatasetError, match="truncated"):
        load(tmp_path, upstream)
    assert not (tmp_path / "root" / ID).exists()
