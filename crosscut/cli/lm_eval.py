"""`crosscut lm-eval`."""

import click


@click.command("lm-eval", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """EleutherAI's own command, with `crosscut` among its models, on as many ranks as --model_args asks for."""
    from crosscut.harness import run_command

    run_command(arguments)
