"""Measured figures of each rank in the third step of a start, and the planner's forecast of them.

The first two steps of a process allocate and compile. A change of the layout needs a new start, so one measurement per
start shows each layout.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

import torch

from crosscut.architecture import describe
from crosscut.config import RunConfig
from crosscut.config.conventions import AMPERE
from crosscut.config.training import Device
from crosscut.logbook.rows import Row
from crosscut.model import Batch
from crosscut.parallel import CollectiveRecorder
from crosscut.parallel.collectives import from_all_ranks
from crosscut.planner import Candidate, forecast_memory, step_traffic
from crosscut.training.memory.peak import peak_bytes
from crosscut.training.result import StepResult
from crosscut.training.step import Trainer

MEASURED_STEP = 3
"""Step of a process that is measured, from 1."""


class RankMeter:
    """Meter of one rank. Every rank runs all steps through `step`, and calls `row` when `is_due` is true."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._steps = 0
        self._sent: Mapping[str, Mapping[str, int]] = {}

    @property
    def is_due(self) -> bool:
        """Whether the step that was launched last is the measured one."""
        return self._steps == MEASURED_STEP

    def step(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Run `Trainer.step`, and count the messages of the measured step."""
        self._steps += 1
        if not self.is_due:
            return self.trainer.step(step, micro_batches)
        with CollectiveRecorder(self.trainer.mesh) as recorder:
            result = self.trainer.step(step, micro_batches)
        sizes = zip(recorder.sent, recorder.element_bytes, strict=True)
        self._sent = _summed((sent.axis, 1, sent.elements * size) for sent, size in sizes)
        return result

    def row(self) -> Row:
        """Return the row of `measurements.jsonl`, without its step. Communication: one gather over all ranks."""
        self._steps += 1  # later steps are not measured
        run, mesh = self.trainer.run.config, self.trainer.mesh
        own = {"memory_bytes": peak_bytes(mesh.device) - self.trainer.bytes_before, **self._sent}
        return {
            "layout": str(run.layout),
            "device": mesh.device.type,
            "learning_rates": _rates(run, self.trainer.optimizer.param_groups[0]["lr"]),
            "ranks": from_all_ranks(own, mesh),
        }


def _rates(run: RunConfig, rate: float) -> dict[str, float]:
    groups = {parameter.role.group for parameter in describe(run.model).parameters()}
    return {str(group): rate * run.optimizer.rate_factor(group) for group in sorted(groups)}


def _summed(messages: Iterable[tuple[str, int, int]]) -> dict[str, dict[str, int]]:
    """Add up messages by axis. Each message is an axis, a number and bytes."""
    counts, sizes = Counter[str](), Counter[str]()
    for axis, count, size in messages:
        counts[axis] += count
        sizes[axis] += size
    return {"messages": dict(counts), "message_bytes": dict(sizes)}


def plan_of(run: RunConfig, device: torch.device) -> dict[str, object]:
    """Return the content of `plan.json`: the planner's forecast for each rank of the run's layout."""
    layout = run.layout
    places = [layout.ranks.place_of(rank) for rank in range(layout.world_size)]
    sizes = {name: layout.ranks.sizes[name] for name in places[0] if layout.ranks.sizes[name] > 1}
    return {
        "layout": str(layout),
        "axes": sizes,
        "ranks": [
            {"rank": rank, "stage": place["pipeline"], "places": {name: place[name] for name in sizes}}
            for rank, place in enumerate(places)
        ],
        "stages": [_stage(run, stage, device) for stage in range(layout.ranks.sizes["pipeline"])],
    }


def _stage(run: RunConfig, stage: int, device: torch.device) -> dict[str, object]:
    kind = Device.CUDA if device.type == "cuda" else Device.CPU
    planned = Candidate.at(replace(run, training=replace(run.training, device=kind)), stage)
    capability = torch.cuda.get_device_capability(device) if kind is Device.CUDA else AMPERE
    memory = forecast_memory(planned, device="cuda" if kind is Device.CUDA else "cpu", capability=capability)
    sent = ((one.axis, one.count, one.count * one.elements * one.element_bytes) for one in step_traffic(planned))
    return {
        "memory_bytes": memory.total,
        "memory": {name: value for name, value in asdict(memory).items() if isinstance(value, int)},
        **_summed(sent),
    }
