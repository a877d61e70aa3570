"""Draw a picture of a confusion matrix."""

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crosscut.config import write_whole

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
    axes.set(xlabel="prediction", ylabel="label", xticks=range(len(names)), yticks=range(len(names)))
    axes.set_xticklabels([_escaped(name) for name in names], rotation=0 if len(names) < 4 else 90)
    axes.set_yticklabels([_escaped(name) for name in names])
    for row in range(len(names) if len(names) <= _MOST_LABELS else 0):
        for column in range(len(names)):
            dark = shares[row, column] > 0.5
            told = f"{table[row, column]:,}"
            axes.text(column, row, told, ha="center", va="center", color="white" if dark else "black")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    write_whole(path, picture.getvalue())


def _escaped(name: str) -> str:
    """Return a label on one line, cut to 30 characters, with escaped dollar signs. matplotlib would read a dollar sign
    as the start of a formula.
    """
    return " ".join(name.split())[:30].replace("$", r"\$")
