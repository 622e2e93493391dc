"""The code of the README and of the pages of the site runs as it stands, each page from top to bottom."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": 2,
    "docs/do/both_libraries.md": 3,
    "docs/do/datasets.md": 5,
    "docs/do/episodes.md": 7,
    "docs/do/extending.md": 11,
    "docs/do/formats.md": 4,
    "docs/do/from_cpprb.md": 1,
    "docs/do/from_sb3.md": 1,
    "docs/do/from_torchrl.md": 3,
    "docs/do/gpu.md": 1,
    "docs/do/groups.md": 2,
    "docs/do/her.md": 1,
    "docs/do/language.md": 6,
    "docs/do/larger_than_ram.md": 5,
    "docs/do/looking.md": 12,
    "docs/do/logging.md": 4,
    "docs/do/maps.md": 4,
    "docs/do/mesh.md": 1,
    "docs/do/mixtures.md": 9,
    "docs/do/new_keys.md": 2,
    "docs/do/nstep.md": 3,
    "docs/do/operating.md": 4,
    "docs/do/priorities.md": 2,
    "docs/do/processes.md": 1,
    "docs/do/queue.md": 1,
    "docs/do/rate_limits.md": 3,
    "docs/do/robots.md": 3,
    "docs/do/resume.md": 4,
    "docs/do/slices.md": 2,
    "docs/do/specs.md": 5,
    "docs/do/transforms.md": 10,
    "docs/do/view.md": 1,
    "docs/know/engine.md": 5,
    "docs/lookup/errors.md": 1,
}  # and how many blocks of code each has
EACH_ALONE = ("README.md",)  # pages whose blocks run each by itself
IN_A_PROCESS = ("docs/do/processes.md",)  # pages that fork, which a process with threads of JAX should not


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, names = (ROOT / page).read_text(), dict[str, Any](__name__="page")
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(blocks) == PAGES[page]
    if page in IN_A_PROCESS:
        subprocess.run([sys.executable, "-W", "error", "-c", "".join(each[1] for each in blocks)], check=True, cwd=ROOT)
        return
    for each in blocks:
        lines_before = "\n" * text[: each.start(1)].count("\n")  # so that errors name the line of the page
        exec(compile(lines_before + each[1], page, "exec"), dict(names) if page in EACH_ALONE else names)
    printed = capsys.readouterr().out
    for shown in re.findall(r"\nprints\n\n```\n(.*?)```", text, re.DOTALL):
        assert shown in printed
    if page == "README.md":
        assert re.search(r"rows stored +800\n", printed) and "priority_weight: Tensor(shape=torch.Size([32])" in printed


def test_the_readme_is_short() -> None:
    """A newcomer reads the first screen: one sentence, the drawing, how to install, and a block for each library."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert [len([line for line in block.splitlines() if line.strip()]) <= 15 for block in blocks] == [True, True]
    assert text.index("```sh") < text.index("```python") and text.index(blocks[-1]) < text.index("\n## ")


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`((?:fbuf|interop|tests|docs)/[\w/.]*)`|\]\(([\w/.]+)\)", (ROOT / page).read_text())
    for inner, linked in named:
        assert (ROOT / inner if inner else (ROOT / page).parent / linked).exists(), inner or linked
