"""`crosscut train`."""

from typing import Literal

import click

from crosscut.cli.arguments import has_file, on_devices_there, run_arguments, run_from


class _TrainCommand(click.Command):
    """Reads `--resume` as `--resume=newest` unless `auto` follows.

    An option of click with an optional value would take any word that follows, also the run's file or an override.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Give `--resume` its value where it has none, then parse."""
        end = args.index("--") if "--" in args else len(args)
        for place, following in enumerate([*args[1:end], ""][:end]):
            if args[place] == "--resume" and following != "auto":
                args = [*args[:place], "--resume=newest", *args[place + 1 :]]
        return super().parse_args(ctx, args)


@click.command(cls=_TrainCommand)
@run_arguments
@click.option(
    "--resume",
    type=click.Choice(["newest", "auto"]),
    metavar="[auto]",
    help="Go on from the newest checkpoint in the run's folder, on any layout. --resume auto also starts a run that "
    "has none yet and leaves a complete one as it is, so that a scheduler can repeat the same command.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="Record three steps after two of warm-up, then go on: a trace for ui.perfetto.dev, the shares of computing, "
    "communication and idling, the longest operators and the largest holders of memory, in the run's folder.",
)
def train(arguments: tuple[str, ...], resume: Literal["newest", "auto"] | None, profile: bool) -> None:
    """Train a model: raw text or token shards in, a trained model out.

    Without RUN.toml it is the demo: a small GPT-2 on the State of the Union addresses, over two tensor-parallel
    processes, which share the processor where there are no two GPUs. Any key can be set after it, such as
    data.text=book.txt layout.tensor=2 training.steps=500.

    It starts the processes that the layout asks for; under torchrun (torchrun ... -m crosscut train RUN.toml) it joins
    those that were started.

    On SIGTERM or SIGUSR1 it finishes its step, writes a checkpoint and exits with status 75.
    """
    run = run_from(arguments)
    from crosscut.training import run_training

    if not has_file(arguments) and not any(argument.startswith("layout.") for argument in arguments):
        run = on_devices_there(run)  # nobody asked for so many ranks
    run_training(run, resume="auto" if resume == "auto" else resume is not None, profile=profile)
