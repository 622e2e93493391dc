"""Cloning from pictures, shortened; and its check sees what it is there to see."""

import pytest
import torch

from tests.examples.test_examples import load


@pytest.fixture(scope="module")
def cloning():
    return load("behaviour_cloning")


def test_a_short_run_learns_from_a_data_set_of_half_the_size(cloning, capsys):
    result = cloning.main(["--quick"])
    (run,) = result["runs"]
    assert result["passed"] is None
    assert (run["steps"], run["episodes"]) == (12 * 200 - 500, 10)
    assert run["flat_bytes"] < 0.55 * run["plain_bytes"]
    assert run["errors"][-1] < run["errors"][0] / 2
    assert run["controller"] > -400 > run["random"]
    assert "reached" in capsys.readouterr().out


def test_the_controller_holds_the_rod_up(cloning):
    episodes = cloning.Pendulums(4).play(cloning.controller, seed=5)
    assert (episodes["next", "reward"][:, -50:] > -0.1).all()
    assert episodes["next", "truncated"].sum() == 4


def test_pictures_show_where_the_rod_is(cloning):
    up, right = cloning.picture(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]).numpy())
    half = cloning.SIZE // 2
    assert up[:half].sum() > 0.8 * up.sum()
    assert right[:, half:].sum() > 0.8 * right.sum()


@pytest.fixture(scope="module")
def saved(cloning, tmp_path_factory):
    """What was recorded, what was loaded, and all episodes."""
    options = cloning.parse(["--quick", "--lost=300"])
    options.episodes = 4
    recorded, episodes = cloning.record(options, 0)
    folder = tmp_path_factory.mktemp("data")
    cloning.save(recorded, folder)
    return recorded, cloning.load(options, folder, len(recorded), 0), episodes


def test_what_was_loaded_is_what_was_recorded(cloning, saved):
    recorded, loaded, episodes = saved
    assert cloning.check(loaded, recorded, episodes, 300) == 3


@pytest.mark.parametrize(("episode", "step"), [(1, 100), (1, 199), (3, 0), (3, 199)])
def test_a_picture_that_changed_is_seen(cloning, saved, episode, step):
    recorded, loaded, episodes = saved
    spoilt = episodes.clone()
    spoilt["next", "pixels"][episode, step, 0, 0, 0] ^= 1
    with pytest.raises(AssertionError):
        cloning.check(loaded, recorded, spoilt, 300)
