"""Offline RL from a recorded dataset, shortened; its returns, and what it learns where the best action is known."""

import gymnasium
import minari
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop.specs import Bounded
from tests.examples.test_examples import load

# minari leaves the removal of its temporary folders to the collector of garbage.
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")


@pytest.fixture(autouse=True)
def settings(monkeypatch, tmp_path):
    """What the example changes is as before."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def offline():
    return load("offline")


def test_a_short_run_records_loads_and_plays(offline, capsys):
    result = offline.main(["--quick"])
    (run,) = result["runs"]
    assert result["passed"] is None
    assert run["random"] < run["data"] < run["expert"] < -100
    assert run["reached"] == (run["learned"] - run["random"]) / (run["expert"] - run["random"])
    assert "learned   expert" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.* None:UserWarning")
def test_another_dataset_needs_no_environment_and_no_scores(offline, capsys):
    """Its observations are a mapping, and its actions are float64 in [2, 1]."""
    rng, steps = np.random.default_rng(0), 12
    box = gymnasium.spaces.Box(-1, 1, (2,))
    spaces = {
        "observation_space": gymnasium.spaces.Dict(goal=box, place=gymnasium.spaces.Dict(x=box)),
        "action_space": gymnasium.spaces.Box(0, 4, (2, 1), np.float64),
    }
    buffers = [
        minari.data_collector.EpisodeBuffer(
            id=episode,
            observations={key: rng.normal(size=(steps + 1, 2)).astype("f") for key in ("goal", "place")},
            actions=rng.uniform(0, 4, (steps, 2, 1)),
            rewards=np.ones(steps),
            terminations=np.zeros(steps, bool),
            truncations=np.arange(steps) == steps - 1,
            infos={},
        )
        for episode in range(4)
    ]
    for each in buffers:
        each.observations["place"] = {"x": each.observations["place"]}
    minari.create_dataset_from_buffers("toy/made-v0", buffers, **spaces)
    offline.MinariExperienceReplay("toy/made-v0", load_from_local_minari=True)
    result = offline.main(["--quick", "--dataset=toy/made-v0"])
    assert result["passed"] is None
    assert result["runs"][0]["data"] == steps
    assert result["runs"][0]["learned"] is None
    assert "there is no environment: the dataset names none" in capsys.readouterr().out


def test_returns_stop_at_the_end_of_a_slice_and_at_a_terminal_step(offline):
    g = offline.GAMMA
    reward, value = torch.tensor([[1.0, 2, 4, 8]]), torch.tensor([[10.0, 20, 30, 40]])
    goes_on = torch.tensor([[True, True, False, True]])
    one, three = (offline.returns(reward, goes_on, value, steps)[0].tolist() for steps in (1, 3))
    assert one == pytest.approx([1 + 10 * g, 2 + 20 * g, 4, 8 + 40 * g])
    assert three == pytest.approx([1 + 2 * g + 4 * g**2, 2 + 4 * g, 4, 8 + 40 * g])


def test_good_actions_are_learned_and_the_clone_takes_the_mean(offline):
    """One step an episode: of actions from 0 to 4, 3 is the best, whatever is observed."""
    torch.manual_seed(0)
    count = 4096
    action = 4 * torch.rand(count, 1, 1)
    observation = torch.randn(count, 1, 2, dtype=torch.float64)
    over = torch.ones(count, 1, 1, dtype=torch.bool)
    after = {"observation": observation, "reward": -((action - 3) ** 2).double(), "terminated": over}
    slices = TensorDict({"observation": observation, "action": action, "next": after}, [count, 1])
    learner = offline.Learner(slices[:, 0], Bounded(0, 4, (1,)), 200)
    for _ in range(200):
        learner.update(slices[torch.randint(count, (256,))])
    learned, clone = (learner.act(actor, np.zeros(2)) for actor in (learner.policy, learner.clone))
    assert learned == pytest.approx([3], abs=0.4)
    assert clone == pytest.approx([2], abs=0.4)
    assert learned.dtype == np.float32
