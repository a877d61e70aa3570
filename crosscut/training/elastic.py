"""Runs whose number of ranks may change whenever torchrun starts them again. This module chooses the layout for the
started ranks, and records the restarts in `restarts.jsonl`.

A step is lost if it came after the checkpoint from which the run resumes: the run has to repeat this step. The seconds
lost are the time of the lost steps, plus the time from the last step of the earlier start to the first step of the new
start. The second part includes the detection of the failure, the rendezvous, the start of Python, and the loading of
the checkpoint.
"""

import dataclasses
import os
import time
from contextlib import suppress
from math import lcm
from pathlib import Path

import torch

from crosscut.checkpoint import Progress
from crosscut.config import LayoutError, RunConfig
from crosscut.config.checks import listed, multiples_around
from crosscut.config.layout import Elastic
from crosscut.config.training import Device
from crosscut.launch.processes import choose_device, started_world_size, was_started
from crosscut.launch.restarts import keeps_store
from crosscut.logbook.contents import former_run, read_metrics, read_settings, read_summary
from crosscut.logbook.rows import append_row
from crosscut.logbook.schema import METRICS_FILE, RESTARTS_FILE
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware, find_hardware
from crosscut.planner.search import run_on
from crosscut.training.resuming import identity_of_settings


def is_elastic(run: RunConfig) -> bool:
    """Whether the run adapts its layout to the number of ranks that torchrun starts."""
    return run.layout.elastic is not Elastic.OFF and was_started()


def for_started_ranks(run: RunConfig) -> RunConfig:
    """Return the run with a layout for the ranks that torchrun started, if the run is elastic. Every rank computes the
    same layout. Any other run is returned unchanged.

    Raises `LayoutError` if no layout is possible, or if torchrun keeps the store of an earlier rendezvous.
    """
    if not is_elastic(run):
        return run
    if keeps_store():
        raise LayoutError(
            "If `layout.elastic` is set, torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, but the variable is not "
            "1. Without it, restarted ranks find the addresses of ranks that have ended, and wait for them. Start "
            "torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
        )
    return run_on(run, started_world_size(), _hardware(run.training.device))


def without_a_node(run: RunConfig) -> str:
    """Message on what an elastic run would do if it lost one of its nodes. Empty if it would use all other ranks, and
    for any other run.
    """
    here, nodes = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    if not is_elastic(run) or nodes < 2:
        return ""
    left = started_world_size() - here
    try:
        smaller = run_on(run, left, _hardware(run.training.device)).layout
    except LayoutError as error:
        return f"After the loss of a node, the run could not continue: {error}"
    if smaller.world_size == left:
        return ""
    told = f"After the loss of a node, {left - smaller.world_size} of {left} ranks would be idle."
    name, batch = run.training.smallest_batch
    wanted = left // (run.layout.world_size // run.layout.data)
    if not batch % wanted:
        return told
    both = lcm(run.layout.data, wanted)
    advice = listed(multiples_around(batch, both))
    return f"{told} {wanted} data ranks do not divide `{name}` ({batch}). A new run could use all with {advice}."


def _hardware(device: Device) -> Hardware | None:
    if choose_device(device).type == "cuda":
        return find_hardware(torch.cuda.get_device_name())
    return KNOWN_HARDWARE["laptop"]


def _has_begun(run: RunConfig, folder: Path) -> bool:
    """Whether an earlier start of this run has left its metrics in the folder, and the run is not complete."""
    if not (folder / METRICS_FILE).exists() or read_summary(folder) is not None:
        return False
    former = former_run(read_settings(folder))
    return former is not None and identity_of_settings(former) == identity_of_settings(run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restart:
    """A start that continues an earlier start of the run."""

    step: int
    """Number of steps done in the checkpoint from which the run continues. 0 if the run starts again without a
    checkpoint."""
    before: str
    """Layout that wrote the checkpoint. Empty without a checkpoint."""
    after: str
    """Layout of this start."""
    restored_from: str
    """Place of the checkpoint: `disk` or `memory`, or empty without a checkpoint."""
    ranks: int
    """Number of ranks that torchrun started."""
    idle_ranks: int
    steps_lost: int
    """Number of steps that the earlier start had done after the checkpoint."""
    seconds_of_steps_lost: float
    """Seconds that the lost steps took."""
    last_step_at: float | None
    """Time at which the earlier start reported its last step, in seconds since the epoch. None if unknown."""

    @classmethod
    def of(cls, run: RunConfig, progress: Progress | None, restored_from: str = "disk") -> "Restart | None":
        """Describe this start of the run as a restart. `progress` is the progress in the checkpoint from which the run
        continues, or None without a checkpoint. Call this method before the start writes or removes a file in the run's
        folder. Returns None if the run is not elastic, or if this is the run's first start.
        """
        step, folder = progress.step if progress else 0, Path(run.output.folder)
        if not is_elastic(run) or not (progress or _has_begun(run, folder)):
            return None
        rows = [row for row in read_metrics(folder) if row["step"] > step and "tokens_per_second" in row]
        tokens = {row["step"]: run.training.batch_size_at(row["step"] - 1) for row in rows}
        rates = {row["step"]: row["tokens_per_second"] for row in rows if row["tokens_per_second"]}
        length = run.training.sequence_length
        path = folder / METRICS_FILE
        return cls(
            step=step,
            before=progress.layout if progress else "",
            after=str(run.layout),
            restored_from=restored_from if progress else "",
            ranks=started_world_size(),
            idle_ranks=max(0, started_world_size() - run.layout.world_size),
            steps_lost=len(tokens),
            seconds_of_steps_lost=sum(tokens[number] * length / rate for number, rate in rates.items()),
            last_step_at=path.stat().st_mtime if path.exists() else None,
        )

    def record(self, folder: Path) -> None:
        """Append the restart to `restarts.jsonl`. Call this method when the new start has done its first step. A disk
        error is ignored, as with the metrics.
        """
        values = dataclasses.asdict(self)
        last = values.pop("last_step_at")
        values["seconds_lost"] = None if last is None else max(0.0, time.time() - last) + self.seconds_of_steps_lost
        with suppress(OSError):
            append_row(folder / RESTARTS_FILE, values)

    def __str__(self) -> str:
        """Message for the user."""
        told = f"The run continues on the layout {self.after}"
        if self.before not in ("", self.after):
            told += f" instead of {self.before}"
        source = f", from the checkpoint of step {self.step}" if self.before else ", from its first step"
        idle = f" Idle ranks: {self.idle_ranks}." if self.idle_ranks else ""
        return f"{told}{source}. Steps to repeat: {self.steps_lost}.{idle}"
