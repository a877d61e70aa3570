"""`crosscut study`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from crosscut.cli.arguments import LocalPath, RunCommand, require_folder, run_arguments
from crosscut.config import ConfigError, write_whole
from crosscut.config.system.terminal import echo, new_console

if TYPE_CHECKING:
    from crosscut.planner.paper.sections import Report

_output = click.option(
    "--output",
    type=LocalPath(path_type=Path, file_okay=False),
    default=Path("scaling"),
    show_default=True,
    help="Folder for the report.",
)


@click.group()
def study() -> None:
    """Compare the planner's forecasts with measurements.

    `scaling` uses published measurements. `measure` measures on this machine.
    """


@study.command()
@_output
def scaling(output: Path) -> None:
    """Print and write a report of published scaling figures and forecasts.

    The report compares the planner's forecasts with the scaling figures of the Megatron-LM paper (arXiv 1909.08053),
    with the tables of Megatron-Core and torchtitan on H100 GPUs, and with the table of Narayanan et al. 2021 (arXiv
    2104.04473) on A100 GPUs. The report is written as Markdown and HTML.
    """
    require_folder("--output", output)
    from crosscut.planner.paper.study import scaling_report

    report = scaling_report()
    _show(report)
    _write(report, output, "scaling")


@study.command(cls=RunCommand)
@run_arguments()
@click.option(
    "--gpu",
    metavar="NAME|FILE",
    help="Also forecast each case for this device: a name such as h100-sxm, or a file written by `crosscut plan "
    "--calibrate`.",
)
@click.option(
    "--ranks", type=int, help="Maximum number of ranks.  [default: this machine's number of GPUs or cores, at most 8]"
)
@click.option(
    "--turns",
    type=int,
    default=15,
    show_default=True,
    help="Number of measured steps per case. A noisy machine needs more steps.",
)
@_output
def measure(arguments: tuple[str, ...], gpu: str | None, ranks: int | None, turns: int, output: Path) -> None:
    """Measure how training scales over the ranks of this machine.

    The command repeats the scaling study of the Megatron-LM paper (arXiv 1909.08053) and writes the measured times as
    Markdown, HTML and JSON. The study measures weak scaling over tensor ranks, weak scaling over tensor x data ranks,
    strong scaling over tensor, pipeline and context ranks, and one process that uses all cores. The ranks run on GPUs
    if this machine has several GPUs, and otherwise on CPU cores. The study uses a small model of the paper's shape, or
    the model of RUN.toml. Any key can be overridden, for example with training.sequence_length=256.
    docs/scaling-measured.md is an example of the report.
    """
    if turns < 1:
        raise ConfigError(f"`--turns` must be at least 1, but is {turns}.")
    require_folder("--output", output)  # fail before minutes of work, not after
    from crosscut.scaling.study import measured_study

    results = measured_study(arguments, gpu=gpu, ranks=ranks, turns=turns)
    from crosscut.scaling.measured_report import measured_report

    write_whole(output / "scaling-measured.json", results.to_json())
    echo(output / "scaling-measured.json")
    report = measured_report(results)
    _show(report)
    _write(report, output, "scaling-measured")


def _write(report: "Report", output: Path, name: str) -> None:
    from crosscut.planner.paper.sections import to_html, to_markdown

    for path, text in ((output / f"{name}.md", to_markdown(report)), (output / f"{name}.html", to_html(report))):
        write_whole(path, text)
        echo(path)


def _show(report: "Report") -> None:
    from rich import box
    from rich.table import Table

    console = new_console()
    for section in report.sections:
        table = Table(*section.header, title=section.title, title_justify="left", box=box.SIMPLE, pad_edge=False)
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
