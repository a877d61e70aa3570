"""Pipeline parallelism in plain Python: the schedules of the stages, their simulation, and the cut of the layers.

A schedule is data: a list of actions for each rank (`schedules`). The training step performs these actions, the planner
counts their messages and the activations in flight, and `simulate` computes when each action starts and ends.
"""

from crosscut.architecture.pipeline.cut import Stage, balanced_cut, stages_of_rank
from crosscut.architecture.pipeline.flight import PERIODS, Flight, flights
from crosscut.architecture.pipeline.schedules import (
    Action,
    Channel,
    Message,
    Pass,
    Schedule,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from crosscut.architecture.pipeline.simulation import Durations, ends_of_ranks, simulate, without_messages
from crosscut.architecture.pipeline.timeline import Timed, Timeline

__all__ = [
    "PERIODS",
    "Action",
    "Channel",
    "Durations",
    "Flight",
    "Message",
    "Pass",
    "Schedule",
    "Stage",
    "Timed",
    "Timeline",
    "balanced_cut",
    "ends_of_ranks",
    "flights",
    "interleaved",
    "one_forward_one_backward",
    "simulate",
    "stages_of_rank",
    "without_messages",
    "zero_bubble",
]
