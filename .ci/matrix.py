"""Runs the tests with each Python and with the lowest versions that are promised, for the table of docs/know/versions.md.

    python .ci/matrix.py [--only NAME ...] [--at NAME=FOLDER] [--every N] [-- ARGUMENTS OF PYTEST]

Each row of `ROWS` gets a virtual environment of its own in `.venv-matrix`; `--at` takes one that exists, as it is. If the
Python of a row is not on this machine, the table keeps its line. `--every 8` runs every eighth test of all files, and the
table says so. A line of the table is written when its row ends.
"""

import argparse
import dataclasses
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "know" / "versions.md"
SHOWN = ("jax", "torch", "tensordict", "numpy")
HEAD = "| environment | Python | jax | torch | tensordict | NumPy | tests | day |"


@dataclasses.dataclass(frozen=True)
class Row:
    """An environment of the matrix: its Python, and whether its packages are the lowest that are allowed."""

    python: str  # "3.12"
    lowest: bool = False

    @property
    def name(self) -> str:
        return f"lowest-{self.python}" if self.lowest else self.python


ROWS = (Row("3.11"), Row("3.12"), Row("3.13"), Row("3.11", lowest=True))


def lowest() -> list[str]:
    """The needs of `fbuf` and `interop` at their lower bounds, as lines of constraints. jaxlib is as jax."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["interop"]]
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+)", need) for need in needs]
    bounds = {each[1]: each[2] for each in found if each is not None}
    assert len(bounds) == len(set(needs)), f"each need is name>=version: {needs}"
    bounds["jaxlib"] = bounds["jax"]
    return [f"{name}=={bound}{'.0' * (2 - bound.count('.'))}" for name, bound in bounds.items()]


def interpreter(version: str) -> str | None:
    """A Python of this version: a command, one of pyenv's or one of uv's; None where there is none."""
    homes = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    uv = shutil.which("uv")
    asked = [uv, "python", "find", version] if uv else [f"python{version}", "-c", "import sys; print(sys.executable)"]
    if homes:
        return str(homes[-1])
    try:
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def installed(row: Row, folder: Path) -> Path | None:
    """The Python of an environment with the package, its tests and the versions of the row."""
    python = interpreter(row.python)
    if python is None:
        return None
    subprocess.run([python, "-m", "venv", folder], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lowest()))
        file.flush()
        constraints = file.name if row.lowest else ROOT / "constraints.txt"
        command = [
            folder / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--constraint",
            constraints,
        ]
        subprocess.run([*command, "--editable", f"{ROOT}[test]"], check=True)
    return folder / "bin" / "python"


def versions(python: Path) -> list[str]:
    """Of Python and of the packages that the table shows."""
    code = f"import sys, importlib.metadata as m; print(sys.version.split()[0], *map(m.version, {SHOWN}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def tested(python: Path, every: int, arguments: list[str]) -> str:
    """Run the tests, or every n-th of them; the counts of pytest's last line."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "every_nth", *arguments]
    paths = [str(ROOT / ".ci"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"EVERY_NTH": str(every), "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            sys.stdout.write(line)
            lines.append(line)
    return counts("".join(lines))


def counts(output: str) -> str:
    """ "5 passed, 2 failed" of the output of pytest, without what was skipped, deselected or warned of."""
    found = re.findall(r"^(?=.* in [\d.]+s)=*\s*(\d+ \w+.*?) in [\d.]+s", output, re.MULTILINE)
    if not found:
        return "broke off"
    return ", ".join(each for each in found[-1].split(", ") if re.search(r"passed|failed|error", each))


def entered(text: str, row: Row, cells: list[str]) -> str:
    """The page with this line of the table, in the place of the line that the row had."""
    before, head, after = text.partition(HEAD + "\n")
    assert head, f"the page has no table that begins with {HEAD}"
    table, _, rest = after.partition("\n\n")
    rule, *lines = table.rstrip("\n").split("\n")
    kept = {line.split("|")[1].strip(): line for line in lines}
    kept[row.name] = f"| {row.name} | {' | '.join(cells)} |"
    ordered = [kept[each.name] for each in ROWS if each.name in kept]
    return before + head + "\n".join([rule, *ordered]) + "\n" + (f"\n{rest}" if rest else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], default=[row.name for row in ROWS])
    parser.add_argument("--at", action="append", default=[], metavar="NAME=FOLDER", help="an environment that exists")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run each n-th test alone")
    parser.add_argument("arguments", nargs="*", help="of pytest, after --; the quick tests without")
    options = parser.parse_args()
    given = dict(each.split("=", 1) for each in options.at)
    failed = False
    for row in (row for row in ROWS if row.name in options.only):
        ready = Path(given[row.name]) / "bin" / "python" if row.name in given else None
        python = ready or installed(row, ROOT / ".venv-matrix" / row.name)
        if python is None:
            print(f"{row.name}: there is no Python {row.python} here; pyenv or uv installs one", file=sys.stderr)
            continue
        result = tested(python, options.every, options.arguments)
        failed |= re.search(r"failed|error|broke", result) is not None
        part = f" of each {options.every}th test" if options.every > 1 else ""
        cells = [*versions(python), result + part, datetime.date.today().isoformat()]
        PAGE.write_text(entered(PAGE.read_text(), row, cells))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
