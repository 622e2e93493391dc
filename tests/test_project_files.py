"""Facts that stand in several files of the project are one: the version, the Pythons, the lowest versions, the commands."""

import re
import subprocess
import tomllib
from pathlib import Path

import every_nth
import matrix
import pytest
import yaml

import fbuf

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
VERSIONS = (ROOT / "docs" / "know" / "versions.md").read_text()


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # what the format asks for
    assert (cited["version"], cited["license"]) == (fbuf.__version__, PROJECT["license"])


def test_the_pythons_are_the_same_everywhere() -> None:
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    for page in ("README.md", "docs/do/install.md", "docs/know/versions.md"):
        assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / page).read_text(), page
    assert {row.python for row in matrix.ROWS} == set(PYTHONS)


def test_the_lowest_versions_are_those_of_the_page_and_of_the_matrix() -> None:
    assert "jax==0.8.2" in matrix.lowest() and "jaxlib==0.8.2" in matrix.lowest()
    for need in {*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["interop"]}:
        name, bound = need.split(">=")
        assert f"{name.replace('numpy', 'NumPy')} {bound}" in VERSIONS.replace("\n", " "), need
        assert any(line.startswith(f"{name}=={bound}") for line in matrix.lowest())


def test_a_row_of_the_table_is_replaced_and_the_others_stay() -> None:
    rest = "\n\nAfter the table.\n"
    page = f"# Page\n\n{matrix.HEAD}\n|---|\n| 3.11 | old |\n| 3.13 | kept |{rest}"
    first, _, third, _ = matrix.ROWS
    once = matrix.entered(page, first, ["new"])
    assert once == f"# Page\n\n{matrix.HEAD}\n|---|\n| 3.11 | new |\n| 3.13 | kept |{rest}"
    assert matrix.entered(f"{matrix.HEAD}\n|---|\n", third, ["a", "b"]) == f"{matrix.HEAD}\n|---|\n| 3.13 | a | b |\n"
    assert matrix.HEAD in VERSIONS


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("..\n=== 5 passed, 2 skipped, 1 warning in 3.21s ===\n", "5 passed"),
        ("1 failed, 5 passed, 3 deselected in 63.2s (0:01:03)\n", "1 failed, 5 passed"),
        ("== 2 failed, 1 error in 0.10s ==\n", "2 failed, 1 error"),
        ("Killed\n", "broke off"),
    ],
)
def test_the_table_has_the_counts_of_pytest(output: str, told: str) -> None:
    assert matrix.counts(output) == told


def test_each_nth_test_is_run(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("EVERY_NTH", "3")
    items = [request.node for _ in range(7)]
    dropped: list[pytest.Item] = []

    monkeypatch.setattr(request.config.hook, "pytest_deselected", lambda items: dropped.extend(items), raising=False)
    every_nth.pytest_collection_modifyitems(request.config, items)
    assert (len(items), len(dropped)) == (3, 4)


def test_the_hooks_before_a_commit_run_targets_of_the_makefile() -> None:
    hooks = [
        hook
        for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repo["hooks"]
    ]
    assert [hook["entry"] for hook in hooks] == ["make style", "make lint"]
    for hook in hooks:
        command = [*hook["entry"].split(), "--dry-run"]
        printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        assert "ruff check ." in printed and "lint-imports" in printed


def test_each_command_of_the_guide_is_a_target() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"`make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text()))
    assert named and named <= targets
