"""A short run of `tests.faults.shards`, in a process of its own."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_nothing_that_was_acknowledged_as_durable_is_lost() -> None:
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.faults.shards", "--kills", "2", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "missing=0" in done.stdout, f"{done.stdout}\n{done.stderr[-4000:]}"
