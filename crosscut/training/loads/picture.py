"""Picture of the experts' loads over the steps of a run (`experts.png`): the largest load and the entropy of each layer
as curves, and a map of the loads of all experts of a layer.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosscut.logbook.contents import read_loads
from crosscut.logbook.schema import LOADS_PLOT_FILE
from crosscut.training.loads.step_loads import layer_of
from crosscut.training.watching.figures import GREY, INK, frame, write_figure

_MOST_MAPS = 12
"""Maximum number of layers that have a map: first layers with an expert without tokens, then layers at equal distances.
"""
_MOST_COLUMNS, _MOST_POINTS = 120, 60
"""Maximum number of columns of a map, and of points of a curve. Each is the sum of several rows of the record."""
_FACTOR = 4.0
"""Load as a multiple of the mean load at which the colours of a map end, and the inverse of the other end."""
_IDLE = "#f2c300"
"""Colour of an expert without tokens."""
_STEPS = "{x:,.0f}"

Numbers = NDArray[np.float64]


def plot_loads(folder: Path) -> None:
    """Plot the rows of a run's `experts.jsonl` to `experts.png`. Without rows, there is no picture. Raises `OSError` if
    a file cannot be read or written.
    """
    rows = read_loads(folder)
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(rows[0]["loads"])
    steps = [int(row["step"]) for row in rows]
    loads = np.array([[row["loads"][name] for name in names] for row in rows], dtype=np.float64)
    entropies = np.array([[row["entropy"][name] for name in names] for row in rows])
    shown = _shown(loads)
    across = len(shown) if len(shown) < 4 else math.ceil(len(shown) / math.ceil(len(shown) / 4))
    down = math.ceil(len(shown) / across)
    figure: Any = pyplot.figure(figsize=(10, 2.9 + 2.1 * down), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[2.9, 2.1 * down])
    _draw_curves(above, steps, loads, entropies, names)
    _draw_maps(below, steps, loads[:, shown], [names[i] for i in shown], (down, across))
    write_figure(figure, folder / LOADS_PLOT_FILE)


def _shown(loads: Numbers) -> list[int]:
    """Return the layers of `loads` [R, L, E] that have a map."""
    columns = _columns(range(len(loads)), loads, _MOST_COLUMNS)[1]
    idle = (columns == 0).any((0, 2)).nonzero()[0].tolist()
    spread = [round(i) for i in np.linspace(0, loads.shape[1] - 1, min(loads.shape[1], _MOST_MAPS))]
    return sorted([*dict.fromkeys([*idle, *spread])][:_MOST_MAPS])


def _ratios(loads: Numbers) -> Numbers:
    """Return the loads [..., E] as multiples of the mean load of a layer."""
    ratios: Numbers = loads / np.maximum(loads.mean(-1, keepdims=True), 1e-9)
    return ratios


def _draw_curves(figure: Any, steps: Sequence[int], loads: Numbers, entropies: Numbers, names: Sequence[str]) -> None:
    """Draw the largest of the loads [R, L, E], as a multiple of the mean, and the entropy [R, L], as a share of its
    maximum, of each layer. Later layers are darker.
    """
    from matplotlib import colormaps

    edges, sums = _columns(steps, loads, _MOST_POINTS)
    largest = _ratios(sums).max(2)
    weights = loads.mean(2)  # in proportion to the number of tokens
    shares = _columns(steps, entropies * weights, _MOST_POINTS)[1] / sums.mean(2) / math.log(max(loads.shape[2], 2))
    left, right = figure.subplots(1, 2)
    most = math.ceil(len(steps) / min(len(steps), _MOST_POINTS))
    colours = colormaps["viridis_r"](np.linspace(0.12, 0.95, len(names)))
    for layer, (name, colour) in enumerate(zip(names, colours, strict=True)):
        is_named = len(names) <= 6 or layer in (0, len(names) - 1)
        left.plot(edges[1:], largest[:, layer], color=colour, linewidth=1.4, label=layer_of(name) if is_named else "")
        right.plot(edges[1:], shares[:, layer], color=colour, linewidth=1.4)
    left.set_ylabel("load / mean load", fontsize=8.5, color=INK)
    right.set_ylabel("entropy / ln(number of experts)", fontsize=8.5, color=INK)
    left.set_title("largest load of an expert, as a multiple of the mean", fontsize=9.5, color=INK, loc="left")
    right.set_title("entropy of the router, as a share of its maximum", fontsize=9.5, color=INK, loc="left")
    left.set_ylim(0.95, 1 + 1.2 * max(float(largest.max()) - 1, 0.1))  # with room for the legend
    right.set_ylim(min(0.9, float(shares.min()) - 0.02), 1.02)
    for axes in (left, right):
        axes.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        axes.set_xlabel(f"training step; each point is over up to {most} recorded steps", fontsize=8.5, color=INK)
        axes.xaxis.set_major_formatter(_STEPS)
        axes.tick_params(labelsize=8, colors=INK)
        frame(axes)
    left.legend(frameon=False, fontsize=8, loc="upper left", ncols=6, handlelength=1.2, columnspacing=1.2)


def _draw_maps(figure: Any, steps: Sequence[int], loads: Numbers, names: Sequence[str], grid: tuple[int, int]) -> None:
    """Draw a map of the loads [R, L, E] for each layer: experts from top to bottom, steps from left to right."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    edges, sums = _columns(steps, loads, _MOST_COLUMNS)
    colours = colormaps["RdBu_r"].with_extremes(bad=_IDLE)
    every = figure.subplots(*grid, squeeze=False, sharex=True, sharey=True).flatten()
    experts = loads.shape[2]
    for axes, name, ratios in zip(every, names, np.moveaxis(_ratios(sums), 1, 0), strict=False):
        drawn = axes.pcolormesh(
            edges, np.arange(experts + 1) - 0.5, np.ma.masked_equal(ratios.T, 0.0), cmap=colours,
            norm=LogNorm(1 / _FACTOR, _FACTOR), rasterized=True,
        )  # fmt: skip
        axes.set_title(layer_of(name), fontsize=9, color=INK, loc="left", pad=3)
        axes.tick_params(labelsize=8, colors=INK)
        axes.spines[:].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, prune="upper"))
        axes.xaxis.set_major_formatter(_STEPS)
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    every[0].invert_yaxis()  # shared by all maps
    for axes in every[len(names) :]:
        axes.set_visible(False)
    figure.supylabel("expert", fontsize=8.5, color=INK)
    figure.supxlabel("training step", fontsize=8.5, color=INK)
    ticks = [1 / _FACTOR, 1 / 2, 1, 2, _FACTOR]
    bar = figure.colorbar(drawn, ax=every.tolist(), ticks=ticks, fraction=0.025, pad=0.01, extend="both")
    bar.set_ticklabels(["¼", "½", "1", "2", "4"], fontsize=8)
    bar.ax.minorticks_off()
    bar.set_label("load / mean load", fontsize=8.5, color=INK)
    bar.outline.set_visible(False)
    if (sums == 0).any():
        figure.legend(handles=[Patch(color=_IDLE, label="no token")], loc="lower right", frameon=False, fontsize=8)


def _columns(steps: Sequence[int], rows: Numbers, most: int) -> tuple[list[int], Numbers]:
    """Add up adjacent rows [R, ...] until at most `most` are left. Return the steps at the edges of the columns, and
    the sums.
    """
    ends = np.linspace(0, len(steps), min(len(steps), most) + 1).round().astype(int)
    sums = np.stack([rows[first:last].sum(0) for first, last in pairwise(ends)])
    first = steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)
    return [max(first, 0), *(steps[end - 1] for end in ends[1:])], sums
