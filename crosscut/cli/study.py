"""`crosscut study`."""

from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from crosscut.cli.arguments import LocalPath, RunCommand, require_folder, run_arguments, task_files, task_option
from crosscut.config import ConfigError, write_whole
from crosscut.config.checks import require_at_least
from crosscut.config.system.terminal import echo, new_console

if TYPE_CHECKING:
    from crosscut.planner.paper.sections import Report

_Command = TypeVar("_Command", bound=Callable[..., object])

_FILES = "[SIZE.toml ...]"


def _output(default: str, text: str = "Folder for the report.") -> Callable[[_Command], _Command]:
    """Add the option `--output`."""
    folder = LocalPath(path_type=Path, file_okay=False)
    return click.option("--output", type=folder, default=Path(default), show_default=True, help=text)


_at_once = click.option("--at-once", default=1, show_default=True, help="Number of runs that train at the same time.")


@click.group()
def study() -> None:
    """Repeat the paper's studies.

    `scaling` compares published measurements with the planner's forecasts. `measure` measures scaling on this machine.
    `rate` finds a learning rate for each size of a model. `quality` compares what the sizes learn.
    """


@study.command()
@_output("scaling")
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
@_output("scaling")
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


@study.command(cls=RunCommand)
@run_arguments(_FILES)
@click.option("--seeds", default=3, show_default=True, help="Number of runs of each size, with different seeds.")
@task_option
@click.option(
    "--rates",
    type=LocalPath(path_type=Path),
    metavar="FILE",
    help="File `rates.json` of `crosscut study rate`, with a learning rate for each size.  [default: the run files']",
)
@_at_once
@_output("quality", "Folder for the report, the tokens and the runs.")
def quality(
    arguments: tuple[str, ...], seeds: int, tasks: tuple[str, ...], rates: Path | None, at_once: int, output: Path
) -> None:
    """Compare what models of different sizes learn from the same data.

    The command repeats Figure 7 and Table 5 of the Megatron-LM paper (arXiv 1909.08053): it trains every size with
    several seeds on the same tokens, and compares the validation perplexity and the scores of WikiText-103 and LAMBADA.
    Each run file is a size, named after the file, and all must have the same data and steps. Without files, there are
    three sizes of GPT-2: small, medium and large. Overrides apply to all sizes.

    The runs lie in the output's folder `runs`; `crosscut watch` shows them. A run is a `crosscut train`. If the command
    is stopped, start it again: finished runs are kept, and the others continue from their last checkpoints. The report
    is written as Markdown, HTML and JSON, with a picture.
    """
    _require_counts(seeds=seeds, at_once=at_once)
    files = task_files(tasks)
    _require_own_ranks("quality")
    require_folder("--output", output)
    from crosscut.scaling.quality.figure import draw_quality
    from crosscut.scaling.quality.report import quality_report
    from crosscut.scaling.quality.study import quality_study

    results = quality_study(arguments, seeds=seeds, tasks=files, rates=rates, at_once=at_once, output=output)
    _show(report := quality_report(results, draw_quality(results, output / "quality.png")))
    _write(report, output, "quality")


@study.command(cls=RunCommand)
@run_arguments(_FILES)
@click.option(
    "--rates",
    default="1e-3,2e-3,4e-3,8e-3,1.6e-2",
    show_default=True,
    metavar="RATE,...",
    help="Learning rates to try.",
)
@click.option(
    "--share", default=0.2, show_default=True, help="Length of a run that tries a rate, as a share of the run's steps."
)
@_at_once
@_output("rate", "Folder for the report, the tokens and the runs.")
def rate(arguments: tuple[str, ...], rates: str, share: float, at_once: int, output: Path) -> None:
    """Find a learning rate for each size of a model by short runs.

    Every size is trained with every rate, for a share of the steps. The best rate has the lowest validation loss. The
    warm-up and the decay of a short run are shorter by the same share. Each run file is a size, as in `crosscut study
    quality`. The report is written as Markdown, HTML and JSON. `crosscut study quality --rates rate/rates.json` uses
    the rates that were found.

    If the command is stopped, start it again: finished runs are kept, and the others continue.
    """
    _require_counts(at_once=at_once)
    tried = _rates_of(rates)
    if not 0 < share <= 1:
        raise ConfigError(f"`--share` must be above 0 and at most 1, but is {share:g}. Try 0.2.")
    _require_own_ranks("rate")
    require_folder("--output", output)
    from crosscut.scaling.quality.rates import describe_choice, rate_study
    from crosscut.scaling.quality.report import rate_report

    results = rate_study(arguments, rates=tried, share=share, at_once=at_once, output=output)
    _show(report := rate_report(results))
    for size in results.sizes:
        echo(describe_choice(size))
    _write(report, output, "rates")


def _rates_of(text: str) -> list[float]:
    """Parse the learning rates to try. Raises `ConfigError` unless they are at least two different positive numbers."""
    try:
        rates = {float(part) for part in text.split(",")}
    except ValueError:
        rates = set()
    if len(rates) < 2 or not all(0 < rate < inf for rate in rates):
        raise ConfigError(
            f"`--rates` must be at least two positive numbers with commas between them, but is `{text}`. Try 1e-3,2e-3."
        )
    return sorted(rates)


def _require_counts(**counts: int) -> None:
    for name, count in counts.items():
        require_at_least(f"--{name.replace('_', '-')}", count, 1)


def _require_own_ranks(command: str) -> None:
    """Raise `ConfigError` if torchrun has started this process: the runs of a study start their ranks themselves."""
    from crosscut.launch.processes import was_started

    if was_started():
        raise ConfigError(
            f"`crosscut study {command}` must start its ranks itself, but torchrun has started several. Run the "
            "command without torchrun."
        )


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
