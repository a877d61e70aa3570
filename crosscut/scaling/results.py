"""Results of a measured study, and their form in a JSON file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median

from crosscut.architecture.words import shape_in_figures
from crosscut.config import ResolvedRun
from crosscut.config.system.files import parse_json
from crosscut.config.system.records import from_json, to_json
from crosscut.planner.compute import flops_per_step
from crosscut.planner.hardware import Hardware
from crosscut.planner.parameters import count_parameters, parameters_per_rank
from crosscut.planner.products import Speed
from crosscut.planner.time import step_time
from crosscut.scaling.cases import Case, Devices, Study


@dataclass(frozen=True, kw_only=True)
class MeasuredCase:
    """One case with its measured seconds per step."""

    model: str
    """Shape of the model in figures (`architecture.words`)."""
    parameters: int
    parameters_per_rank: int
    """Parameters on one tensor rank. For a pipeline, the sum over one tensor rank of each stage."""
    axes: Mapping[str, int]
    """Number of ranks along each axis in use, keyed by the axis's field in `Layout`, outermost first."""
    setting: str
    """Schedule and number of micro-batches of a pipeline, and the attention algorithm of context ranks. Empty if the
    case has neither a pipeline nor context ranks."""
    threads: int
    """Number of threads per rank."""
    sharing: int
    """Number of ranks per core or GPU."""
    flops: int
    """Floating-point operations of the model per step, over all ranks."""
    seconds: tuple[float, ...]
    """Seconds of a step, in the order of the turns."""
    forecast: float | None
    """Planner's forecast of the seconds of a step. None if the user names no device to forecast (`--gpu`)."""

    @property
    def median(self) -> float:
        """Median seconds of a step over all turns."""
        return median(self.seconds)

    @property
    def num_ranks(self) -> int:
        """Total number of ranks."""
        return prod(self.axes.values())

    @property
    def flops_per_second(self) -> float:
        """Floating-point operations of the model per second, over all ranks."""
        return self.flops / self.median


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of all studies, with the machine and devices on which they ran."""

    machine: Mapping[str, str]
    devices: Devices
    batch_size: int
    """Number of sequences per data rank."""
    sequence_length: int
    precision: str
    turns: int
    device_file: str
    """Name of the device that the forecasts assume. Empty if there are no forecasts."""
    studies: Mapping[Study, Sequence[MeasuredCase]]
    left_out: Sequence[str]
    """Sentences that say which rank counts the studies leave out, and why."""

    def to_json(self) -> str:
        """Return the results as JSON text, which `from_json` reads."""
        return json.dumps(to_json(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Results":
        """Read the results from the JSON text that `to_json` returned."""
        return from_json(cls, parse_json(text))


def row_of(case: Case, seconds: Sequence[float], devices: Devices, hardware: Hardware | None) -> MeasuredCase:
    """Return the row for a case: the measured seconds and, if `hardware` is given, the planner's forecast."""
    run = case.run
    return MeasuredCase(
        model=shape_in_figures(run.model),
        parameters=count_parameters(run.model),
        parameters_per_rank=parameters_per_rank(run.model, run.layout),
        axes=run.layout.axes,
        setting=_setting(run),
        threads=case.threads,
        sharing=devices.sharing(run.layout.world_size),
        flops=flops_per_step(run.config),
        seconds=tuple(seconds),
        forecast=None if hardware is None else forecast_seconds(case, devices, hardware),
    )


def _setting(run: ResolvedRun) -> str:
    layout, settings = run.layout, []
    if layout.num_stages > 1:
        settings += [str(layout.schedule), f"{run.config.num_micro_batches} micro-batches"]
    if layout.context > 1:
        settings.append(str(run.config.context_attention.way))
    return ", ".join(settings)


def forecast_seconds(case: Case, devices: Devices, hardware: Hardware) -> float:
    """Return the planner's forecast of the seconds of a case's step. The forecast gives each rank the share of the CPU
    that its threads use, or a smaller share if there are more ranks than cores.
    """
    ranks = case.run.layout.world_size
    sharing = max(devices.count // case.threads, ranks)
    turns = devices.sharing(ranks)  # ranks on the same core also wait for each other's host work
    forward, backward = hardware.layer_host
    device = replace(
        hardware,
        ranks_per_node=max(hardware.ranks_per_node, ranks),
        layer_host=(turns * forward, turns * backward),
        tensor_host=turns * hardware.tensor_host,
    )
    return step_time(case.run.config, device, speed=Speed(device, case.run.precision, ranks=sharing)).total
