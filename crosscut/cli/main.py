"""The `crosscut` command and how it shows what went wrong."""

import os
import signal
import sys
import time

import click

from crosscut import __version__
from crosscut.cli.checkpoint import checkpoint
from crosscut.cli.generate import generate
from crosscut.cli.prepare import prepare
from crosscut.cli.train import train
from crosscut.config import CrosscutError, RankFailure

_SECONDS_UNTIL_STOPPED = 5.0


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="crosscut")
def commands() -> None:
    """Train transformers too big for one GPU by cutting every layer's matrices."""


for command in (prepare, train, generate, checkpoint):
    commands.add_command(command)


def main() -> None:
    """Run the command line: a user's mistake is one message and exit status 2, a failed rank its traceback and 1."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        commands.main(prog_name="crosscut", standalone_mode=False)
    except CrosscutError as error:
        _fail(f"crosscut: {error}", 2)
    except RankFailure as failure:
        _fail(str(failure), 1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("crosscut: Interrupted. A training run goes on from its last checkpoint with --resume.", 130)


def _terminated(*_: object) -> None:
    """End with a message instead of a traceback when a scheduler asks for it."""
    sys.exit(143)


def _fail(message: str, status: int) -> None:
    """Print once, though under torchrun every rank fails alike: the others wait to be stopped by then."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_SECONDS_UNTIL_STOPPED)
    click.echo(message, err=True)
    sys.exit(status)
