"""Draw a picture of a confusion matrix, or of predicted numbers."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from crosscut.training.watching.figures import GREY, frame, write_figure

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
"""Confusion matrix [labels, labels]."""

_MOST_LABELS = 30
"""Maximum number of labels whose counts are written into the picture."""


def plot_confusion(table: Counts, names: tuple[str, ...], path: Path) -> None:
    """Plot a confusion matrix [labels, labels]: rows are labels, columns are predictions. The colour shows each count
    as a fraction of the row's examples.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = max(3.5, min(16.0, 1.2 + 0.9 * len(names)))
    figure, axes = pyplot.subplots(figsize=(size + 0.8, size), layout="constrained")
    shares = table / table.sum(1, keepdims=True).clip(min=1)
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    axes.set(xlabel="predicted label", ylabel="true label", xticks=range(len(names)), yticks=range(len(names)))
    axes.set_title("number of examples; colour: share of the row", fontsize=9)
    axes.set_xticklabels([_escaped(name) for name in names], rotation=0 if len(names) < 4 else 90)
    axes.set_yticklabels([_escaped(name) for name in names])
    for row in range(len(names) if len(names) <= _MOST_LABELS else 0):
        for column in range(len(names)):
            dark = shares[row, column] > 0.5
            told = f"{table[row, column]:,}"
            axes.text(column, row, told, ha="center", va="center", color="white" if dark else "black")
    write_figure(figure, path)


def plot_numbers(true: Numbers, predicted: Numbers, path: Path) -> None:
    """Plot the predicted numbers [examples] over the true ones. A line shows where both are equal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4.5, 4.5), layout="constrained")
    ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]
    axes.plot(ends, ends, color=GREY, linewidth=1, label="prediction = label")
    axes.scatter(true, predicted, s=12, alpha=0.5, edgecolors="none", label="an example")
    axes.set(xlabel="label (number in the file)", ylabel="predicted number")
    frame(axes)
    axes.legend(frameon=False, loc="best", fontsize=8)
    write_figure(figure, path)


def _escaped(name: str) -> str:
    """Return a label on one line, cut to 30 characters, with escaped dollar signs. matplotlib would read a dollar sign
    as the start of a formula.
    """
    return " ".join(name.split())[:30].replace("$", r"\$")
