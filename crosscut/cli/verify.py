"""`crosscut verify`."""

import dataclasses
import json
import sys

import click

from crosscut.cli.arguments import on_devices_there, run_arguments, run_from
from crosscut.config import ConfigError, Layout, RunConfig, load_layout
from crosscut.config.precision import PRECISIONS


@click.command()
@run_arguments
@click.option("--layout", "layouts", multiple=True, metavar="tensor=4,data=2", help="Instead of the run's; repeatable.")
@click.option("--layers", type=click.IntRange(min=1), help="Scale the model down to this many layers.")
@click.option("--hidden", type=click.IntRange(min=1), help="Scale the model down to this hidden size.")
@click.option(
    "--precision",
    type=click.Choice([str(precision) for precision in PRECISIONS]),
    default="float64",
    show_default=True,
    help="Of the step, whatever the run's is: float64 proves, a narrower one finds what is larger than its rounding.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the reports as JSON.")
def verify(
    arguments: tuple[str, ...],
    layouts: tuple[str, ...],
    layers: int | None,
    hidden: int | None,
    precision: str,
    as_json: bool,
) -> None:
    """Prove that a layout trains the model that it would be uncut.

    Takes the run's model through one training step in one process and over the layout, and compares every module's
    output and gradient, every parameter's gradient and update, the copies on all ranks, the random numbers and what is
    sent. Names the first module that differs, and exits with 1 unless all is proven. It needs no data. Says at the end
    what of the run was in the step (recomputation, offload, accumulation) and what was not (its precision, compiled
    layers).
    """
    asked = [load_layout(text) for text in layouts]
    run = _load(arguments, needs_layout=not asked)
    from crosscut.launch.processes import is_first_started
    from crosscut.verification import for_verification, print_report, scale_down, verify_runs, with_scope

    any_layout = dataclasses.replace(run, layout=Layout()) if asked else run
    small = scale_down(any_layout, num_layers=layers, hidden_size=hidden)
    runs = [on_devices_there(for_verification(small, layout, precision)) for layout in asked or [run.layout]]
    reports = [with_scope(report, asked=run, verified=on) for report, on in zip(verify_runs(runs), runs, strict=True)]
    same = all(report.same for report in reports)
    if is_first_started():
        if as_json:
            click.echo(json.dumps({"same": same, "reports": [report.to_json() for report in reports]}, indent=2))
        else:
            for report in reports:
                print_report(report)
    if not same:
        sys.exit(1)


def _load(arguments: tuple[str, ...], *, needs_layout: bool) -> RunConfig:
    """The run; on one rank where its own layout does not suit it and is not needed."""
    try:
        return run_from(arguments)
    except ConfigError:
        if needs_layout:
            raise
        return run_from(arguments, layout=Layout())
