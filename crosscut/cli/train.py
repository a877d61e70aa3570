"""`crosscut train`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import click

from crosscut.cli.arguments import RunCommand, has_file, on_devices_there, run_arguments, run_from
from crosscut.config.axes import OPTIONS
from crosscut.watch.beside import page_beside

_SIZES = tuple(f"layout.{option}=" for option in OPTIONS)


class _TrainCommand(RunCommand):
    """Command that reads `--resume` as `--resume=newest` unless the next word is `auto`.

    click alone would take the next word as the value of `--resume`, even if the word is the run's file or an override.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert an explicit value for `--resume` before click parses the arguments."""
        end = args.index("--") if "--" in args else len(args)
        for place, following in enumerate([*args[1:end], ""][:end]):
            if args[place] == "--resume" and following != "auto":
                args = [*args[:place], "--resume=newest", *args[place + 1 :]]
        return super().parse_args(ctx, args)


@click.command(cls=_TrainCommand)
@run_arguments()
@click.option(
    "--resume",
    type=click.Choice(["newest", "auto"]),
    metavar="[auto]",
    help="Continue from the newest checkpoint in the run's folder, on any layout. --resume auto starts the run if it "
    "has no checkpoint, and does nothing if the run is complete, so that a scheduler can repeat the same command.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="Profile seven steps after three warm-up steps, then continue training. The run's folder then holds "
    "a trace for ui.perfetto.dev, the shares of compute, communication and idle time, the slowest operators, the "
    "memory peak, and time, FLOPs, parameters and share of the peak rate of each part of each layer.",
)
@click.option("--watch", is_flag=True, help="Show the run in the browser while it trains, as `crosscut watch` does.")
def train(arguments: tuple[str, ...], resume: Literal["newest", "auto"] | None, profile: bool, watch: bool) -> None:
    """Train a model from raw text or token shards.

    Without RUN.toml, the command trains the demo: a small model on tales for children, on two tensor-parallel
    ranks. The ranks share the CPU if there are fewer than two GPUs; with layout.tensor=1, the demo uses one GPU. Any
    key can be overridden, for example with data.text=book.txt layout.tensor=2 training.steps=500. With data.text or
    data.tokens, only the recipe and the model come from the demo, and with model.preset neither of them. All other
    settings have their usual defaults: one rank, on the GPU if there is one.

    The command starts the processes that the layout needs. Under torchrun (torchrun ... -m crosscut train RUN.toml),
    the command joins the processes that torchrun started.

    On SIGTERM or SIGUSR1, the run finishes the current step, writes a checkpoint and exits with status 75.
    """
    run = run_from(arguments)
    from crosscut.training import run_training

    if not has_file(arguments) and not any(argument.startswith(_SIZES) for argument in arguments):
        run = on_devices_there(run, "Add layout.tensor=1 to train on a GPU.")  # the user did not ask for two ranks
    with page_beside(Path(run.output.folder)) if watch else nullcontext():
        run_training(run, resume="auto" if resume == "auto" else resume is not None, profile=profile)
