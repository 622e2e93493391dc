"""Ape-X on Ray, shortened."""

import json
import subprocess
import sys

import pytest

from tests.examples.test_examples import FOLDER


@pytest.mark.slow  # five processes that import torch and JAX
def test_a_short_run_learns_from_the_rows_of_all_actors(tmp_path):
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, str(FOLDER / "apex.py"), "--smoke", "--quiet", "--json", str(numbers)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    result = json.loads(numbers.read_text())
    assert result["updates"] == 40
    assert result["rows"] == result["steps"] >= 200
