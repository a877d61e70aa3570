"""Dry run of any layout in one process. The actual code of one rank's training step runs on tensors that hold no data.

The dry run counts the memory, the FLOPs and the messages of the step, for comparison with the planner's formulas.
"""

from crosscut.rehearsal.comparison import ComparedFigure, compare
from crosscut.rehearsal.pretence import Device
from crosscut.rehearsal.rehearsal_report import print_rehearsal, to_json
from crosscut.rehearsal.rehearse import Rehearsal, rehearse

__all__ = ["ComparedFigure", "Device", "Rehearsal", "compare", "print_rehearsal", "rehearse", "to_json"]
