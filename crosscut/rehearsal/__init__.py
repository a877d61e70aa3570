"""Dry run of any layout in one process. The actual code of one rank's training step runs on tensors that hold no data.

The dry run counts the memory, the FLOPs and the messages of the step, for comparison with the planner's formulas.
`plan_grids` chooses a grid for images that ranks share by dry runs of all grids.
"""

from crosscut.rehearsal.comparison import ComparedFigure, compare
from crosscut.rehearsal.grids import GridCost, plan_grids, print_grids, rehearse_grid
from crosscut.rehearsal.pretence import Device
from crosscut.rehearsal.rehearsal_report import print_rehearsal, to_json
from crosscut.rehearsal.rehearse import Rehearsal, rehearse

__all__ = [
    "ComparedFigure",
    "Device",
    "GridCost",
    "Rehearsal",
    "compare",
    "plan_grids",
    "print_grids",
    "print_rehearsal",
    "rehearse",
    "rehearse_grid",
    "to_json",
]
