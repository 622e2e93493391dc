"""Kills around datasets, in short."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("loaders", "points", "least"),
    [(["toy", "minari", "gen_dgrl", "hub_folder"], 12, 26), pytest.param([], 24, 80, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_killed_call_leaves_a_whole_dataset_or_none(loaders: list[str], points: int, least: int) -> None:
    """In a process of its own, in which JAX does not run: children of others may hang."""
    command = [sys.executable, "-m", "tests.faults.datasets", "--points", str(points), "--random", "0", "--short"]
    done = subprocess.run([*command, "--loaders", *loaders], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == 0 and found["restarts"] == found["points"] >= least
