"""`crosscut train`."""

import click

from crosscut.cli.arguments import run_arguments, run_from


@click.command()
@run_arguments
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in the run's folder, on any layout.")
def train(arguments: tuple[str, ...], resume: bool) -> None:
    """Train a model: raw text or token shards in, a trained model out.

    Without RUN.toml it is the demo: a small GPT-2 on the State of the Union addresses, over two tensor-parallel
    processes. Any key can be set after it, such as data.text=book.txt layout.tensor=2 training.steps=500.

    It starts the processes that the layout asks for; under torchrun (torchrun ... -m crosscut train RUN.toml) it joins
    those that were started.
    """
    run = run_from(arguments)
    from crosscut.training import run_training

    run_training(run, resume=resume)
