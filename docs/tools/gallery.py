"""The gallery: each program of `examples/` with its command, and its curve and time where `make gallery` has measured them.

    python docs/tools/gallery.py [NAME ...]     # run these programs, or all, and store their curves

A curve is what `main()` of a program returns as "curve": lists of x and y by label. The build makes the page of these files.
"""

import ast
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import uses

ROOT = Path(__file__).parents[2]
CURVES = ROOT / "docs" / "learn" / "curves"
PAGE = ROOT / "docs" / "learn" / "gallery.md"
NOT_SHOWN = ("demo",)  # runs two others
CODE = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
result = importlib.import_module(sys.argv[2]).main([])
curves = result.get("curve", {}) if isinstance(result, dict) else {}
json.dump(curves, open(sys.argv[3], "w"))
"""
AXES = {
    "dqn_torch": ("environment steps", "return"),
    "apex": ("episodes", "return"),
    "behaviour_cloning": ("epochs", "error"),
    "grpo": ("rounds", "mean reward"),
}  # of curves; those of the first where there are none


def programs() -> list[Path]:
    return [each for each in sorted((ROOT / "examples").glob("*.py")) if each.stem not in NOT_SHOWN]


def measured_of(program: Path) -> dict[str, Any] | None:
    """The seconds and the curves of a program; None if it was not run."""
    path = CURVES / f"{program.stem}.json"
    return json.loads(path.read_text()) if path.exists() else None


def run(program: Path) -> None:
    """Run a program in a process of its own, as a user does; time it, store and draw its curve."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curve.json"
        subprocess.run([sys.executable, "-c", CODE, str(program.parent), program.stem, str(path)], check=True, cwd=ROOT)
        curves = json.loads(path.read_text())
    CURVES.mkdir(exist_ok=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    measured = {"seconds": round(seconds), "curves": curves}
    (CURVES / f"{program.stem}.json").write_text(json.dumps(measured) + "\n")
    if curves:
        draw(program, curves)


def draw(program: Path, curves: dict[str, tuple[list[float], list[float]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for label, (x, y) in curves.items():
        axes.plot(x, y, label=label, linewidth=1.2)
    axes.set(
        title=program.stem, **dict(zip(("xlabel", "ylabel"), AXES.get(program.stem, AXES["dqn_torch"]), strict=True))
    )
    axes.legend(fontsize="small")
    figure.savefig(CURVES / f"{program.stem}.png", dpi=100)


def page() -> str:
    lines = ["# Gallery", "", "Whole programs, one file each. `make gallery` runs them and draws their curves.", ""]
    for program in programs():
        documented = ast.get_docstring(ast.parse(program.read_text())) or ""
        first = documented.partition("\n\n")[0].replace("\n", " ")
        lines += [f"## {program.name}", "", first, "", "```sh", f"python examples/{program.name}", "```", ""]
        if (measured := measured_of(program)) is not None:
            lines += [f"{measured['seconds']:,} s of processor time.", ""]
            lines += (
                [f"![The learning curve of {program.name}](curves/{program.stem}.png)", ""]
                if measured["curves"]
                else []
            )
        lines += [f"[The program](../../examples/{program.name})", ""]
    return "\n".join(lines)


def write() -> None:
    """Write the page, if its text has changed."""
    uses.write_changed(PAGE, page())


if __name__ == "__main__":
    for program in [ROOT / "examples" / f"{name}.py" for name in sys.argv[1:]] or programs():
        run(program)
