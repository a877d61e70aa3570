"""`crosscut show`."""

from functools import partial
from pathlib import Path

import click

from crosscut.cli.arguments import RunCommand, echo_json, file_option, has_file, run_arguments
from crosscut.cli.plan.asked import asked_run, with_vocabulary
from crosscut.cli.runs.named import RUN
from crosscut.config import ConfigError, RunConfig, load_layout
from crosscut.config.system.files import write_whole
from crosscut.config.system.terminal import echo


@click.command(cls=RunCommand)
@run_arguments(RUN)
@click.option("--layout", metavar="tensor=4,data=2", help="Use this layout instead of the run's own layout.")
@click.option("--layer", type=int, metavar="N", help="Show only the layer with this number, counted from 0.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
@file_option("--svg", metavar="FILE", help="Write a picture instead of printing.")
def show(arguments: tuple[str, ...], layout: str | None, layer: int | None, as_json: bool, svg: Path | None) -> None:
    """Show one layer on its ranks: each tensor's shape on one rank, where it is cut, and every message.

    FOLDER is the folder of a run or a Hugging Face folder. PRESET is the name of a preset, or its end, such as
    llama3-8b or 8.3B. A model that no file describes has a micro-batch of one sequence. Any key can be overridden, for
    example with training.micro_batch_size=4. Each distinct layer is shown once, between the embedding and the head. The
    command reads the description from which the planner counts, so it needs no device and no data. docs/show.md
    explains the signs.
    """
    from crosscut.planner.showing import lines, picture, shown

    run = with_vocabulary(_asked(arguments, layout))
    found = shown(run, device="cpu" if run.training.device == "cpu" else "cuda", layer=layer)
    if svg is not None:
        write_whole(svg, picture(found))
        echo(f"{svg}: a picture of the layers. Open it in a browser.", err=as_json)
    if as_json:
        echo_json(found.to_json())
    elif svg is None:
        for line in lines(found):
            echo(line)


def _asked(arguments: tuple[str, ...], layout: str | None) -> RunConfig:
    """Load the run that the arguments name. A run without a file has a micro-batch of one sequence."""
    if not arguments:
        raise ConfigError(
            f"`{RUN}` must name a model, but is missing. Try `crosscut show gpt2-small --layout tensor=4`."
        )
    if not has_file(arguments):
        arguments = ("training.micro_batch_size=1", *arguments)
    change = None if layout is None else partial(load_layout, layout)
    return asked_run(arguments, None, change_layout=change)
