"""The gallery: each program of `examples/` with its command, and its curve and time where `make gallery` has measured them.

    python docs/tools/gallery.py [NAME ...]     # run these programs, or all, and store and draw their curves
    python docs/tools/gallery.py --draw         # draw all stored curves again; runs nothing

A curve is what `main()` of a program returns as "curve": lists of x and y by label. A program that says that it has
not learned ("passed" or "solved" is False) changes nothing here. The build makes the page of these files.
"""

import argparse
import ast
import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
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
result = importlib.import_module(sys.argv[1]).main([])
if False in (result.get("passed"), result.get("solved")):
    sys.exit(f"{sys.argv[1]} has not learned what it should")
json.dump(result["curve"], open(sys.argv[2], "w"))
"""

Curves = dict[str, tuple[list[float], list[float]]]  # x and y by label


@dataclasses.dataclass(frozen=True)
class Axes:
    """What a plot shows, in words, and the value that the program has to reach, where it is one of the curve's."""

    title: str
    x: str
    y: str
    mark: float | None = None
    scale: str = "linear"  # of x


STEPS, RETURN = "steps of the environments", "return of an episode"
AXES = {
    "apex": Axes("Ape-X on CartPole: three actors, two shards", "episodes", "return, average of 100", 195),
    "behaviour_cloning": Axes("Behaviour cloning of a pendulum from pictures", "epochs", "squared error of the torque"),
    "dqn_jax": Axes("DQN on CartPole, all of it inside jit", STEPS, "return, average of 100", 195),
    "dqn_torch": Axes("DQN on CartPole, from torch", STEPS, "return, average of 100", 195),
    "grpo": Axes("GRPO with a tiny language model", "rounds", "reward of a completion (1 at most)"),
    "her": Axes("Goals on a frozen lake, with hindsight and without", STEPS, "share of goals that are found"),
    "offline": Axes("Offline RL on Pendulum, from mostly bad episodes", "updates", RETURN),
    "r2d2": Axes("A GRU on a Pendulum that shows no velocity", STEPS, RETURN, -600),
    "rainbow": Axes("Rainbow on a CartPole that shows no velocity", STEPS, RETURN, 300),
    "tic_tac_toe": Axes(
        "Tree search against a random player", "simulations before the games", "share of the games", scale="log"
    ),
    "two_doors": Axes("One buffer, two libraries, on CartPole", STEPS, "return, average of 100", 195),
}


def programs() -> list[Path]:
    return [each for each in sorted((ROOT / "examples").glob("*.py")) if each.stem not in NOT_SHOWN]


def measured_of(program: Path) -> dict[str, Any] | None:
    """The times and the curves of a program; None if it was not run."""
    path = CURVES / f"{program.stem}.json"
    return json.loads(path.read_text()) if path.exists() else None


def run(program: Path) -> None:
    """Run a program in a process of its own, as a user does; time it, and store its curves with three digits."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curve.json"
        paths = [str(program.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}  # which processes of Ray inherit
        command = [sys.executable, "-c", CODE, program.stem, str(path)]
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        curves: Curves = json.loads(path.read_text())
    after, waited = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begin
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rounded = {
        label: [[float(f"{v:.4g}") if at else v for v in line] for at, line in enumerate(curve)]
        for label, curve in curves.items()
    }
    CURVES.mkdir(exist_ok=True)
    measured = {"seconds": round(seconds), "waited": round(waited), "curves": rounded}
    (CURVES / f"{program.stem}.json").write_text(json.dumps(measured) + "\n")


def draw(program: Path, curves: Curves) -> None:
    """An image for white and for dark pages, the same bytes for the same curves."""
    sys.path.append(str(ROOT / "benchmarks"))
    import plots
    from matplotlib import pyplot, rc_context
    from matplotlib.ticker import MaxNLocator

    shown = AXES[program.stem]
    with rc_context(plots.STYLE):
        figure, axes = pyplot.subplots(figsize=(6.8, 3.2), layout="constrained")
        for place, (label, (x, y)) in enumerate(curves.items()):
            colour = plots.CURVE_COLOURS[place % len(plots.CURVE_COLOURS)]
            axes.plot(x, y, label=label, color=colour, linewidth=1.4, marker="o" if len(x) < 40 else None, markersize=3)
        if shown.mark is not None:
            axes.axhline(
                shown.mark, color=plots.GREY, linewidth=1, linestyle=":", label=f"to be reached: {shown.mark:g}"
            )
        axes.set(title=shown.title, xlabel=shown.x, ylabel=shown.y, xscale=shown.scale)
        if shown.scale == "linear":
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        figure.legend(loc="outside right upper")
        figure.savefig(CURVES / f"{program.stem}.svg", metadata={"Date": None})
        pyplot.close(figure)


def page() -> str:
    lines = [
        "# Gallery",
        "",
        "Whole programs, one file each, with what they learn. `make gallery` runs them and draws the curves;",
        "times are of two cores of a machine that others used too, without those of Ray's processes. Each program fails",
        "where it has not learned.",
        "",
    ]
    for program in programs():
        documented = ast.get_docstring(ast.parse(program.read_text())) or ""
        first = documented.partition("\n\n")[0].replace("\n", " ")
        lines += [f"## {program.name}", "", first, "", "```sh", f"python examples/{program.name}", "```", ""]
        if (measured := measured_of(program)) is not None:
            lines += [
                f"{measured['seconds']:,} s of processor time, {measured['waited']:,} s until it had ended.",
                "",
                f"![{AXES[program.stem].title}: {AXES[program.stem].y}](curves/{program.stem}.svg)",
                "",
            ]
        lines += [f"[The program](../../examples/{program.name})", ""]
    return "\n".join(lines)


def write() -> None:
    """Write the page, if its text has changed."""
    uses.write_changed(PAGE, page())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="programs of examples/, without .py; all without a name"
    )
    parser.add_argument("--draw", action="store_true", help="draw stored curves; run nothing")
    options = parser.parse_args()
    known = {program.stem: program for program in programs()}
    if unknown := sorted(set(options.names) - known.keys()):
        parser.error(f"no example is named {unknown[0]}; there are {', '.join(known)}")
    for program in [known[name] for name in options.names or known]:
        if not options.draw:
            run(program)
        if (measured := measured_of(program)) is not None:
            draw(program, measured["curves"])


if __name__ == "__main__":
    main()
