"""The command `crosscut plan --dry-run`."""

import json
from dataclasses import dataclass

from crosscut.cli.plan.asked import asked_device, asked_run, with_vocabulary
from crosscut.config import load_layout
from crosscut.config.system.terminal import echo


@dataclass(frozen=True, kw_only=True)
class DryRunOptions:
    """Options of `crosscut plan --dry-run`."""

    arguments: tuple[str, ...]
    """RUN.toml and its overrides."""
    model: str | None
    gpu: str | None
    layout: str | None
    rank: int
    as_json: bool


def show_dry_run(options: DryRunOptions) -> None:
    """Run a step of one rank on tensors without data. Print the memory, FLOPs and messages of the step beside the
    planner's forecast.
    """
    from crosscut.planner.search import require_device
    from crosscut.rehearsal import print_rehearsal, rehearse, to_json

    device = None if options.gpu is None else asked_device(options.gpu, as_json=options.as_json)
    layout = None if options.layout is None else load_layout(options.layout)
    run = with_vocabulary(asked_run(options.arguments, options.model, layout=layout))
    if device is not None:
        require_device(run, device)
    on_cpu = run.training.device == "cpu" if device is None else device.device == "cpu"
    precision = None if device is None else device.fast_precision
    rehearsal = rehearse(run, rank=options.rank, device="cpu" if on_cpu else "cuda", precision=precision)
    if options.as_json:
        echo(json.dumps(to_json(rehearsal), indent=2))
    else:
        print_rehearsal(rehearsal)
