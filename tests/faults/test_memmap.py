"""A short run of `tests.faults.memmap`, in a process that has not used JAX: forking is cheap and safe there."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_forty_writers_are_killed():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.faults.memmap", "--kills", "40", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "0 torn, 0 lost" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
