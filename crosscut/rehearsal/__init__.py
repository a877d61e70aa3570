"""The dry run: the real training step of one rank of any layout, in one process without its tensors' memory.

What a step holds, computes and sends is counted from the program itself, beside the planner's formulas.
"""

from crosscut.rehearsal.comparison import Row, compare
from crosscut.rehearsal.pretence import Device
from crosscut.rehearsal.rehearsal_report import print_rehearsal, to_json
from crosscut.rehearsal.rehearse import Rehearsal, rehearse

__all__ = ["Device", "Rehearsal", "Row", "compare", "print_rehearsal", "rehearse", "to_json"]
