"""`crosscut prepare`."""

from pathlib import Path

import click

from crosscut.cli.arguments import run_arguments, run_from


@click.command()
@run_arguments
def prepare(arguments: tuple[str, ...]) -> None:
    """Make a run's token shards from its raw text, without training.

    `train` does the same by itself when they are not there; a cluster's run wants them made beforehand.
    """
    run = run_from(arguments)
    from crosscut.data import prepare as prepare_tokens

    tokens = prepare_tokens(run.data, Path(run.tokens_folder), seed=run.training.seed)
    num_training = sum(shard.num_tokens for shard in tokens.train)
    click.echo(
        f"{tokens.path}: {num_training:,} training and {tokens.validation.num_tokens:,} validation tokens, "
        f"vocabulary {tokens.vocab_size:,}."
    )
