"""`crosscut plan`, and the two commands that it becomes with `--calibrate` and with `--dry-run`.

Each is a click command with options of its own, and refuses those of the other two with a reason.
"""

from pathlib import Path
from typing import Any

import click

from crosscut.cli.arguments import file_option, gathered, run_arguments
from crosscut.cli.plan.dry_run import DryRunOptions, show_dry_run
from crosscut.cli.plan.forecast import ForecastOptions, number_of_tokens, show_forecast
from crosscut.cli.plan.refusal import refuse_options

_model = click.option(
    "--model", metavar="NAME", help="A preset, or the end of one's name such as 8.3B, in place of RUN.toml."
)
_gpu = click.option("--gpu", metavar="NAME|FILE", help="Such as h100-sxm or v100-32gb-dgx2h, or a .toml file of one.")
_json = click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, rejected layouts too.")


@click.command()
@file_option(
    "--calibrate",
    metavar="FILE.toml",
    help="Measure this machine's device in under a minute and write a file that --gpu takes.",
)
def calibration(calibrate: Path) -> None:
    """Measure this machine's device in under a minute and write a file that `crosscut plan --gpu` takes."""
    from crosscut.calibration import calibrate as measure

    hardware = measure(calibrate)
    click.echo(f"{hardware} is measured: crosscut plan --gpu {calibrate}")


@click.command()
@run_arguments
@_model
@_gpu
@_json
@click.option(
    "--dry-run",
    is_flag=True,
    expose_value=False,
    help="Do the real step of one rank, without its memory, and count it.",
)
@click.option("--layout", metavar="tensor=8,data=64", help="With --dry-run: the layout, in place of the run's.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="With --dry-run: which one.")
@gathered(DryRunOptions)
def dry_run(options: DryRunOptions) -> None:
    """Do the real step of one rank of any layout, without its memory, and count it (docs/dry-run.md)."""
    show_dry_run(options)


class _Plan(click.Command):
    """A forecast; with `--calibrate` or `--dry-run` among its arguments, the command of that option."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments for the command that they ask for."""
        options = {word.partition("=")[0] for word in (args[: args.index("--")] if "--" in args else args)}
        if "--calibrate" in options:
            return calibration.make_context(info_name, args, parent, **extra)
        if "--dry-run" in options:
            return dry_run.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_Plan)
@run_arguments
@_model
@click.option("--gpus", type=int, help="How many devices.  [default: the run's ranks, or 1]")
@_gpu
@click.option(
    "--tokens",
    metavar="300B",
    callback=number_of_tokens,
    help="Tell days, and with --price money, for so many tokens.",
)
@click.option("--price", type=float, help="Of one device for an hour, in any currency.")
@click.option("--top", type=click.IntRange(min=1), default=8, show_default=True, help="Layouts to show.")
@_json
@file_option("--html", help="Write a page with figures to play with.")
@file_option("--write", help="Write the best layout's run, for crosscut train.")
@gathered(ForecastOptions)
def plan(options: ForecastOptions) -> None:
    """Say what a model costs before it runs: which layouts fit, how fast each is, which to take.

    Takes a run's file or a preset (--model 8.3B), and the device and number of them; any key can be set after it, such
    as training.batch_size=1024. Every layout that the model and the batch allow is forecast, with each recomputation
    that is worth a look and each micro-batch, whatever the run has of them: bytes of a rank, what it sends, the time of
    a step. docs/planner.md has the formulas and how far they were off.
    """
    show_forecast(options)


refuse_options(
    plan,
    calibration,
    dry_run,
    message="`{option}` must come with `--dry-run`, since a plan tries every layout on all ranks, but is {value} "
    "alone.",
    hidden=False,
)
refuse_options(
    dry_run,
    plan,
    message="`{option}` must be left out with `--dry-run`, which is a step of one rank of the run's layout or of "
    "`--layout`, but is {value}.",
    hidden=True,
)
refuse_options(
    calibration,
    plan,
    message="`{option}` must be left out with `--calibrate`, which plans nothing, but is {value}.",
    hidden=True,
)
