"""`crosscut lm-eval`."""

import click


@click.command("lm-eval", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """Run EleutherAI's own command with the additional model `crosscut`, on the number of ranks in --model_args."""
    from crosscut.harness import run_command

    run_command(arguments)
