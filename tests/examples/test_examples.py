"""The examples run, shortened; what they learn is shown by `make demo`."""

import importlib.util
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [pytest.param("dqn_jax", marks=pytest.mark.slow), "dqn_torch"])
def test_a_short_run_fills_the_buffer_and_draws_the_curve(name, tmp_path, capsys):
    plot = tmp_path / "curve.png"
    with jax.numpy_rank_promotion("allow"):
        result = load(name).main(["--smoke", "--quiet", "--plot", str(plot)])
    assert result["steps"] >= 500
    assert plot.stat().st_size > 1000
    assert "sample" in capsys.readouterr().out


def test_the_environment_in_jax_is_that_of_gymnasium():
    load("dqn_jax").check_dynamics()


@pytest.mark.slow
def test_a_short_run_through_both_doors_ends(capsys):
    with jax.numpy_rank_promotion("allow"):
        assert load("two_doors").main(["--smoke"])["passed"]
    assert capsys.readouterr().out.count("episodes") == 2
