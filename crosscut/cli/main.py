"""The `crosscut` command: its subcommands, its error messages and its exit statuses."""

import errno
import os
import re
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
from crosscut.config.terminal import show_cursor

_SECONDS_UNTIL_STOPPED = 5.0

_OF_PLACES = frozenset(
    {
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.ENOTDIR,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
    }
)
"""Errors of the operating system that another path avoids. They are a user's mistake, whichever command meets them."""

_LONG_WORD = re.compile(r"(\S{150})\S{200,}(\S{50})")

EXIT_REQUEUE = 75
"""Exit status of a run that stopped at a scheduler's request and can be started again: `EX_TEMPFAIL` of sysexits.h."""

_EXIT_INTERRUPTED = 128 + signal.SIGINT


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="crosscut")
def commands() -> None:
    """Train transformers that are too big for one GPU. Every layer's matrices are sharded over several GPUs."""


for command in (plan, prepare, train, verify, evaluate, lm_eval, generate, serve, checkpoint, study):
    commands.add_command(command)


def main() -> None:
    """Run the command line and set the exit status.

    - 2 after a user's mistake, which is reported as one message. A path that cannot be used is such a mistake.
    - 1 after a failed rank. The rank's traceback is printed.
    - 75 after a training run that stopped at a scheduler's request and can be resumed.
    - 130 after Ctrl-C, also after a training run that has written a checkpoint because of Ctrl-C.
    - 128 + the signal's number after SIGTERM or SIGUSR1, unless the command handles the signal, as training does.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _terminated)
    try:
        commands.main(prog_name="crosscut", standalone_mode=False)
    except CrosscutError as error:
        _fail("" if error.is_told else f"crosscut: {error}", 2)
    except OSError as error:
        if error.errno not in _OF_PLACES or not isinstance(error.filename, str):
            raise
        _fail(
            f"crosscut: `{error.filename}` must be a path that this command can use, but is not: {error.strerror}. "
            "Choose another path.",
            2,
        )
    except RankFailure as failure:
        _fail(str(failure), 1)
    except RunStopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            click.echo(f"crosscut: {stopped}", err=True)
        sys.exit(_EXIT_INTERRUPTED if stopped.interrupted else EXIT_REQUEUE)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        show_cursor()  # a rank that was killed has left it hidden behind its progress bar
        _fail(
            "crosscut: Interrupted. To continue a training run from its last checkpoint, use --resume auto. To "
            "continue preparing a corpus, start the same command again.",
            _EXIT_INTERRUPTED,
        )


def _terminated(number: int, _frame: object) -> None:
    """Exit with a status instead of a traceback when a scheduler sends a signal."""
    sys.exit(128 + number)


def _fail(message: str, status: int) -> None:
    """Print the message once and exit. Under torchrun every rank fails in the same way, so the other ranks wait
    silently; torchrun normally stops them during that time. Very long words, such as a path of 100,000 characters, are
    shortened.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_SECONDS_UNTIL_STOPPED)
    if message:
        click.echo(_LONG_WORD.sub(r"\1...\2", message), err=True)
    sys.exit(status)
