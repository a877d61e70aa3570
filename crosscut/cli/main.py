"""The `crosscut` command and how it shows what went wrong."""

import os
import signal
import sys
import time

import click

from crosscut import __version__
from crosscut.cli.checkpoint import checkpoint
from crosscut.cli.evaluate import evaluate
from crosscut.cli.generate import generate
from crosscut.cli.lm_eval import lm_eval
from crosscut.cli.plan.command import plan
from crosscut.cli.prepare import prepare
from crosscut.cli.serve import serve
from crosscut.cli.study import study
from crosscut.cli.train import train
from crosscut.cli.verify import verify
from crosscut.config import CrosscutError, RankFailure, RunStopped

_SECONDS_UNTIL_STOPPED = 5.0

EXIT_REQUEUE = 75
"""The run has stopped as a scheduler asked and is to be started again: `EX_TEMPFAIL` of sysexits.h."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="crosscut")
def commands() -> None:
    """Train transformers too big for one GPU by cutting every layer's matrices."""


for command in (plan, prepare, train, verify, evaluate, lm_eval, generate, serve, checkpoint, study):
    commands.add_command(command)


def main() -> None:
    """Run the command line: a user's mistake is one message and exit status 2, a failed rank its traceback and 1.

    A run that was asked to stop and can be gone on with exits with 75; what SIGTERM or SIGUSR1 ended otherwise, and
    has nothing to save, with 128 + the signal's number.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _terminated)
    try:
        commands.main(prog_name="crosscut", standalone_mode=False)
    except CrosscutError as error:
        _fail("" if error.is_told else f"crosscut: {error}", 2)
    except RankFailure as failure:
        _fail(str(failure), 1)
    except RunStopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            click.echo(f"crosscut: {stopped}", err=True)
        sys.exit(EXIT_REQUEUE)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail(
            "crosscut: Interrupted. A training run goes on from its last checkpoint with --resume auto, a corpus where "
            "it stopped.",
            130,
        )


def _terminated(number: int, _frame: object) -> None:
    """End with an exit status instead of a traceback when a scheduler asks for it."""
    sys.exit(128 + number)


def _fail(message: str, status: int) -> None:
    """Print the message, unless it is empty, and exit with a status.

    Under torchrun every rank may fail alike. The first rank prints at once; the others wait, and are stopped by then.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_SECONDS_UNTIL_STOPPED)
    if message:
        click.echo(message, err=True)
    sys.exit(status)
