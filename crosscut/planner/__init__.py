"""Forecast the cost of a run before it starts: parameters, FLOPs, memory, collectives and seconds on a given device.

This package is plain Python. It imports neither torch nor numpy, so a forecast needs no accelerator. Training computes
its reported rates with the same formulas, so a forecast and a report cannot differ. Tests compare the formulas with the
FLOPs, bytes and messages of running steps. The derivations are in `docs/planner.md`.
"""

from crosscut.planner.activations import activations_held, layer_activations, published_layer_activations
from crosscut.planner.candidate import Candidate
from crosscut.planner.compute import (
    flops_per_step,
    hardware_flops_per_rank,
    recomputed_flops_per_step,
)
from crosscut.planner.flops import forward_flops_per_token, model_flops_per_token
from crosscut.planner.hardware import HARDWARE, find_hardware
from crosscut.planner.memory import MemoryForecast, forecast_memory
from crosscut.planner.messages.collective import Collective
from crosscut.planner.messages.traffic import comparison_traffic, step_traffic, wire_bytes_per_step
from crosscut.planner.parameters import (
    count_active_parameters,
    count_parameters,
    parameters_per_rank,
    replicated_parameters,
)
from crosscut.planner.search import search_layouts
from crosscut.planner.time import step_time

__all__ = [
    "HARDWARE",
    "Candidate",
    "Collective",
    "MemoryForecast",
    "activations_held",
    "comparison_traffic",
    "count_active_parameters",
    "count_parameters",
    "find_hardware",
    "flops_per_step",
    "forecast_memory",
    "forward_flops_per_token",
    "hardware_flops_per_rank",
    "layer_activations",
    "model_flops_per_token",
    "parameters_per_rank",
    "published_layer_activations",
    "recomputed_flops_per_step",
    "replicated_parameters",
    "search_layouts",
    "step_time",
    "step_traffic",
    "wire_bytes_per_step",
]
