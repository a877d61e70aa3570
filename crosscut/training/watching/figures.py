"""Style of the pictures that a run writes. Their background is light and not transparent, so that they can be read on
light and on dark pages.
"""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from crosscut.config import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BACKGROUND, INK, GREY = "#fcfcfa", "#333333", "#6b6b6b"


def frame(axes: "Axes") -> None:
    """Draw the grid and the two axes of a chart."""
    axes.grid(alpha=0.25)
    axes.set_facecolor(BACKGROUND)
    axes.spines[["top", "right"]].set_visible(False)


def write_figure(figure: "Figure", path: Path) -> None:
    """Write a figure of pyplot atomically as PNG, and close it. Raises `OSError`."""
    from matplotlib import pyplot

    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, facecolor=BACKGROUND)
    pyplot.close(figure)
    write_whole(path, picture.getvalue())
