"""The command `crosscut plan`: a forecast of layouts, a calibration of the device (`--calibrate`), or a dry run
(`--dry-run`).

The forecast, the calibration and the dry run are three click commands with different options. Each command refuses the
options of the other two commands, with the reason.
"""

from pathlib import Path
from textwrap import wrap

import click

from crosscut.cli.arguments import OptionValue, RunCommand, file_option, run_arguments
from crosscut.cli.plan.dry_run import show_dry_run
from crosscut.cli.plan.forecast import ForecastOptions, number_of_tokens, price_per_hour, show_forecast
from crosscut.cli.plan.refusal import refuse_options
from crosscut.config import PRESETS
from crosscut.config.system.terminal import echo

_model = click.option(
    "--model",
    metavar="NAME",
    help="Another way to name a preset.",
)
_gpu = click.option("--gpu", metavar="NAME|FILE", help="Device, such as h100-sxm or v100-32gb-dgx2h, or a .toml file.")
_json = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON instead of tables. The JSON of a forecast also lists every layout that does not fit.",
)


@click.command()
@file_option(
    "--calibrate",
    metavar="FILE.toml",
    help="Measure the speed of this machine's device in less than a minute, and write the speed to a file for --gpu.",
)
def calibration(calibrate: Path) -> None:
    """Measure the speed of this machine's device in less than a minute, and write the speed to a file.

    `crosscut plan --gpu FILE.toml` then forecasts with the measured speed.
    """
    from crosscut.calibration import calibrate as measure

    hardware = measure(calibrate)
    echo(f"{hardware} has been measured. To plan with the measured speed: crosscut plan --gpu {calibrate}")


@click.command(cls=RunCommand)
@run_arguments()
@_model
@_gpu
@_json
@click.option(
    "--dry-run",
    is_flag=True,
    expose_value=False,
    help="Run the actual code of one rank's step on tensors that hold no data. Print the memory, FLOPs and messages of "
    "the step.",
)
@click.option(
    "--layout", metavar="tensor=8,data=64", help="With --dry-run: use this layout instead of the run's own layout."
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="With --dry-run: number of the rank to run.",
)
def dry_run(**options: OptionValue) -> None:
    """Run the actual code of one rank's step, in any layout, on tensors that hold no data.

    The command prints the memory, FLOPs and messages of the step next to the planner's forecast. docs/dry-run.md
    explains the figures.
    """
    show_dry_run(**options)


class _PlanCommand(RunCommand):
    """The forecast command. If the arguments contain `--calibrate` or `--dry-run`, the command for this option parses
    them.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: OptionValue
    ) -> click.Context:
        """Parse the arguments with the command that the options in `args` select."""
        options = {word.partition("=")[0] for word in (args[: args.index("--")] if "--" in args else args)}
        if "--calibrate" in options:
            return calibration.make_context(info_name, args, parent, **extra)
        if "--dry-run" in options:
            return dry_run.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def format_epilog(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """List the presets and the devices below the options."""
        from crosscut.planner.hardware import KNOWN_HARDWARE

        for title, names in (("Presets (--model)", PRESETS), ("Devices (--gpu)", KNOWN_HARDWARE)):
            with formatter.section(title):
                for line in wrap(", ".join(names), formatter.width - 4, break_on_hyphens=False):
                    formatter.write(f"  {line}\n")


@click.command(cls=_PlanCommand)
@run_arguments()
@click.option(
    "--list",
    "is_list",
    is_flag=True,
    help="Print all presets and devices with their sizes, and nothing else.",
)
@_model
@click.option("--gpus", type=int, help="Number of devices.  [default: the number of ranks in the run's layout]")
@_gpu
@click.option(
    "--expert-skew",
    type=float,
    default=1.0,
    show_default=True,
    help="For a model with experts: load of the fullest rank that shares experts, as a multiple of the mean load. 1 "
    "means even loads.",
)
@click.option(
    "--tokens",
    metavar="300B",
    callback=number_of_tokens,
    help="Also print how many days training on this many tokens takes and, with --price, what it costs.",
)
@click.option(
    "--price",
    metavar="2.5USD",
    callback=price_per_hour,
    help="Price of one device for one hour, with or without a currency; needs --tokens.",
)
@click.option(
    "--top", type=click.IntRange(min=1), default=8, show_default=True, help="Number of layouts to show, fastest first."
)
@_json
@file_option("--html", help="Write an interactive page with figures of this run and its layouts.")
@file_option(
    "--write",
    help="Write a RUN.toml with the fastest layout without a star, and with at most an hour between checkpoints.",
)
def plan(is_list: bool, **options: OptionValue) -> None:
    """Forecast the memory and the speed of each layout of a model.

    The plan shows which layouts fit into the device's memory, and which of them is the fastest. Give the file or
    the folder of a run or a preset such as 8.3B, the device (--gpu) and the number of devices (--gpus). Any key can be
    overridden, for example with training.batch_size=1024. The plan covers every layout that the model and the batch
    allow. It also tries the useful recomputation modes and micro-batch sizes, even if RUN.toml sets these keys. For
    each layout, the plan gives the memory of a rank, the messages that a rank sends and the time of a step.
    docs/planner.md explains the formulas and compares forecasts with measurements.
    """
    if is_list:
        from crosscut.cli.plan.listing import show_lists

        show_lists(as_json=options["as_json"])
    else:
        show_forecast(ForecastOptions(**options))


refuse_options(
    plan,
    calibration,
    dry_run,
    message="`{option}` must be omitted without `--dry-run`, but is {value}. A plan covers every layout and all ranks. "
    "Add `--dry-run`, or remove `{option}`.",
    hidden=False,
)
refuse_options(
    dry_run,
    plan,
    message="`{option}` must be omitted with `--dry-run`, but is {value}. A dry run is one step of one rank, on the "
    "run's layout or on `--layout`. Remove `{option}`.",
    hidden=True,
)
refuse_options(
    calibration,
    plan,
    message="`{option}` must be omitted with `--calibrate`, but is {value}. A calibration only measures the device. "
    "Remove `{option}`.",
    hidden=True,
)
