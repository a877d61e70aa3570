"""`crosscut verify`."""

import dataclasses
import sys

import click

from crosscut.cli.arguments import RunCommand, echo_json, on_devices_there, run_arguments, run_from
from crosscut.config import Layout, RunConfig, load_layout
from crosscut.config.precision import PRECISIONS


@click.command(cls=RunCommand)
@run_arguments()
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    metavar="tensor=4,data=2",
    help="Numbers of ranks to verify instead of the run's own; repeatable. Axes that are left out have one rank. Other "
    "settings of the layout, such as sharding, are those of the run, unless they are given here.",
)
@click.option("--layers", type=click.IntRange(min=1), help="Reduce the model to this many layers.")
@click.option("--hidden", type=click.IntRange(min=1), help="Reduce the model to this hidden size.")
@click.option(
    "--precision",
    type=click.Choice([str(precision) for precision in PRECISIONS]),
    default="float64",
    show_default=True,
    help="Precision of the verified step, instead of the run's precision. Only float64 gives a proof. The "
    "other precisions reveal only larger errors.",
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
    """Prove that a layout trains the same model as a single process.

    The command runs one training step of the run's model in one process, and the same step on the layout. The command
    compares every module's output and gradient, every parameter's gradient and update, the replicas on all ranks, the
    random numbers, and the messages. The report names the first module that differs, and the exit status is 1 if
    anything differs. The command needs no data. The last lines of the report list the options of the run that the step
    covered (such as recomputation, offload and accumulation) and the options that the step did not cover (such as the
    run's precision and compiled layers).
    """
    run, asked = _load(arguments, layouts)
    from crosscut.launch.processes import is_first_started
    from crosscut.verification import for_verification, print_report, scale_down, verify_runs, with_scope

    small = scale_down(dataclasses.replace(run, layout=Layout()), num_layers=layers, hidden_size=hidden)
    runs = [on_devices_there(for_verification(small, layout, precision)) for layout in asked]
    reports = [with_scope(report, asked=run, verified=on) for report, on in zip(verify_runs(runs), runs, strict=True)]
    same = all(report.same for report in reports)
    if is_first_started():
        if as_json:
            echo_json({"same": same, "reports": [report.to_json() for report in reports]})
        else:
            for report in reports:
                print_report(report)
    if not same:
        sys.exit(1)


def _load(arguments: tuple[str, ...], texts: tuple[str, ...]) -> tuple[RunConfig, list[Layout]]:
    """Load the run and the layouts to verify: the run's own layout, or the layouts in `texts`. In the second case, the
    run's own layout need not suit its model, and the run is loaded with a layout of one rank.
    """
    if not texts:
        run = run_from(arguments)
        return run, [run.layout]
    own: list[Layout] = []

    def on_one_rank(layout: Layout) -> Layout:
        own.append(layout)
        return Layout()

    run = run_from(arguments, change_layout=on_one_rank)
    return run, [load_layout(text, like=own[0]) for text in texts]
