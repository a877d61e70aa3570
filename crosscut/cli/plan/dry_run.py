"""The command `crosscut plan --dry-run`."""

import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from crosscut.cli.arguments import echo_json
from crosscut.cli.plan.asked import asked_device, asked_run, with_vocabulary
from crosscut.config import load_layout
from crosscut.config.checks import divisors
from crosscut.config.system.terminal import echo

if TYPE_CHECKING:
    from crosscut.planner.hardware import Hardware
    from crosscut.rehearsal import Rehearsal

_SECONDS_BETWEEN_LINES = 5.0


class _DryRunProgress:
    """Progress of a dry run: a line every few seconds, on the error stream."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()

    def tell(self, done: int, total: int) -> None:
        """Print how many of the `total` passes of layers are done, their rate, and the time left."""
        now = time.monotonic()
        if now - self._told < _SECONDS_BETWEEN_LINES or done == total:
            return
        self._told, rate = now, done / (now - self._began)
        left = timedelta(seconds=round((total - done) / rate))
        echo(f"Dry run: {done:,} of {total:,} passes of layers, {rate:,.1f} a second, about {left} left", err=True)


def show_dry_run(
    arguments: tuple[str, ...], model: str | None, gpu: str | None, layout: str | None, rank: int, as_json: bool
) -> None:
    """Run the code of one rank's step on tensors that hold no data. Print the memory, FLOPs and messages of the step
    next to the planner's forecast. `arguments` are RUN.toml and its overrides.
    """
    from crosscut.planner.search import require_device
    from crosscut.rehearsal import print_rehearsal, rehearse, to_json

    device = None if gpu is None else asked_device(gpu, as_json=as_json)
    change = None if layout is None else partial(load_layout, layout)
    run = with_vocabulary(asked_run(arguments, model, change_layout=change))
    if device is not None:
        require_device(run, device)
    on_cpu = run.training.device == "cpu" if device is None else device.device == "cpu"
    precision = None if device is None else device.fast_precision
    rehearsal = rehearse(
        run, rank=rank, device="cpu" if on_cpu else "cuda", precision=precision, tell=_DryRunProgress().tell
    )
    if as_json:
        echo_json(to_json(rehearsal))
    else:
        print_rehearsal(rehearsal)
        if device is not None and (text := _text_against_memory(rehearsal, device)):
            echo(text)


def _text_against_memory(rehearsal: "Rehearsal", hardware: "Hardware") -> str:
    """Message that the step does not fit into the memory of a rank, with a remedy. Empty if the step fits."""
    from crosscut.planner.search import memory_of_rank
    from crosscut.rehearsal.comparison import rehearsed_forecast

    run = rehearsal.run
    limit = memory_of_rank(hardware, run.layout.world_size)
    allowance = rehearsed_forecast(rehearsal).allowance
    if rehearsal.peak.total + allowance <= limit:
        return ""
    fitting = _fitting_micro_batch(rehearsal, hardware, limit)
    advice = (
        f"Set training.micro_batch_size={fitting}."
        if fitting
        else "No micro-batch size fits. Use a layout that fits: `crosscut plan` without `--dry-run` lists them."
    )
    needed = f"{(rehearsal.peak.total + allowance) / 1e9:,.1f} GB"
    fragments = f", with {allowance / 1e9:,.1f} GB for fragmentation" if allowance else ""
    return (
        f"The step does not fit: it needs {needed} per rank{fragments}, but a rank has {limit / 1e9:,.1f} GB. {advice}"
    )


def _fitting_micro_batch(rehearsal: "Rehearsal", hardware: "Hardware", limit: int) -> int:
    """Largest micro-batch size, below the micro-batch size of the run, whose forecast fits into `limit` bytes. 0 if
    none fits.
    """
    from crosscut.planner.memory import forecast_memory

    planned = rehearsal.planned
    for size in reversed(divisors(planned.micro_batch_size)[:-1]):
        smaller = replace(planned, training=replace(planned.training, micro_batch_size=size))
        if forecast_memory(smaller, device=hardware.device, capability=hardware.capability).total <= limit:
            return size
    return 0
