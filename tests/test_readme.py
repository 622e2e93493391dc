"""The README's code runs as it stands."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=["inside jit", "from torch"])
def test_code_runs(code):
    exec(compile(code, "README.md", "exec"), {})
