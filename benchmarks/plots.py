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
from matplotlib.lines import Line2D

GREY = "#727a84"  # as readable on white as on black: a contrast above 4 on both
WANTED = "#d1495b"  # of the ticks for what is wanted, which no rival has
COLOURS = {
    measure.OURS: "#d1495b",
    "torchrl": "#3c8dbc",
    "cpprb": "#5aa469",
    "flashbax": "#9467bd",
    "plain torch": "#e09f3e",
    "NumPy": GREY,
    "plain": "#2bb3a3",
    "ray.get": "#c77fb0",
    "list": "#a0783c",
    "Pillow": "#6c8f2f",
}  # one for each contender
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
    "legend.fontsize": 9,
    "savefig.transparent": True,
}

# What each script measures, in the words of the docs, and its lines. A line that is not listed says it by its own name.
WORKS: dict[str, tuple[str, dict[str, str]]] = {
    "torch_uniform": (
        "From torch, uniform",
        {
            "LazyTensorStorage, extend 256": "write 256 rows to memory",
            "LazyTensorStorage, sample 256": "draw 256 rows from memory",
            "LazyTensorStorage, add": "write one row to memory",
            "LazyMemmapStorage, extend 256": "write 256 rows to a memory map",
            "LazyMemmapStorage, sample 256": "draw 256 rows from a memory map",
        },
    ),
    "torch_prioritized": (
        "From torch, by priority",
        {
            "extend, batch 256": "write 256 rows",
            "sample, batch 256": "draw 256 rows",
            "update, batch 256": "update 256 priorities",
            "extend + sample + update, batch 256": "write, draw and update 256 rows",
            "extend + sample + update, batch 65536": "write, draw and update 65,536 rows",
        },
    ),
    "torch_images": (
        "From torch, images of 4 x 84 x 84",
        {"sample 256 images": "draw 256 images", "extend 256 images": "write 256 images"},
    ),
    "torch_slices": (
        "From torch, slices of trajectories",
        {
            "slices by traj_key": "draw slices by ids",
            "slices by end_key": "draw slices by ends",
            "extend 200 + slices by traj_key": "write 200 rows and draw slices by ids",
            "extend 200 + slices by end_key": "write 200 rows and draw slices by ends",
            "slices by traj_key, cached": "draw slices by ids, rival with its cache",
            "slices by end_key, cached": "draw slices by ends, rival with its cache",
            "prioritized slices": "draw slices by priority",
        },
    ),
    "torch_family": (
        "From torch, other buffers",
        {
            "sample without replacement": "draw each row once an epoch",
            "sample of an ensemble of four": "draw from four buffers",
            "sample of a list of tensors": "draw from a list of tensors",
            "sample of a list of tensordicts": "draw from a list of tensordicts",
            "extend of the highest-ranked": "write, and keep the highest-ranked",
        },
    ),
    "torch_datasets": (
        "Datasets",
        {
            "conversion": "convert a Minari dataset",
            "sample 256": "draw 256 rows of a dataset",
            "2020 JPEG images, episodes read as rows": "read 2,020 JPEG images",
        },
    ),
    "remote": ("Through Ray", {"sample 256 rows of 28 KB, one shard": "draw 256 rows of 28 KB, one shard"}),
    "jit_cycle": (
        "Inside jit, single items",
        {
            f"{line}, 32 floats{form} [default]": work + place
            for line, work in (
                ("prioritized sample + update", "by priority: draw and update"),
                ("prioritized add 256 + sample + update", "by priority: write 256, draw and update"),
                ("add 1 + sample", "uniform: write one row and draw"),
                ("add 256 + sample", "uniform: write 256 rows and draw"),
            )
            for form, place in (("", ""), (", scan", ", in a scan"))
        },
    ),
    "jit_slices": (
        "Inside jit, slices",
        {
            f"add 4 + slices, {starts}{form}": f"write 4 rows and draw slices, {work}{place}"
            for starts, work in (
                ("uniform", "uniform"), ("per trajectory", "per trajectory"), ("prioritized", "by priority"),
            )
            for form, place in (("", ""), (", scan", ", in a scan"))
        },
    ),
    "multi_step": ("n-step returns", {"MultiStepTransform, n = 3": "returns of 3 steps of a rollout"}),
    "cat_frames": ("Frame stacks", {"pixels": "stack observations", "pixels and next pixels": "and next observations"}),
    "ted": ("Formats", {"1000000 rows: TED2Flat and Flat2TED": "TED data to flat rows and back, 1,000,000 rows"}),
    "checkpoints": ("Checkpoints", {"dumps + loads": "save and load 1,000,000 rows"}),
    "specs": (
        "Specs of eight leaves",
        {"construct": "build", "rand": "draw values", "zero": "make zeros", "is_in": "check values", "index": "take a part"},
    ),
    "language": ("Language data, the next batch", {}),
    "maps": (
        "Maps",
        {
            "map, read 4096": "read 4,096 keys",
            "map, write 4096": "write 4,096 keys",
            "forest, both for 1000 steps": "fill a forest with 1,000 steps, and build its tree",
        },
    ),
    "text": ("Text", {"extend, texts": "write texts", "extend, as tensordicts": "write texts as tensordicts"}),
    "gpu": (
        "On a GPU",
        {"cycle, 1000000 rows of 128 bytes, batch 65536": "by priority: write, draw and update 65,536 rows"},
    ),
}  # fmt: skip

# The curves of `growth`, as the scripts name them. The others keep their names.
CURVES = {
    "sample 256": "inside jit: draw 256",
    "sample 256, 100 in a scan": "inside jit: draw 256, 100 times in a scan",
    "update 256": "inside jit: update 256 priorities",
    "torch: sample 256": "from torch: draw 256",
    "torch: update 256 and sample": "from torch: update 256 priorities, draw 256",
    "torch: sample 256 evenly": "from torch: draw 256, uniform",
}
CURVE_COLOURS = ("#3c8dbc", "#d1495b", "#9467bd", "#e09f3e", "#5aa469", "#2bb3a3", "#c77fb0", "#a0783c")


def work(script: str, name: str) -> str:
    """What a line measures, in words."""
    return WORKS[script][1].get(name, name)


def ratios(results: dict[str, Any]) -> Any:
    """A bar for each target with a rival: how many times faster, on a logarithmic axis, and a tick for what is wanted."""
    rows: list[tuple[targets.Target, float, str, list[float]] | str] = []  # a bar, or the heading above bars
    for target in targets.TARGETS:
        reached = target.reached(results)
        if target.rivals and target.estimate is None and reached is not None:
            heading = WORKS[target.script][0]
            if heading not in rows:
                rows.append(heading)
            spread = records.lines(results)[target.script, target.name].get("ratio_spread", {}).get(reached[1])
            rows.append((target, reached[0], reached[1], spread or [reached[0], reached[0]]))
    if not rows:
        return None
    figure, axes = pyplot.subplots(figsize=(8, 1.6 + 0.2 * len(rows)), layout="constrained")
    places = [len(rows) - 1 - place for place in range(len(rows))]
    bars = [(place, *row) for place, row in zip(places, rows, strict=True) if not isinstance(row, str)]
    at = [place for place, *_ in bars]
    widths = [number for _, _, number, _, _ in bars]
    axes.barh(at, [w - 1 for w in widths], left=1, height=0.7, color=[COLOURS[rival] for _, _, _, rival, _ in bars])
    error = [[max(0.0, w - low) for w, (*_, (low, _)) in zip(widths, bars, strict=True)]]
    error += [[max(0.0, high - w) for w, (*_, (_, high)) in zip(widths, bars, strict=True)]]
    axes.errorbar(widths, at, xerr=error, fmt="none", ecolor=GREY, elinewidth=1)
    seen_on_any = [patheffects.withStroke(linewidth=4, foreground="white")]
    wanted = [target.bound for _, target, *_ in bars]
    tick = {"color": WANTED, "marker": "|", "markersize": 10, "markeredgewidth": 2.5, "path_effects": seen_on_any}
    axes.plot(wanted, at, linestyle="none", **tick)
    axes.axvline(1, color=GREY, linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(places, [row if isinstance(row, str) else work(row[0].script, row[0].name) for row in rows])
    axes.tick_params(axis="y", length=0)
    for row, label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if isinstance(row, str) else "normal")
    for place, number in zip(at, widths, strict=True):
        axes.text(1.01, place, _digits(number), transform=axes.get_yaxis_transform(), va="center")
    axes.set_ylim(-0.7, len(rows) - 0.3)
    _plain_ticks(axes, "x", (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500))
    axes.set_xlabel("time of the rival / time of this library")
    figure.suptitle(f"How many times as fast as each rival\n{_measured(results)}", color=GREY)
    seen = list(dict.fromkeys(rival for _, _, _, rival, _ in bars))
    handles: list[Any] = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[rival]) for rival in seen]
    handles += [Line2D([], [], linestyle="none", **tick), Line2D([], [], color=GREY, linewidth=1)]
    names = [*(f"against {rival}" for rival in seen), "what is wanted", "quartiles of the rounds"]
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 5))
    return figure


def growth(results: dict[str, Any]) -> Any:
    """Time of one draw over the number of items, from every script that says "..., N items"."""
    curves: dict[str, dict[int, float]] = {}
    for (script, name), timing in records.lines(results).items():
        if (found := re.fullmatch(r"(.*), (\d+) items", name)) and measure.OURS in timing["us"]:
            label = f"GPU: {found[1]}" if script == "gpu" else CURVES.get(found[1], found[1])
            curves.setdefault(label, {})[int(found[2])] = timing["us"][measure.OURS]
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    if not curves:
        return None
    figure, axes = pyplot.subplots(figsize=(8, 3.4), layout="constrained")
    grown = {name: points[max(points)] / points[min(points)] for name, points in curves.items()}
    for place, name in enumerate(sorted(curves, key=grown.__getitem__, reverse=True)):  # the legend in their order
        points = curves[name]
        items = sorted(points)
        first, last = points[items[0]], points[items[-1]]
        axes.plot(
            items,
            [points[n] / first for n in items],
            "o--" if name.startswith("from torch") else "o-",
            color=CURVE_COLOURS[place % len(CURVE_COLOURS)],
            markersize=4,
            label=f"{name}\n{first:,.0f} to {last:,.0f} \N{MICRO SIGN}s",
        )
    axes.axhline(3, color=GREY, linewidth=1, linestyle=":", label="what is wanted of a draw: at most 3")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("items in the buffer")
    axes.set_ylabel("time / time with the fewest items")
    axes.set_title(f"How the time of a call grows\n{_measured(results)}", color=GREY)
    figure.legend(loc="outside right center", labelspacing=0.7, handlelength=3)
    return figure


# The panels of `throughput`, as the script names them.
PANELS = {"uniform extend + sample": "uniform: write, draw", "prioritized cycle": "by priority: write, draw, update"}


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
    figure, every = pyplot.subplots(1, len(panels), figsize=(8, 3.8), layout="constrained", squeeze=False, sharey=True)
    for axes, (question, curves) in zip(every[0], panels.items(), strict=True):
        for contender, points in curves.items():
            style = {"linewidth": 2.2, "zorder": 3} if contender == measure.OURS else {"linewidth": 1.2}
            batches = sorted(points)
            axes.plot(
                batches,
                [points[batch] for batch in batches],
                "o-",
                markersize=3,
                color=COLOURS[contender],
                label=contender,
                **style,
            )
        axes.set_xscale("log", base=4)
        axes.set_yscale("log")
        axes.set_title(PANELS.get(question, question), fontsize=9, color=GREY)
        axes.set_xlabel("rows in a batch")
        axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_short))
        axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda rows, _place: f"{rows:g}"))
    every[0][0].set_ylabel("million rows a second")
    figure.suptitle(f"Rows a second by batch size, from torch\n{_measured(results)}", color=GREY)
    lines = {line.get_label(): line for axes in every[0] for line in axes.get_lines()}
    names = [name for name in COLOURS if name in lines]
    shown = ["interop" if name == measure.OURS else name for name in names]
    figure.legend([lines[name] for name in names], shown, loc="outside lower center", ncols=len(names))
    return figure


def _measured(results: dict[str, Any]) -> str:
    """Where and when, of the first script."""
    about = next(iter(results["scripts"].values()))["about"]
    return f"{about['machine']}, {about['time'][:10]}"


def _digits(ratio: float) -> str:
    """Two digits: 0.63, 4.6, 26."""
    return f"{ratio:.2f}" if ratio < 0.995 else f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


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
