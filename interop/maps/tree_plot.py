"""Plots of trees, with plotly or matplotlib."""

import math
import os
from collections.abc import Sequence
from typing import Any

from interop.data.arguments import required

Path = tuple[int, ...]  # the numbers of the children on the way from the root
_FIGURES = ("tree", "box")
_COLOR, _LINE = "#4C72B0", "#999999"
_LONGEST = 60  # characters of a label


def plot(paths: Sequence[Path], labels: Sequence[str], backend: str, figure: str, file: str | None) -> Any:
    """Plot a tree, given as the paths to its vertices.

    Args:
        paths: breadth first; a shared vertex has several.
        labels: of the vertices.
        backend: "plotly" returns a `plotly.graph_objects.Figure`, "matplotlib" a `matplotlib.figure.Figure`.
        figure: "tree" draws vertices and edges, "box" nested boxes, as wide as their number of leaves.
        file: an output file: ".html" for plotly, an image for matplotlib. Images of plotly need Chrome.

    Raises:
        NotImplementedError: another backend or figure.
        ImportError: the backend is not installed.
    """
    if backend not in _BACKENDS or figure not in _FIGURES:
        raise NotImplementedError(
            f"Unknown plotting backend {backend} with figure {figure}: use {' or '.join(_BACKENDS)}, with "
            f"{' or '.join(_FIGURES)}"
        )
    return _BACKENDS[backend](list(paths), list(labels), figure, file)


def layout(paths: Sequence[Path]) -> tuple[list[float], list[int]]:
    """The left edge of each path's box, in leaves, and its number of leaves. Parents precede children."""
    numbers = {path: number for number, path in enumerate(paths)}
    widths = [0] * len(paths)
    for number in reversed(range(len(paths))):
        widths[number] = widths[number] or 1
        if paths[number]:
            widths[numbers[paths[number][:-1]]] += widths[number]
    lefts, free = [0.0] * len(paths), [0.0] * len(paths)
    for number, path in enumerate(paths):
        if path:
            above = numbers[path[:-1]]
            lefts[number] = free[above]
            free[above] += widths[number]
        free[number] = lefts[number]
    return lefts, widths


def _plotly(paths: list[Path], labels: list[str], figure: str, path: str | None) -> Any:
    go = required("plotly.graph_objects", "plot")
    texts = [label.replace("\n", "<br>") for label in labels]
    names = [str(each) for each in paths]
    if figure == "box":
        above = [str(each[:-1]) if each else "" for each in paths]
        _, widths = layout(paths)
        trace = go.Treemap(ids=names, labels=names, parents=above, text=texts, values=widths, branchvalues="total")
        made = go.Figure(trace)
    else:
        centers, heights, xs, ys = _placed(paths)
        made = go.Figure(go.Scatter(x=xs, y=ys, mode="lines", line={"color": _LINE}, hoverinfo="skip"))
        made.add_scatter(
            x=centers, y=heights, mode="markers+text", text=names, textposition="top center",
            hovertext=texts, hoverinfo="text", marker={"size": 14, "color": _COLOR},
        )  # fmt: skip
        made.update_layout(showlegend=False, plot_bgcolor="white", xaxis_visible=False, yaxis_visible=False)
    if path is not None:
        is_page = os.fspath(path).endswith(".html")
        made.write_html(path) if is_page else made.write_image(path)
    return made


def _matplotlib(paths: list[Path], labels: list[str], figure: str, path: str | None) -> Any:
    figures, patches = required("matplotlib.figure", "plot"), required("matplotlib.patches", "plot")
    lefts, widths = layout(paths)
    depth = 1 + max(map(len, paths))
    made = figures.Figure(figsize=(max(4, min(40, 1.5 * widths[0])), max(3, min(40, 1.3 * depth))), layout="tight")
    axes = made.add_subplot()
    centers, heights, xs, ys = _placed(paths)
    if figure == "tree":
        axes.plot(xs, ys, color=_LINE, zorder=1)
    frame = {"boxstyle": "round", "facecolor": "white", "edgecolor": _COLOR} if figure == "tree" else None
    for center, height, left, width, label in zip(centers, heights, lefts, widths, labels, strict=True):
        if figure == "box":
            axes.add_patch(patches.Rectangle((left, height - 0.5), width, 1, facecolor="white", edgecolor=_COLOR))
        axes.text(center, height, label[:_LONGEST], ha="center", va="center", fontsize=7, bbox=frame, clip_on=True)
    axes.set(xlim=(0, widths[0]), ylim=(0.5 - depth, 0.5))
    axes.set_axis_off()
    if path is not None:
        made.savefig(path)
    return made


def _placed(paths: list[Path]) -> tuple[list[float], list[int], list[float], list[float]]:
    """The horizontal center and the height of each path, and the edges as one line with NaN gaps."""
    numbers = {path: number for number, path in enumerate(paths)}
    centers = [left + width / 2 for left, width in zip(*layout(paths), strict=True)]
    heights, xs, ys = [-len(path) for path in paths], list[float](), list[float]()
    for number, path in enumerate(paths):
        if path:
            above = numbers[path[:-1]]
            xs += centers[above], centers[number], math.nan
            ys += heights[above], heights[number], math.nan
    return centers, heights, xs, ys


_BACKENDS = {"plotly": _plotly, "matplotlib": _matplotlib}
