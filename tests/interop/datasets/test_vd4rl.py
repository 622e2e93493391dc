"""V-D4RL: images, as episodes and as shards."""

import pickle

import numpy as np
import pytest
import torch

from interop.datasets import grouping
from interop.datasets.errors import CorruptDatasetError
from interop.datasets.vd4rl import VD4RLExperienceReplay, VD4RLSource
from interop.transforms import Compose, RenameTransform, ToTensorImage
from tests.interop.datasets import sources_vd4rl

ID = "main/walker_walk/random/64px"


def rows_of(folder):
    source = VD4RLSource(ID)
    return torch.cat([rows for part in source.parts(folder) for rows in source.read(part)])


def assert_rows(rows, expected):
    assert set(rows.keys(True, True)) == set(expected)
    for key, values in expected.items():
        torch.testing.assert_close(rows[key], torch.from_numpy(values), rtol=0, atol=0)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_rows_of_episodes(tmp_path, rng):
    episodes = sources_vd4rl.make(tmp_path, rng)

    def joined(key, rows):
        return np.concatenate([held[key][rows] for held in episodes])

    before, after = slice(None, -1), slice(1, None)
    last, terminal = joined("is_last", after)[:, None], joined("is_terminal", after)[:, None]
    assert_rows(
        rows_of(tmp_path),
        {
            "pixels": joined("image", before),
            "action": joined("action", after),
            "discount": joined("discount", after),
            "is_init": joined("is_first", before),
            ("state", "height"): joined("height", before),
            ("state", "velocity"): joined("velocity", before),
            ("next", "pixels"): joined("image", after),
            ("next", "state", "height"): joined("height", after),
            ("next", "state", "velocity"): joined("velocity", after),
            ("next", "reward"): joined("reward", after)[:, None],
            ("next", "done"): last,
            ("next", "terminated"): terminal,
            ("next", "truncated"): last & ~terminal,
            **dict.fromkeys(["done", "terminated", "truncated"], np.zeros_like(last)),
        },
    )


@pytest.mark.parametrize("block", [1 << 24, 1000, 1])
def test_rows_of_shards(tmp_path, rng, monkeypatch, block):
    monkeypatch.setattr(grouping, "_BYTES", block)
    held = sources_vd4rl.make_shard(tmp_path / "a.hdf5", rng)  # of three episodes: the last one is cut
    after = np.flatnonzero(held["step_type"] != 0)
    before, last = after - 1, (held["step_type"][after] == 2)[:, None]
    last[-1] = True
    assert_rows(
        rows_of(tmp_path),
        {
            "pixels": held["observation"][before],
            "action": held["action"][after],
            "discount": held["discount"][after],
            "is_init": held["step_type"][before] == 0,
            ("state", "step_type"): held["step_type"][before],
            ("next", "pixels"): held["observation"][after],
            ("next", "state", "step_type"): held["step_type"][after],
            ("next", "reward"): held["reward"][after][:, None],
            ("next", "done"): last,
            ("next", "truncated"): last,
            **dict.fromkeys(["done", "terminated", "truncated", ("next", "terminated")], np.zeros_like(last)),
        },
    )


def test_files_that_were_cut_have_flags_behind_their_end(tmp_path, rng):
    """As upstream's file with 500 images and rewards, and 501 flags. Numbers of other files are float32."""
    held = sources_vd4rl.episode(rng, 6)
    cut = {name: each[:5] for name, each in held.items() if not name.startswith("is_")}
    cut |= {name: each for name, each in held.items() if name.startswith("is_")}
    np.savez_compressed(tmp_path / "a.npz", **{**cut, "reward": cut["reward"].astype(np.float64)})
    np.savez_compressed(tmp_path / "b.npz", **held)
    rows = VD4RLExperienceReplay(ID, root=tmp_path / "root", from_local=tmp_path, totensor=False)[:]
    np.testing.assert_array_equal(rows["next", "pixels"], np.concatenate([held["image"][1:5], held["image"][1:]]))
    assert rows["next", "reward"].dtype == torch.float32
    assert rows["next", "truncated"].flatten().nonzero().flatten().tolist() == [3, 8]
    assert rows["is_init"].nonzero().flatten().tolist() == [0, 4]


@pytest.mark.parametrize(
    ("first", "last", "pairs", "ends"),
    [
        ([0], [5], [0, 1, 2, 3, 4], [4]),
        ([0, 3], [], [0, 1, 3, 4], [1, 4]),  # a first image ends what is before it
        ([0], [2], [0, 1, 3, 4], [1, 4]),  # and an image follows no last one
        ([], [], [0, 1, 2, 3, 4], [4]),
    ],
)
def test_flags_that_disagree(tmp_path, rng, first, last, pairs, ends):
    held = sources_vd4rl.episode(rng, 6)
    held |= {"is_first": np.isin(np.arange(6), first), "is_last": np.isin(np.arange(6), last)}
    np.savez_compressed(tmp_path / "a.npz", **held)
    rows, at = rows_of(tmp_path), np.array(pairs)
    np.testing.assert_array_equal(rows["pixels"], held["image"][at])
    np.testing.assert_array_equal(rows["next", "pixels"], held["image"][at + 1])
    assert at[rows["next", "done"].flatten().numpy()].tolist() == ends


def test_episodes_of_a_single_image_have_no_rows(tmp_path, rng):
    for place, steps in enumerate((1, 3, 1)):
        np.savez_compressed(tmp_path / f"{place}.npz", **sources_vd4rl.episode(rng, steps))
    assert len(rows_of(tmp_path)) == 2


class _Evil:
    def __reduce__(self):
        return print, ("this ran",)


@pytest.mark.parametrize(
    "how", ["cut", "text", "pickle", "objects", "number", "lengths", "flags", "no image", "no reward"]
)
def test_damaged_episodes_are_refused(tmp_path, rng, capsys, how):
    held = sources_vd4rl.episode(rng, 6)
    changes = {"objects": {"height": np.array([_Evil()] * 6, object)}, "number": {"height": np.float64(3)}}
    changes |= {"lengths": {"height": np.zeros(5)}, "flags": {"is_last": np.zeros(5)}}
    held |= changes.get(how, {})
    if how.startswith("no "):
        del held[how.removeprefix("no ")]
    path = tmp_path / "a.npz"
    np.savez_compressed(path, **held)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "text":
        path.write_text("<html>")
    elif how == "pickle":
        path.write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(CorruptDatasetError, match=r"a\.npz"):
        rows_of(tmp_path)
    assert not capsys.readouterr().out


def test_damaged_bytes_never_raise_anything_else(tmp_path, rng):
    path, refused = tmp_path / "a.npz", 0
    np.savez_compressed(path, **sources_vd4rl.episode(rng, 6))
    whole = path.read_bytes()
    for _ in range(300):
        damaged = np.frombuffer(whole, np.uint8).copy()
        damaged[rng.integers(len(whole), size=4)] = rng.integers(256, size=4)
        path.write_bytes(damaged.tobytes())
        try:
            rows_of(tmp_path)
        except CorruptDatasetError:
            refused += 1
    assert refused > 200


@pytest.fixture
def repo(hub, rng):
    """The repository on the hub, with some episodes and a shard."""
    folder = hub.folder / "datasets" / "conglu" / "vd4rl"
    sources_vd4rl.make(folder / "vd4rl" / ID, rng)
    sources_vd4rl.make_shard(folder / "vd4rl" / "main/cheetah_run/expert/84px/0.hdf5", rng)
    (folder / "README.md").write_text("V-D4RL")
    return folder


def test_the_buffer(tmp_path, repo):
    assert VD4RLExperienceReplay.available_datasets == ["main/cheetah_run/expert/84px", ID]
    rb = VD4RLExperienceReplay(ID, 4, root=tmp_path / "root", split_trajs=True)
    assert len(rb) == 2 and rb[:]["mask"].sum() == 8
    rb = VD4RLExperienceReplay(ID, 4, root=tmp_path / "root", download=False)
    batch = rb.sample()
    assert len(rb) == 8 and batch["pixels"].shape == batch["next", "pixels"].shape == (4, 3, 8, 8)
    assert batch["pixels"].dtype == torch.float32 and batch["pixels"].max() <= 1
    pixels_84 = "main/cheetah_run/expert/84px"
    split = VD4RLExperienceReplay(pixels_84, 4, root=tmp_path / "root", split_trajs=True)[:]
    assert split["mask"].sum(1).tolist() == [4, 4, 1] and split["next", "done"][split["mask"]].sum() == 3
    shards = VD4RLExperienceReplay(pixels_84, 4, root=tmp_path / "root", image_size=6)
    assert shards.sample()["next", "pixels"].shape == (4, 3, 6, 6)
    with pytest.raises(ValueError, match=r"no dataset 'main/walker_walk/64px'.*'main/walker_walk/random/64px'"):
        VD4RLExperienceReplay("main/walker_walk/64px", 4, root=tmp_path / "root")


def test_transforms(tmp_path, rng):
    sources_vd4rl.make(tmp_path / "files", rng)

    def sampled(**options):
        rb = VD4RLExperienceReplay(ID, 4, root=tmp_path / "root", from_local=tmp_path / "files", **options)
        return rb.sample()

    assert sampled(totensor=False)["pixels"].dtype == torch.uint8
    assert sampled(image_size=[4, 6])["pixels"].shape == (4, 3, 4, 6)
    own = Compose(ToTensorImage(in_keys=["pixels"], dtype=torch.float64))
    assert sampled(transform=own)["pixels"].dtype == torch.float64
    renamed = sampled(transform=RenameTransform(["action"], ["act"]))
    assert "act" in renamed and renamed["pixels"].dtype == torch.float32


def test_a_size_of_images_whose_channels_are_last(tmp_path, rng):
    sources_vd4rl.make(tmp_path / "up", rng)
    with pytest.raises(ValueError, match="totensor"):
        VD4RLExperienceReplay(ID, 2, root=tmp_path, from_local=tmp_path / "up", totensor=False, image_size=4)
