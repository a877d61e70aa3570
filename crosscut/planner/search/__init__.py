"""Search over the layouts of a run, with a forecast of the memory and the time of each layout."""

from crosscut.planner.search.elastic import run_on
from crosscut.planner.search.layouts import search_layouts
from crosscut.planner.search.plans import MOST_PIPELINES, NEAR_LIMIT, Plan, Plans, Rejected, plan_of
from crosscut.planner.search.proposals import CHOSEN, kept_offload
from crosscut.planner.search.reasons import memory_of_rank, reason_against_tensor
from crosscut.planner.search.requirements import require_device, require_precision

__all__ = [
    "CHOSEN",
    "MOST_PIPELINES",
    "NEAR_LIMIT",
    "Plan",
    "Plans",
    "Rejected",
    "kept_offload",
    "memory_of_rank",
    "plan_of",
    "reason_against_tensor",
    "require_device",
    "require_precision",
    "run_on",
    "search_layouts",
]
