"""Results of a measured study, as a file keeps them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from crosscut.planner.compute import flops_per_step
from crosscut.planner.hardware import Hardware
from crosscut.planner.parameters import count_parameters, parameters_per_rank
from crosscut.planner.products import Speed
from crosscut.planner.time import step_time
from crosscut.scaling.cases import Case, Devices, Study


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case and its seconds."""

    num_layers: int
    hidden_size: int
    num_heads: int
    parameters: int
    parameters_per_rank: int
    tensor: int
    data: int
    threads: int
    """Threads of each rank."""
    sharing: int
    """Ranks on one device."""
    flops: int
    """FLOPs of the model in a step, over all ranks."""
    seconds: tuple[float, ...]
    """Seconds of a step, in the order of the turns."""
    forecast: float | None
    """Seconds of a step by the planner; None where no device was given."""

    @property
    def median(self) -> float:
        """Median of the seconds of a step."""
        return median(self.seconds)

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.tensor * self.data

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of the model, over all ranks."""
        return self.flops / self.median


@dataclass(frozen=True, kw_only=True)
class Results:
    """All studies, and the machine and devices that they ran on."""

    machine: Mapping[str, str]
    devices: Devices
    batch_size: int
    """Sequences of one data rank."""
    sequence_length: int
    precision: str
    turns: int
    device_file: str
    """The device of the forecasts; empty where none was given."""
    studies: Mapping[Study, Sequence[Row]]

    def to_json(self) -> str:
        """A file's content; `from_json` reads it."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Results":
        """Results that `to_json` wrote to `text`."""
        facts: dict[str, Any] = json.loads(text)
        studies = {
            study: [Row(**{**row, "seconds": tuple(row["seconds"])}) for row in rows]
            for study, rows in facts["studies"].items()
        }
        return cls(**{**facts, "devices": Devices(**facts["devices"]), "studies": studies})


def row_of(case: Case, seconds: Sequence[float], devices: Devices, hardware: Hardware | None) -> Row:
    """The case with what was measured, and with the planner's forecast where a device is given."""
    run = case.run
    return Row(
        num_layers=run.model.num_layers,
        hidden_size=run.model.hidden_size,
        num_heads=run.model.num_heads,
        parameters=count_parameters(run.model),
        parameters_per_rank=parameters_per_rank(run.model, run.layout),
        tensor=run.layout.tensor,
        data=run.layout.data,
        threads=case.threads,
        sharing=devices.sharing(run.layout.world_size),
        flops=flops_per_step(run.config),
        seconds=tuple(seconds),
        forecast=None if hardware is None else forecast_seconds(case, devices, hardware),
    )


def forecast_seconds(case: Case, devices: Devices, hardware: Hardware) -> float:
    """The planner's. A rank has its threads' share of a processor, or less where more ranks than cores share it."""
    ranks = case.run.layout.world_size
    sharing = max(devices.count // case.threads, ranks)
    speed = Speed(hardware, case.run.precision, ranks=sharing)
    turns = devices.sharing(ranks)  # what the host does for a rank waits for the others on its core, too
    forward, backward = hardware.layer_host
    device = replace(
        hardware,
        ranks_per_node=max(hardware.ranks_per_node, ranks),
        layer_host=(turns * forward, turns * backward),
        tensor_host=turns * hardware.tensor_host,
    )
    return step_time(case.run.config, device, speed=speed).total
