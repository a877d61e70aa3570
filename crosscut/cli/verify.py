"""`crosscut verify`."""

import dataclasses
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from crosscut.cli.arguments import (
    LocalPath,
    OptionValue,
    RunCommand,
    echo_json,
    on_devices_there,
    run_arguments,
    run_from,
)
from crosscut.config import ConfigError, Layout, RunConfig, load_layout
from crosscut.config.precision import PRECISIONS
from crosscut.config.system.terminal import echo
from crosscut.config.teachers.matching import require_teachable

if TYPE_CHECKING:
    from crosscut.verification import LayoutReport
    from crosscut.verification.foreign.cuts import Cut

_WIDEST = "float64"


class _OfModule(NamedTuple):
    """Options for a module of one's own."""

    module: str | None
    cut: str | None
    plan: Path | None
    seconds: float | None


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
    default=_WIDEST,
    show_default=True,
    help="Precision of the verified step, instead of the run's precision. Only float64 gives a proof. The "
    "other precisions reveal only larger errors.",
)
@click.option(
    "--module",
    metavar="package.module:build",
    help="Verify a module of your own instead of a run. The function returns the module, its keyword inputs and a "
    "function that makes a loss of its output.",
)
@click.option(
    "--cut",
    metavar="package.module:function",
    help="Function that cuts the module of `--module`, given the module and the mesh of the ranks.",
)
@click.option(
    "--plan",
    type=LocalPath(path_type=Path),
    metavar="plan.toml",
    help="Plan by which Crosscut cuts the module of `--module`, instead of `--cut`.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    help="Time that the proof of a module on a layout may take.  [default: 600]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the reports as JSON.")
def verify(arguments: tuple[str, ...], layouts: tuple[str, ...], as_json: bool, **options: OptionValue) -> None:
    """Prove that a layout trains the same model as a single process.

    The command runs one training step of the run's model in one process, and the same step on the layout. The command
    compares every module's output and gradient, every parameter's gradient and update, the replicas on all ranks, the
    random numbers, and the messages. The report names the first module that differs, and the exit status is 1 if
    anything differs. The command needs no data. The last lines of the report list the options of the run that the step
    covered (such as recomputation, offload and accumulation) and the options that the step did not cover (such as the
    run's precision and compiled layers).

    With --module and --cut, the command proves a module that other code cuts, for example PyTorch's parallelize_module.
    The command imports this code and runs it with your rights, in processes with a limit on time and memory. Verify
    only code that you trust. With --module and --plan, Crosscut itself cuts the module, as the plan says.
    """
    of_module = _OfModule(**{name: options.pop(name) for name in _OfModule._fields})
    if of_module.module:
        reports = _prove_module(arguments, layouts, of_module, is_quiet=as_json, of_runs=options)
    elif unused := [f"`--{name}`" for name, value in of_module._asdict().items() if value is not None]:
        raise ConfigError(f"{unused[0]} must be given together with `--module`, which is missing. Add `--module`.")
    else:
        reports = _verify_runs(arguments, layouts, **options)
    _tell(reports, as_json=as_json)


def _tell(reports: "list[LayoutReport]", *, as_json: bool) -> None:
    """Print the reports on the first rank, and exit with status 1 if anything differs."""
    from crosscut.launch.processes import is_first_started
    from crosscut.verification import print_report

    same = all(report.same for report in reports)
    if is_first_started():
        if as_json:
            echo_json({"same": same, "reports": [report.to_json() for report in reports]})
        else:
            for report in reports:
                print_report(report)
    if not same:
        sys.exit(1)


def _verify_runs(
    arguments: tuple[str, ...], layouts: tuple[str, ...], *, layers: int | None, hidden: int | None, precision: str
) -> "list[LayoutReport]":
    run, asked = _load(arguments, layouts)
    from crosscut.verification import for_verification, scale_down, verify_runs, with_scope

    small = scale_down(dataclasses.replace(run, layout=Layout()), num_layers=layers, hidden_size=hidden)
    runs = [on_devices_there(for_verification(small, layout, precision)) for layout in asked]
    for each in (run, *runs):  # the lengths of the run, and the layouts of the verified runs
        require_teachable(each)
    return [with_scope(report, asked=run, verified=on) for report, on in zip(verify_runs(runs), runs, strict=True)]


def _prove_module(
    arguments: tuple[str, ...],
    layouts: tuple[str, ...],
    asked: _OfModule,
    *,
    is_quiet: bool,
    of_runs: Mapping[str, OptionValue],
) -> "list[LayoutReport]":
    """Prove the cut of a module on each layout. Raises `ConfigError` or `LayoutError` before a rank starts."""
    given = [*arguments, *(f"--{name}" for name, value in of_runs.items() if value not in (None, _WIDEST))]
    if given:
        raise ConfigError(f"`--module` must be given without a run's arguments, but `{given[0]}` is one. Remove it.")
    if asked.cut is None and asked.plan is None:
        raise ConfigError(
            "`--cut` must name the function that cuts the module, but is missing. Add `--cut`, or `--plan` with the "
            "file of a plan."
        )
    if asked.cut is not None and asked.plan is not None:
        raise ConfigError("`--cut` must be given without `--plan`, but both are given. Remove one of the two.")
    if not layouts:
        raise ConfigError("`--layout` must say how many ranks share the module, but is missing. Add --layout tensor=2.")
    from crosscut.verification import prove_module
    from crosscut.verification.foreign.cuts import require_sharing_ranks
    from crosscut.verification.foreign.limits import SECONDS
    from crosscut.verification.foreign.naming import NamedFunction

    on = [load_layout(text) for text in layouts]
    for layout in on:
        require_sharing_ranks(layout)
    build = NamedFunction("--module", str(asked.module), str(Path.cwd()))
    cut = _cutting(asked, on, is_quiet=is_quiet)
    limit = asked.seconds or SECONDS
    code = " and ".join(f"`{name}`" for name in (asked.module, asked.cut) if name)
    echo(f"Running {code} with your rights, for at most {limit:g} s on each layout.", err=True)
    build.load()
    return [prove_module(build, cut, layout, seconds=limit) for layout in on]


def _cutting(asked: _OfModule, layouts: list[Layout], *, is_quiet: bool) -> "Cut":
    """Return the function that cuts the module: the named one, or Crosscut's own with a plan, which is printed."""
    from crosscut.launch.processes import is_first_started
    from crosscut.verification.foreign.naming import NamedFunction

    if asked.plan is None:
        function = NamedFunction("--cut", str(asked.cut), str(Path.cwd()))
        function.load()
        return function
    from crosscut import cutting

    plan = cutting.read_plan(asked.plan)
    for layout in layouts:
        plan.values(layout.tensor)
        plan.require_context(layout.context)
    if not is_quiet and is_first_started():
        cutting.print_plan(plan)
    return partial(cutting.cut, plan=plan)


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
