"""Cloning from pictures, shortened."""

import pytest

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
