"""One layer on its ranks: its tensors, its messages, and what it saves and repeats.

`shown` reads a run's description (`crosscut.architecture`) into a `Shown`. The terminal's lines (`lines`), the picture
(`picture`) and JSON (`Shown.to_json`) are three renderings of it.
"""

from crosscut.planner.showing.picture import picture
from crosscut.planner.showing.reading import shown
from crosscut.planner.showing.section import section
from crosscut.planner.showing.shown import Shown, ShownBlock, ShownStep, Tensor
from crosscut.planner.showing.text import lines

__all__ = ["Shown", "ShownBlock", "ShownStep", "Tensor", "lines", "picture", "section", "shown"]
