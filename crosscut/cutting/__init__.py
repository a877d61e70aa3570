"""Finds how a plain module can be cut over tensor ranks, and cuts it."""

from crosscut.cutting.costs import Cost, costs_of
from crosscut.cutting.cut import cut, gathered_state_dict
from crosscut.cutting.plan import Plan, Rule, Style, Table
from crosscut.cutting.plan_file import read_plan, write_plan
from crosscut.cutting.probe import plan_cuts
from crosscut.cutting.table import print_plan
from crosscut.cutting.tp_plan import from_tp_plan

__all__ = [
    "Cost",
    "Plan",
    "Rule",
    "Style",
    "Table",
    "costs_of",
    "cut",
    "from_tp_plan",
    "gathered_state_dict",
    "plan_cuts",
    "print_plan",
    "read_plan",
    "write_plan",
]
