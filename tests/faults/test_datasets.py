"""Kills around datasets, in short."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_killed_call_leaves_a_whole_dataset_or_none() -> None:
    """In a process of its own, in which JAX does not run: children of others may hang."""
    command = [sys.executable, "-m", "tests.faults.datasets", "--points", "24", "--random", "0", "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == 0 and found["restarts"] == found["points"] >= 80
