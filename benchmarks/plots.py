"""The plots of the README, from a file of results.

    python benchmarks/plots.py RESULTS.json [--folder docs/plots]

Equal results give equal files, byte for byte. Colours are chosen to be told apart, also by those who see few, on white
and on dark pages; a transparent page shows through.
"""

import argparse
import pathlib
import re
import sys
from typing import Any

import matplotlib
import measure
import records
import targets

matplotlib.use("svg")

from matplotlib import patheffects, pyplot
from matplotlib.axes import Axes

GREY = "#7f8790"  # readable on white and on black
COLOURS = {
    measure.OURS: "#d1495b",
    "torchrl": "#3c8dbc",
    "cpprb": "#5aa469",
    "flashbax": "#9467bd",
    "plain torch": "#e09f3e",
    "NumPy": GREY,
}
STYLE = {
    "svg.hashsalt": "fbuf",  # else names of paths are drawn by chance
    "svg.fonttype": "path",  # as drawn here, whatever fonts the reader has
    "font.size": 9,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.transparent": True,
}


def ratios(results: dict[str, Any]) -> Any:
    """A bar for each target with a rival: how many times faster, on a logarithmic axis, and a mark for what is wanted."""
    bars = []
    for target in targets.TARGETS:
        reached = target.reached(results)
        if target.rivals and target.estimate is None and reached is not None:
            spread = records.lines(results)[target.script, target.name].get("ratio_spread", {}).get(reached[1])
            bars.append((target, reached[0], reached[1], spread or [reached[0], reached[0]]))
    if not bars:
        return None
    figure, axes = pyplot.subplots(figsize=(8, 0.9 + 0.21 * len(bars)), layout="constrained")
    places = range(len(bars))[::-1]
    widths = [number for _, number, _, _ in bars]
    axes.barh(places, [w - 1 for w in widths], left=1, height=0.7, color=[_colour(rival) for _, _, rival, _ in bars])
    error = [[max(0.0, w - low) for w, (*_, (low, _)) in zip(widths, bars, strict=True)]]
    error += [[max(0.0, high - w) for w, (*_, (_, high)) in zip(widths, bars, strict=True)]]
    axes.errorbar(widths, places, xerr=error, fmt="none", ecolor=GREY, elinewidth=1)
    seen_on_any = [patheffects.withStroke(linewidth=4, foreground="white")]
    wanted = [target.bound for target, *_ in bars]
    axes.plot(wanted, places, "|", color="#202428", markersize=9, markeredgewidth=2, path_effects=seen_on_any)
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(places, [f"{target.script}: {target.name}" for target, *_ in bars])
    axes.set_ylim(-0.7, len(bars) - 0.3)
    _plain_ticks(axes, "x", (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500))
    axes.set_xlabel("times as fast as the rival; | what is wanted")
    seen = list(dict.fromkeys(rival for _, _, rival, _ in bars))
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_colour(rival)) for rival in seen]
    axes.legend(handles, seen, loc="upper right")
    return figure


def growth(results: dict[str, Any]) -> Any:
    """Time of one draw over the number of items, from every script that says "..., N items"."""
    curves: dict[str, dict[int, float]] = {}
    for (script, name), timing in records.lines(results).items():
        if (found := re.fullmatch(r"(.*), (\d+) items", name)) and measure.OURS in timing["us"]:
            label = f"GPU: {found[1]}" if script == "gpu" else found[1]
            curves.setdefault(label, {})[int(found[2])] = timing["us"][measure.OURS]
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    if not curves:
        return None
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    for name, points in curves.items():
        items = sorted(points)
        start = points[items[0]]
        axes.plot(
            items, [points[n] / start for n in items], "o-", markersize=4, label=f"{name}: {start:.0f} us at first"
        )
    axes.axhline(3, color=GREY, linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("items in the buffer")
    axes.set_ylabel("times the smallest; -- at most")
    axes.legend(fontsize=8)
    return figure


def throughput(results: dict[str, Any]) -> Any:
    """Rows a second over the batch size, a panel for each question of `batch_sizes.py`."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for (script, name), timing in records.lines(results).items():
        found = re.fullmatch(r"(.*), batch (\d+)", name)
        if script == "batch_sizes" and found:
            for contender, us in timing["us"].items():
                rows = int(found[2]) / us
                panels.setdefault(found[1], {}).setdefault(contender, {})[int(found[2])] = rows
    if not panels:
        return None
    figure, every = pyplot.subplots(1, len(panels), figsize=(8, 3.4), layout="constrained", squeeze=False, sharey=True)
    for axes, (question, curves) in zip(every[0], panels.items(), strict=True):
        for contender, points in curves.items():
            style = {"linewidth": 2.2, "zorder": 3} if contender == measure.OURS else {"linewidth": 1.2}
            batches = sorted(points)
            axes.plot(
                batches,
                [points[batch] for batch in batches],
                "o-",
                markersize=3,
                color=_colour(contender),
                label=contender,
                **style,
            )
        axes.set_xscale("log", base=4)
        axes.set_yscale("log")
        axes.set_title(question, fontsize=9, color=GREY)
        axes.set_xlabel("batch size")
        axes.legend(fontsize=8)
        axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_short))
    every[0][0].set_ylabel("million rows a second")
    return figure


def _colour(contender: str) -> str:
    return COLOURS.get(contender, "#17becf")


def _short(count: float, _place: Any) -> str:
    return f"{count:.0f}" if count < 1_000 else f"{count / 1_000:.0f}k"


def _plain_ticks(axes: Axes, which: str, at: tuple[float, ...]) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_locator(matplotlib.ticker.FixedLocator([tick for tick in at if low <= tick <= high]))
    axis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda tick, _place: f"{tick:g}"))


PLOTS = {"ratios": ratios, "growth": growth, "throughput": throughput}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The plots of the README, from a file of results")
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, default=measure.ROOT / "docs" / "plots")
    options = parser.parse_args(given)
    try:
        results = records.read(options.results)
    except records.RecordError as error:
        print(error, file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    drawn = 0
    with matplotlib.rc_context(STYLE):
        for name, draw in PLOTS.items():
            figure = draw(results)
            if figure is None:
                print(f"{name}: {options.results} has no such lines; the plot stays as it was")
                continue
            figure.savefig(options.folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)
            print(options.folder / f"{name}.svg")
            drawn += 1
    return 0 if drawn else 2


if __name__ == "__main__":
    sys.exit(main())
