"""The command `crosscut plan`, which forecasts layouts, calibrates with `--calibrate` and rehearses with `--dry-run`.

Each of the three is a click command with its own options. If an option of another of the three is given, the command
refuses the option and states the reason.
"""

from pathlib import Path
from typing import Any

import click

from crosscut.cli.arguments import file_option, gathered, run_arguments
from crosscut.cli.plan.dry_run import DryRunOptions, show_dry_run
from crosscut.cli.plan.forecast import ForecastOptions, number_of_tokens, show_forecast
from crosscut.cli.plan.refusal import refuse_options

_model = click.option(
    "--model", metavar="NAME", help="Preset to plan instead of RUN.toml. The end of its name is enough: 8.3B."
)
_gpu = click.option("--gpu", metavar="NAME|FILE", help="Device, such as h100-sxm or v100-32gb-dgx2h, or a .toml file.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, including the rejected layouts.")


@click.command()
@file_option(
    "--calibrate",
    metavar="FILE.toml",
    help="Measure this machine's device in under a minute and write a file for --gpu.",
)
def calibration(calibrate: Path) -> None:
    """Measure this machine's device in under a minute and write a file for `crosscut plan --gpu`."""
    from crosscut.calibration import calibrate as measure

    hardware = measure(calibrate)
    click.echo(f"{hardware} is measured. To plan with it: crosscut plan --gpu {calibrate}")


@click.command()
@run_arguments
@_model
@_gpu
@_json
@click.option(
    "--dry-run",
    is_flag=True,
    expose_value=False,
    help="Run a real step of one rank without memory, and count its memory, FLOPs and messages.",
)
@click.option("--layout", metavar="tensor=8,data=64", help="With --dry-run: use this layout instead of the run's.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="With --dry-run: rank to run.")
@gathered(DryRunOptions)
def dry_run(options: DryRunOptions) -> None:
    """Run a real step of one rank of any layout without allocating memory, and count it (docs/dry-run.md)."""
    show_dry_run(options)


class _Plan(click.Command):
    """The forecast command, which hands over to another command if its arguments have `--calibrate` or `--dry-run`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments with the command that their options select."""
        options = {word.partition("=")[0] for word in (args[: args.index("--")] if "--" in args else args)}
        if "--calibrate" in options:
            return calibration.make_context(info_name, args, parent, **extra)
        if "--dry-run" in options:
            return dry_run.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_Plan)
@run_arguments
@_model
@click.option("--gpus", type=int, help="Number of devices.  [default: the number of ranks in the run, or 1]")
@_gpu
@click.option(
    "--tokens",
    metavar="300B",
    callback=number_of_tokens,
    help="Also print the days that this many tokens take, and their cost.",
)
@click.option("--price", type=float, help="Price of one device for an hour, in any currency; needs --tokens.")
@click.option("--top", type=click.IntRange(min=1), default=8, show_default=True, help="Number of layouts to show.")
@_json
@file_option("--html", help="Write an interactive page with figures.")
@file_option("--write", help="Write a run file with the best layout, for `crosscut train`.")
@gathered(ForecastOptions)
def plan(options: ForecastOptions) -> None:
    """Forecast a model's cost before the model runs: which layouts fit, how fast each layout is, and which is best.

    The plan needs a run's file or a preset (--model 8.3B), the device (--gpu) and the number of devices (--gpus). Any
    key can be overridden, such as training.batch_size=1024. The plan covers every layout that the model and the batch
    allow. It also tries the useful recomputation modes and micro-batch sizes, even if the run's file sets these keys.
    For each layout, the plan gives the memory of a rank, the messages that it sends and the time of a step.
    docs/planner.md explains the formulas and compares forecasts with measurements.
    """
    show_forecast(options)


refuse_options(
    plan,
    calibration,
    dry_run,
    message="`{option}` must come with `--dry-run`, because a plan covers every layout and all ranks, but is {value} "
    "alone.",
    hidden=False,
)
refuse_options(
    dry_run,
    plan,
    message="`{option}` must be omitted with `--dry-run`, which runs a step of one rank, on the run's layout or on "
    "`--layout`, but is {value}.",
    hidden=True,
)
refuse_options(
    calibration,
    plan,
    message="`{option}` must be omitted with `--calibrate`, which only measures the device, but is {value}.",
    hidden=True,
)
