"""`crosscut verify`."""

import json
import sys

import click

from crosscut.cli.arguments import run_arguments, run_from
from crosscut.config import load_layout
from crosscut.config.precision import OF_MODELS

"""With float8 products the rounding of one element is as large as many a fault, so that nothing would be proven."""


@click.command()
@run_arguments
@click.option("--layout", "layouts", multiple=True, metavar="tensor=4,data=2", help="Instead of the run's; repeatable.")
@click.option("--layers", type=click.IntRange(min=1), help="Scale the model down to this many layers.")
@click.option("--hidden", type=click.IntRange(min=1), help="Scale the model down to this hidden size.")
@click.option("--precision", type=click.Choice(OF_MODELS), default="float64", show_default=True)
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
    sent. Names the first module that differs, and exits with 1 if one does. It needs no data.
    """
    run = run_from(arguments)
    from crosscut.parallel.processes import is_first_started
    from crosscut.verification import for_verification, print_report, scale_down, verify_runs

    run = scale_down(run, num_layers=layers, hidden_size=hidden)
    chosen = [load_layout(text) for text in layouts] or [run.layout]
    reports = verify_runs([for_verification(run, layout, precision) for layout in chosen])
    same = all(report.same for report in reports)
    if is_first_started():
        if as_json:
            click.echo(json.dumps({"same": same, "reports": [report.to_json() for report in reports]}, indent=2))
        else:
            for report in reports:
                print_report(report)
    if not same:
        sys.exit(1)
