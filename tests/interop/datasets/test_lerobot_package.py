"""Datasets of `to_lerobot` in the hands of the `lerobot` package, and its own datasets with episodes of ours."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop.datasets.test_to_lerobot import EPISODES, MORE, check, episode, loaded, written

lerobot_dataset = pytest.importorskip("lerobot.datasets.lerobot_dataset")
compute_stats = pytest.importorskip("lerobot.datasets.compute_stats")
pytestmark = pytest.mark.filterwarnings("ignore")  # of packages of others


def opened(folder: Path, **how: Any) -> Any:
    return lerobot_dataset.LeRobotDataset("me/mine", root=folder, video_backend="pyav", **how)


@pytest.mark.parametrize("how", [{"use_videos": False}, {"vcodec": "h264", "crf": 1}, {}], ids=["png", "h264", "av1"])
def test_items_are_the_rows(how, tmp_path):
    folder = written(tmp_path / "data", *EPISODES, **how)
    written(folder, *MORE, append=True, **how)
    data = opened(folder)
    rows = torch.cat([*EPISODES, *MORE])
    assert (data.num_episodes, data.num_frames, data.fps) == (5, 26, 10)
    for at in range(26):
        item = data[at]
        assert item["task"] == rows["task"][at] and item["note"] == rows["note"][at] and item["index"] == at
        assert torch.equal(item["observation.state"], rows["observation", "state"][at])
        torch.testing.assert_close(item["action"].double(), rows["action"][at], rtol=1e-6, atol=1e-6)
        assert torch.equal(item["grid"], rows["grid"][at])
        assert torch.equal(item["next.done"].reshape(1), rows["next", "done"][at])
        image = rows["observation", "images", "top"][at] / 255
        exact = how.get("use_videos", True) is False
        assert (item["observation.images.top"] - image).abs().max() <= (
            0 if exact else 0.05 if "crf" not in how else 0.025
        )
    chosen = opened(folder, episodes=[1, 3])
    assert len(chosen) == 12 and chosen[0]["episode_index"] == 1


def test_statistics_are_those_of_the_package(tmp_path):
    folder = written(tmp_path / "data", EPISODES[1], use_videos=False)
    data, rows = opened(folder), EPISODES[1]
    features = {name: dict(each) for name, each in data.meta.features.items()}
    for name, key in (("action", "action"), ("observation.state", ("observation", "state")), ("grid", "grid")):
        wanted = compute_stats.compute_episode_stats({name: rows[key].numpy()}, {name: features[name]})[name]
        found = data.meta.stats[name]
        assert found.keys() == wanted.keys()
        for kind in ("min", "max", "mean", "std", "count"):
            np.testing.assert_allclose(found[kind], wanted[kind], rtol=1e-6, atol=1e-6)
            assert np.shape(found[kind]) == np.shape(wanted[kind])
        for kind in ("q01", "q10", "q50", "q90", "q99"):  # upstream reads them from histograms
            assert (np.abs(found[kind] - wanted[kind]) <= np.ptp(rows[key].numpy(), axis=None) / 2).all()
    assert data.meta.stats["observation.images.top"]["mean"].shape == (3, 1, 1)


def test_a_dataset_of_the_package_grows(tmp_path):
    features = {
        "observation.state": {"dtype": "float32", "shape": (4,), "names": None},
        "action": {"dtype": "float64", "shape": (2,), "names": None},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        "observation.images.top": {"dtype": "image", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
    }
    theirs = lerobot_dataset.LeRobotDataset.create("me/theirs", 10, features, root=tmp_path / "data", use_videos=False)
    for rows in EPISODES[:2]:
        for at in range(len(rows)):
            row = rows[at]
            theirs.add_frame({
                "observation.state": row["observation", "state"].numpy(),
                "action": row["action"].numpy(),
                "next.reward": row["next", "reward"].numpy(),
                "next.done": row["next", "done"].numpy(),
                "observation.images.top": row["observation", "images", "top"].permute(1, 2, 0).numpy(),
                "task": row["task"],
            })  # fmt: skip
        theirs.save_episode()
    theirs.finalize()
    left_out = ["grid", "note", ("next", "terminated"), ("next", "truncated")]
    written(tmp_path / "data", *MORE, use_videos=False, append=True, exclude=left_out)
    rows = torch.cat([*EPISODES[:2], *MORE]).exclude(*left_out)
    data = opened(tmp_path / "data")
    assert (data.num_episodes, data.num_frames, data.meta.total_tasks) == (4, 23, 3)
    for at in (0, 4, 5, 12, 13, 22):
        item = data[at]
        assert item["task"] == rows["task"][at] and torch.equal(
            item["observation.state"], rows["observation", "state"][at]
        )
    found = loaded(tmp_path / "data")
    check(found, rows.exclude("done", "terminated", "truncated"))


def test_a_policy_of_the_package_trains(tmp_path):
    act = pytest.importorskip("lerobot.policies.act.modeling_act")
    from lerobot.policies.act.configuration_act import ACTConfig

    try:
        from lerobot.utils.feature_utils import dataset_to_policy_features
    except ImportError:
        from lerobot.datasets.utils import dataset_to_policy_features
    from lerobot.configs.types import FeatureType

    rows = [episode(12, seed, "push") for seed in range(4)]
    for each in rows:
        each["action"] = each["action"].float()
    folder = written(tmp_path / "data", *rows, vcodec="h264", exclude=["grid", "note"])
    data = opened(folder, delta_timestamps={"action": [step / 10 for step in range(4)]})
    features = dataset_to_policy_features(data.meta.features)
    outputs = {name: each for name, each in features.items() if each.type is FeatureType.ACTION}
    inputs = {name: each for name, each in features.items() if name not in outputs and name.startswith("observation")}
    config = ACTConfig(
        input_features=inputs, output_features=outputs, chunk_size=4, n_action_steps=4, dim_model=32, n_heads=2,
        dim_feedforward=64, n_encoder_layers=1, use_vae=False, pretrained_backbone_weights=None, device="cpu",
    )  # fmt: skip
    policy = act.ACTPolicy(config)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    losses = []
    for batch in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
        batch = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        loss, _ = policy.forward(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert len(losses) == 6 and np.isfinite(losses).all() and np.mean(losses[3:]) < losses[0]
