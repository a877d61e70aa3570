"""Forecast, with the planner, how long a run takes on this machine."""

from dataclasses import replace

import torch

from crosscut.calibration.own_run import measure_for
from crosscut.config import Layout, RunConfig
from crosscut.data import folders_of
from crosscut.parallel import ParallelMesh
from crosscut.planner import find_hardware
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware
from crosscut.planner.time import step_time
from crosscut.training.batches import RunSamples
from crosscut.training.watching.throughput import PeakRate

_WORTH_A_NOTE = 1.05
"""Threshold for a note. The note is printed if, according to the forecast, one rank would be more than this many times
as fast as all ranks of the run together.
"""

_WORTH_MEASURING = 20.0
"""Minimum duration of a run, in seconds, for which the CPU is measured. The duration comes from a forecast without
measurements. For a shorter run, a measurement is not worth the second that it takes."""


def hardware_for(
    run: RunConfig, samples: RunSamples, peak: PeakRate, mesh: ParallelMesh, *, done: int
) -> Hardware | None:
    """Return the hardware with which the planner forecasts the remaining steps of a run. None if the planner does not
    know the device. Every rank must call this function.

    If a run on a CPU takes long and computes in float32, the ranks measure the run's own products, its messages, and
    the work of the host. Otherwise, the function returns the result of `known_hardware`.
    """
    hardware = known_hardware(run, peak, mesh.device)
    expected = expected_seconds(run, samples, hardware, done=done)
    if expected is None or expected < _WORTH_MEASURING:
        return hardware
    if mesh.device.type != "cpu" or run.training.numbers.compute != "float32":
        return hardware
    return measure_for(run, mesh)


def known_hardware(run: RunConfig, peak: PeakRate, device: torch.device) -> Hardware | None:
    """Return the planner's figures for a GPU, or for a laptop's CPU with the measured matrix rate `peak`. None if the
    planner does not know the GPU, or if the run has more ranks than a laptop can have.
    """
    if device.type == "cuda":
        return find_hardware(torch.cuda.get_device_name(device))
    laptop = KNOWN_HARDWARE["laptop"]
    if run.layout.world_size > laptop.ranks_per_node:
        return None
    return replace(laptop, flops={**laptop.flops, run.training.numbers.compute: peak.flops_per_second})


def expected_seconds(run: RunConfig, samples: RunSamples, hardware: Hardware | None, *, done: int) -> float | None:
    """Forecast the seconds of the remaining steps and validation passes. Returns None if `hardware` is None.
    Checkpoints, evaluations and the compilation of layers are not counted.
    """
    if hardware is None:
        return None
    training, left = run.training, run.training.steps - done
    whole = (training.samples_before(training.steps) - training.samples_before(done)) / training.batch_size
    validations = 1 + (-(-left // training.validate_every) if training.validate_every else 1)
    filled = samples.validation.count(training.validation_sequences) * training.sequence_length
    validated = min(filled, sum(folder.validation.num_tokens for folder in folders_of(samples.tokens)))
    # A backward pass takes twice the work of a forward pass.
    forward = validated / (training.batch_size * training.sequence_length) / 3
    return step_time(run, hardware).total * (whole + validations * forward)


def gain_of_one_rank(run: RunConfig, peak: PeakRate, device: torch.device) -> float:
    """Forecast how many times as fast training would be with one rank, for a run whose ranks share one CPU. Returns 1
    if the ranks do not share a CPU, if a single rank would hardly be faster, or if the run has a pipeline. The run's
    `training.precision` must not be `auto`.
    """
    hardware = known_hardware(run, peak, device)
    if run.layout.num_stages > 1:  # no run has been compared with its forecast
        return 1.0
    if hardware is None or device.type != "cpu" or run.layout.world_size == 1:
        return 1.0
    alone = replace(run, layout=Layout(), training=replace(run.training, micro_batch_size=0))
    gain = step_time(run, hardware).total / step_time(alone, hardware).total
    return gain if gain > _WORTH_A_NOTE else 1.0
