"""Hindsight on the lake, shortened; and its checks see what they are there to see."""

import pytest

from tests.examples.test_examples import load


@pytest.fixture(scope="module")
def her():
    return load("her")


def test_a_short_run_checks_batches_of_a_ring_that_went_around(her, capsys):
    result = her.main(["--quick"])
    (relabelling,), (plain,) = result["runs"]["with"], result["runs"]["without"]
    assert result["passed"] is None
    for run in (relabelling, plain):
        assert run["written"] == 1500  # of 1000 that there is room for
        assert run["updates"] > 200
        assert run["checked"] > 10 * 128
        assert run["truncated"] > 0
    assert relabelling["relabelled"] / relabelling["checked"] == 102 / 128
    assert plain["relabelled"] == 0
    assert relabelling["after"] > relabelling["before"] + 0.2
    assert "goals found" in capsys.readouterr().out


@pytest.fixture(scope="module")
def drawn(her):
    """A batch of which 102 rows are relabelled, and what the collector wrote down."""
    options = her.parse(["--quick"])
    env = her.lake(options)
    told, net = her.Collector(env, 0, 800), her.Network(env.shape, 8)
    buffer = her.replay_buffer(options, 0, 0.8)
    while told.steps < 800:
        buffer.extend(told.episode(net, 1.0))
    batches = (buffer.sample() for _ in range(100))  # few rows end their episode
    return next(batch for batch in batches if batch["next", "truncated"].any()), told


def another_place(her, batch):
    """As if the episode that follows a truncated one were its last observation."""
    batch["next", "observation"][batch["next", "truncated"][:, 0].nonzero()[0]] ^= 1


def a_goal_of_no_episode(her, batch):
    batch["desired_goal"][0] = 255
    batch["next", "reward"], batch["next", "terminated"] = her.arrival(batch)


def the_old_reward(her, batch):
    batch["next", "reward"][batch["next", "reward"] == 1] = 0


def an_end_that_was_forgotten(her, batch):
    batch["next", "done"][batch["next", "truncated"]] = False


def test_a_batch_as_drawn_passes_the_check(her, drawn):
    batch, told = drawn
    assert her.check(batch, told, 0.8)["relabelled"] == 102


@pytest.mark.parametrize("spoil", [another_place, a_goal_of_no_episode, the_old_reward, an_end_that_was_forgotten])
def test_a_spoilt_batch_does_not(her, drawn, spoil):
    batch, told = drawn
    batch = batch.clone()
    spoil(her, batch)
    with pytest.raises(AssertionError):
        her.check(batch, told, 0.8)
