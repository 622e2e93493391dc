"""The code of the README and of pages in docs/ runs as it stands, each page from top to bottom."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": 11,
    "docs/episodes.md": 4,
    "docs/extending.md": 11,
    "docs/engine.md": 5,
    "docs/from_torchrl.md": 3,
    "docs/datasets.md": 4,
    "docs/gpu.md": 1,
    "docs/looking.md": 12,
    "docs/logging.md": 3,
    "docs/scale.md": 3,
    "docs/view.md": 1,
    "docs/operating.md": 4,
}  # and how many blocks of code each has


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, names = (ROOT / page).read_text(), dict[str, Any](__name__="page")
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(blocks) == PAGES[page]
    for each in blocks:
        lines_before = "\n" * text[: each.start(1)].count("\n")  # so that errors name the line of the page
        exec(compile(lines_before + each[1], page, "exec"), names)
    printed = capsys.readouterr().out
    for shown in re.findall(r"\nprints\n\n```\n(.*?)```", text, re.DOTALL):
        assert shown in printed
    if page == "README.md":
        assert names["items"]["obs"].shape == (16, 120, 4)
        assert (names["slices"]["episode"] == names["slices"]["episode"][:, :1]).all()


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`((?:fbuf|interop|tests|docs)/[\w/.]*)`|\]\(([\w/.]+)\)", (ROOT / page).read_text())
    for inner, linked in named:
        assert (ROOT / inner if inner else (ROOT / page).parent / linked).exists(), inner or linked
