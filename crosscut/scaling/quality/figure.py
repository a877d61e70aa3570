"""Picture of the study of quality: validation perplexity over iterations, as in the paper's Figure 7, and the figures
after the last step by size.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from crosscut.config.system.wording import short
from crosscut.evaluation.task import exponential
from crosscut.planner.paper.sections import Picture
from crosscut.scaling.quality.report import FIGURES
from crosscut.scaling.quality.results import QualityResults, SizeFigures
from crosscut.training.watching.figures import frame, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALT = "Validation perplexity over the steps for each size and seed, and perplexities after the last step by size"

_COLORS = ("#9a6a3a", "#1f5f99", "#4c8a4a", "#b8431f", "#6b4c9a")
_LOOKS = (("o", "#333333"), ("s", "#8d5a78"), ("^", "#2f5d57"))
"""Marker and colour of each perplexity."""


def draw_quality(results: QualityResults, path: Path) -> Picture:
    """Draw the picture, write it as PNG, and return it. Each line on the left is a seed. Raises `OSError`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogFormatter

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    for number, size in enumerate(results.sizes):
        _draw_curves(left, size, _COLORS[number % len(_COLORS)])
    left.set(xlabel="steps", ylabel="validation perplexity", yscale="log")
    left.yaxis.set_major_formatter(LogFormatter(labelOnlyBase=False))
    left.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))
    _draw_figures(right, results.sizes)
    for axes in (left, right):
        frame(axes)
        axes.legend(frameon=False)
    write_figure(figure, path)
    return Picture(path.name, ALT, path.read_bytes())


def _draw_curves(axes: "Axes", size: SizeFigures, color: str) -> None:
    """Draw the validations of a size, without those of the untrained model."""
    label = f"{size.name}, {short(size.parameters)} parameters"
    for number, run in enumerate(size.runs):
        points = [(step, exponential(loss)) for step, loss in run.validation if step]
        told = None if number else label
        axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, linewidth=1, label=told)


def _draw_figures(axes: "Axes", sizes: Sequence[SizeFigures]) -> None:
    """Draw each perplexity over the parameters, as a share of that of the smallest size: the mean over the seeds, and
    the range.
    """
    perplexities = [one for one in FIGURES if not one.is_share and all(size.figures(one.name) for size in sizes)]
    parameters = [size.parameters for size in sizes]
    for figure, (marker, color) in zip(perplexities, _LOOKS, strict=False):
        whole = mean(sizes[0].figures(figure.name))
        shares = [[value / whole for value in size.figures(figure.name)] for size in sizes]
        means = [mean(of) for of in shares]
        ends = [[one - min(of), max(of) - one] for one, of in zip(means, shares, strict=True)]
        axes.errorbar(
            parameters,
            means,
            yerr=list(zip(*ends, strict=True)),
            color=color,
            marker=marker,
            linewidth=1.2,
            capsize=3,
            label=figure.title,
        )
    axes.set(xlabel="parameters", ylabel="perplexity, as a share of the smallest size's", xscale="log")
    axes.set_xticks(parameters, labels=[short(number) for number in parameters])
    axes.minorticks_off()
