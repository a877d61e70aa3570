"""`crosscut verify`."""

import json
import sys

import click

from crosscut.cli.arguments import run_arguments, run_from
from crosscut.config import Layout, LayoutError, load_layout
from crosscut.config.precision import PRECISIONS


@click.command()
@run_arguments
@click.option("--layout", "layouts", multiple=True, metavar="tensor=4,data=2", help="Instead of the run's; repeatable.")
@click.option("--layers", type=click.IntRange(min=1), help="Scale the model down to this many layers.")
@click.option("--hidden", type=click.IntRange(min=1), help="Scale the model down to this hidden size.")
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
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
    sent. Names the first module that differs, and exits with 1 if one does. It needs no data. Says at the end what of
    the run was in the step (recomputation, offload, accumulation) and what was not (its precision, compiled layers).
    """
    asked = [load_layout(text) for text in layouts]
    try:
        run = run_from(arguments)
    except LayoutError:
        if not asked:
            raise
        run = run_from(arguments, layout=Layout())  # the run's own need not suit the model
    from crosscut.parallel.processes import is_first_started
    from crosscut.verification import for_verification, print_report, scale_down, verify_runs, with_scope

    small = scale_down(run, num_layers=layers, hidden_size=hidden)
    runs = [for_verification(small, layout, precision) for layout in asked or [run.layout]]
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
