"""The README's code runs as it stands, from top to bottom."""

import re
from pathlib import Path
from typing import Any

TEXT = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_code_runs():
    names: dict[str, Any] = {}
    assert len(BLOCKS) == 7
    for code in BLOCKS:
        exec(compile(code, "README.md", "exec"), names)
    assert names["items"]["obs"].shape == (16, 120, 4)
    assert (names["slices"]["episode"] == names["slices"]["episode"][:, :1]).all()
