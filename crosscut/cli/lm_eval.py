"""`crosscut lm-eval`."""

import click


@click.command("lm-eval", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """Run EleutherAI's lm-eval on a Crosscut model.

    The arguments are lm-eval's own. `--model crosscut` selects a Crosscut model, and
    `--model_args pretrained=runs/demo,tensor=2` names the model's folder and the number of ranks.
    """
    from crosscut.harness import run_command

    run_command(arguments)
