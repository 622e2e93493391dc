"""The example of prioritized replay with n-step returns and frames stored once, shortened; and what it checks itself by."""

import argparse
import types

import jax
import numpy as np
import pytest

import fbuf
from tests.examples.test_examples import load

rainbow = load("rainbow")


def test_a_short_run_draws_what_happened_from_half_the_memory(capsys):
    with jax.numpy_rank_promotion("allow"):
        result = rainbow.main(["--quick", "--quiet"])
    (run,) = result["runs"]
    assert run["steps"] == 2_400 and run["checked"] >= 500
    assert run["short"] >= 20 and run["truncated"] >= 10
    assert result["bytes"] < 0.5 * result["plain_bytes"]
    assert "with frames stored once" in capsys.readouterr().out


def log_of_two_episodes():
    """One lane, four rows: an episode truncated after two steps, and one terminated after two."""
    options = argparse.Namespace(lanes=1, n=3, gamma=0.5)
    program = types.SimpleNamespace(options=options, buffer=types.SimpleNamespace(capacity=4))
    log = rainbow.Log(program)
    for step, (truncated, terminated) in enumerate([(0, 0), (1, 0), (0, 0), (0, 1)]):
        row = {"obs": [[10.0 * step]], "next_obs": [[10.0 * step + 5]], "action": [step], "reward": [1.0 + step]}
        row |= {"truncated": [bool(truncated)], "terminated": [bool(terminated)]}
        log.rows.append({name: np.array(leaf) for name, leaf in row.items()})
    return log


def batch_of(slots, **wrong):
    right = {
        "obs": np.array([[0.0], [10], [20], [30]]),
        "action": np.arange(4),
        "return": np.array([1 + 0.5 * 2, 2, 3 + 0.5 * 4, 4]),
        "discount": np.array([0.25, 0.5, 0, 0]),
        "last_obs": np.array([[15.0], [15], [35], [35]]),
    }
    draw = fbuf.Draw(slots=np.array(slots), probability=None, valid=np.ones(len(slots), bool), smallest=None, size=4)
    return {name: leaf[slots] for name, leaf in (right | wrong).items()}, draw


def test_the_log_knows_returns_and_ends():
    log = log_of_two_episodes()
    log.check(*batch_of([3, 1, 0, 2]))
    assert (log.checked, log.short, log.truncated) == (4, 4, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"last_obs": np.array([[25.0], [15], [35], [35]])},  # of the next episode
        {"last_obs": np.array([[15.0], [20], [35], [35]])},  # where the next one begins
        {"return": np.array([1 + 1 + 0.25 * 3, 2, 5, 4])},
        {"discount": np.array([0.25, 0, 0, 0])},  # as if a truncated episode could not go on
        {"obs": np.array([[0.0], [10], [10], [30]])},
        {"action": np.array([0, 1, 1, 3])},
    ],
)
def test_the_log_refuses_what_did_not_happen(wrong):
    with pytest.raises(AssertionError):
        log_of_two_episodes().check(*batch_of([0, 1, 2, 3], **wrong))
