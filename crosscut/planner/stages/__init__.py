"""Pipeline stages of a run: the layers of each stage, the schedule, and the part of the model that a rank holds."""

from crosscut.planner.stages.cut import (
    part_of,
    schedule_of,
    schedule_of_flights,
    schedule_of_run,
    separates_weights,
    stage_sizes,
    stages_of,
)

__all__ = [
    "part_of",
    "schedule_of",
    "schedule_of_flights",
    "schedule_of_run",
    "separates_weights",
    "stage_sizes",
    "stages_of",
]
