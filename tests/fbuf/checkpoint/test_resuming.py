"""A new process goes on from a saved state as this one does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fbuf.checkpoint import resuming


@pytest.mark.slow
def test_every_sampler_goes_on_bit_for_bit(tmp_path: Path) -> None:
    wanted = resuming.save(tmp_path)
    command = [sys.executable, "-m", resuming.__name__, str(tmp_path), "99"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(told) == wanted and len(wanted) == len(resuming.SAMPLERS) > 5
