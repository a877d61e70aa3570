"""The `crosscut` command and how it shows what went wrong."""

import sys

import click

from crosscut import __version__
from crosscut.cli.generate import generate
from crosscut.cli.prepare import prepare
from crosscut.cli.train import train
from crosscut.config import CrosscutError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="crosscut")
def commands() -> None:
    """Train transformers too big for one GPU by cutting every layer's matrices."""


for command in (prepare, train, generate):
    commands.add_command(command)


def main() -> None:
    """Run the command line: a user's mistake is one message and exit status 2, a failed rank its traceback and 1."""
    try:
        commands.main(prog_name="crosscut", standalone_mode=False)
    except CrosscutError as error:
        _fail(str(error), 2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("Interrupted. A run goes on from its last checkpoint with --resume.", 130)
    except Exception as error:
        if type(error).__name__ != "RankFailure":  # compared by name, so that --help needs no torch
            raise
        _fail(str(error), 1)


def _fail(message: str, status: int) -> None:
    click.echo(f"crosscut: {message}", err=True)
    sys.exit(status)
