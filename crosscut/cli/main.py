"""The `crosscut` command: its subcommands, its error messages and its exit statuses."""

import errno
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO
from itertools import chain
from typing import NoReturn, TextIO

import click

from crosscut import __version__
from crosscut.cli.checkpoint import checkpoint
from crosscut.cli.embed import embed
from crosscut.cli.evaluate import evaluate
from crosscut.cli.finetune import finetune
from crosscut.cli.generate import generate
from crosscut.cli.lm_eval import lm_eval
from crosscut.cli.new.command import new
from crosscut.cli.plan.command import plan
from crosscut.cli.plan.show import show
from crosscut.cli.prepare import prepare
from crosscut.cli.runs.doctor import doctor
from crosscut.cli.runs.metrics import metrics
from crosscut.cli.runs.watch import watch
from crosscut.cli.serve import serve
from crosscut.cli.study import study
from crosscut.cli.train import train
from crosscut.cli.verify import verify
from crosscut.config import ConfigError, CrosscutError, DamagedError, OutputClosed, RankFailure, RunStopped
from crosscut.config.checks import is_text, require_text
from crosscut.config.system.terminal import echo, printable, show_cursor

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
        errno.EFBIG,
        errno.EIO,
    }
)
"""Errors of the operating system that the user can avoid by giving another path. They are reported as mistakes of the
user."""

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of writing that end when there is more room. Python does not always know the name of the file."""

_LEAST_ADDRESS_SPACE = 1_500_000_000
"""Address space in bytes below which PyTorch, or a library that PyTorch loads, may end the process without an error."""

_TO_CONTINUE = {
    "train": " To continue the run from its last checkpoint, if it has one, use --resume auto.",
    "finetune": " To continue the run from its last checkpoint, if it has one, use --resume.",
    "prepare": " To continue preparing, start the same command again.",
}
"""Sentence for each command that can continue what an earlier process began."""

_LONG_WORD = re.compile(r"(\S{150})\S{200,}(\S{50})")

EXIT_REQUEUE = 75
"""Exit status of a run that a scheduler stopped and can start again: `EX_TEMPFAIL` of sysexits.h."""

EXIT_DAMAGED = 65
"""Exit status after damaged files: `EX_DATAERR` of sysexits.h."""

_EXIT_INTERRUPTED = 128 + signal.SIGINT

_EXIT_PIPE = 128 + signal.SIGPIPE


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="crosscut")
def commands() -> None:
    """Train transformers that are too big for one GPU. Every layer's matrices are sharded over several GPUs."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < _LEAST_ADDRESS_SPACE:
        raise ConfigError(
            f"`ulimit -v` must allow at least {_LEAST_ADDRESS_SPACE / 1e9} GB of address space, but allows "
            f"{limit / 1e9:.2g} GB. Raise the limit: ulimit -v unlimited"
        )


for command in (
    new,
    plan,
    show,
    prepare,
    train,
    finetune,
    verify,
    evaluate,
    lm_eval,
    generate,
    embed,
    serve,
    checkpoint,
    study,
):
    commands.add_command(command)
for command in (doctor, metrics, watch):
    commands.add_command(command)


def main() -> None:
    """Run the command line and set the exit status.

    - 2 after a user's mistake, such as a path that cannot be used. One message is printed.
    - 65 after a damaged file, unless the damage is allowed. On a terminal, the message is red.
    - 1 after a failed rank, whose traceback is printed, and after any other error. Control characters in a traceback
      are escaped, because the error's message may contain untrusted text.
    - 75 after a training run that stopped at a scheduler's request and can be resumed.
    - 130 after Ctrl-C, also after a training run that has written a checkpoint because of Ctrl-C.
    - 128 + the signal's number after SIGTERM or SIGUSR1, unless the command handles the signal, as training does.
    - 141 after the reader of the output has gone, as in `crosscut plan --list | head`. No message is printed. A shell
      reports this status for a program that SIGPIPE ended.

    With `--json`, the message is a JSON object with the key `error`, on the standard output.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _terminated)
    try:
        _run()
    except OutputClosed:
        for stream in (sys.stdout, sys.stderr):
            if _is_unread(stream):  # or Python reports at exit that it cannot write the rest
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(_EXIT_PIPE)


def _run() -> None:
    try:
        _require_text(sys.argv[1:])
        commands.main(prog_name="crosscut", standalone_mode=False)
    except SystemExit as stop:
        if stop.code == 1 and _is_unread(sys.stdout):  # click could not print, for example a help
            raise OutputClosed from None
        raise
    except OutputClosed:
        raise
    except BaseException as error:  # panics of Rust libraries are not subclasses of `Exception`
        _end(error)


def _is_unread(stream: TextIO) -> bool:
    """Whether a stream is a pipe whose reader has gone."""
    state = select.poll()
    with suppress(OSError):  # the stream is no file, as in a test
        state.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in state.poll(0))


def _end(error: BaseException) -> NoReturn:
    """Report an error and exit with its status."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, KeyboardInterrupt):
        error = error.__cause__  # Python before 3.12 replaces a Ctrl-C in the body of a class by an error of its own
    match error:
        case CrosscutError(is_told=True):
            _fail(error, 2, "")
        case Exception() if not isinstance(error, RankFailure) and (message := _told_by_system(error)):
            _fail(error, 2, message)
        case CrosscutError():
            _fail(error, EXIT_DAMAGED if isinstance(error, DamagedError) else 2, str(error))
        case RankFailure():
            _fail(error, 1, str(error), begin="")
        case RunStopped():
            if os.environ.get("RANK", "0") == "0":
                echo(f"crosscut: {error}", err=True)
            sys.exit(_EXIT_INTERRUPTED if error.interrupted else EXIT_REQUEUE)
        case click.ClickException():
            if _wants_json():
                _fail(error, error.exit_code, error.format_message())
            error.show(text := StringIO())
            echo(_shortened(text.getvalue()), err=True, nl=False)
            sys.exit(error.exit_code)
        case click.Abort() | KeyboardInterrupt():
            show_cursor()  # the progress bar of a killed rank has left the cursor hidden
            _fail(error, _EXIT_INTERRUPTED, f"Interrupted.{_to_continue()}")
    if os.environ.get("WORLD_SIZE", "1") != "1":  # Slurm shows the lines of all ranks in one log
        echo(f"Rank {os.environ.get('RANK', 'unknown')} on {socket.gethostname()} has failed:", err=True)
    echo("".join(traceback.format_exception(error)), err=True, nl=False)  # escaped, as the message may be untrusted
    sys.last_value = error  # as for an uncaught error, so that `launch.processes` does not destroy the process group
    sys.exit(1)


def _told_by_system(error: Exception) -> str:
    """Message about an error that the operating system caused. Empty for any other error."""
    if limited := _at_limit_on_files(error):
        name = getattr(limited, "filename", None)
        return (
            f"A process must be able to open more files than `ulimit -n` allows "
            f"({resource.getrlimit(resource.RLIMIT_NOFILE)[0]}){f', but could not open `{name}`' if name else ''}. "
            f"Raise the limit: ulimit -n 4096.{_to_continue()}"
        )
    match error:
        case CrosscutError():
            return ""
        case MemoryError() | OSError(errno=errno.ENOMEM):
            return (
                "There must be enough memory for this command, but there is not. Free some memory, or raise the limits "
                f"on memory (`ulimit -v`, or that of the container).{_to_continue()}"
            )
        case OSError(filename=str(name)) if error.errno in _OF_PLACES:
            remedy = "Free some space, or choose another path." if error.errno in _NO_ROOM else "Choose another path."
            return f"`{name}` must be a path that this command can use, but is not: {error.strerror}. {remedy}"
        case OSError() if error.errno in _NO_ROOM:
            return f"Everything must be written, but writing failed: {error.strerror}. Free some space.{_to_continue()}"
        case ValueError() if "null byte" in str(error):
            return "A path must not contain a NUL character, but the given path does. Choose another path."
    return ""


def _to_continue() -> str:
    """Sentence about how to continue this command, after a space. Empty if the command begins anew."""
    return _TO_CONTINUE.get("".join(sys.argv[1:2]), "")


def _at_limit_on_files(error: BaseException) -> BaseException | None:
    """Error that the limit on open files caused. None if there is no such error.

    A message such as "must be writable, but is not" may hide it. The errors in whose handling the message was raised
    are therefore looked at, too.
    """
    errors = [error]
    while following := errors[-1].__cause__ or errors[-1].__context__:
        errors.append(following)
    by_number = (one for one in errors if isinstance(one, OSError) and one.errno in (errno.EMFILE, errno.ENFILE))
    return next(chain(by_number, (one for one in errors if "Too many open files" in str(one))), None)


def _require_text(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` unless all arguments are UTF-8 without NUL. No config, report or path can hold other text."""
    for argument in arguments:
        if not is_text(argument):
            readable = os.fsencode(argument).decode("utf-8", "backslashreplace")
            raise ConfigError(
                f"Every argument must be UTF-8 text, but `{readable}` is not. Type it in UTF-8, or rename the file."
            )
        require_text("An argument", argument)


def _wants_json() -> bool:
    """Whether the command line has the option `--json`."""
    words = sys.argv[1:]
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def _terminated(number: int, _frame: object) -> None:
    """Exit with a status instead of a traceback when a scheduler sends a signal."""
    sys.exit(128 + number)


def _fail(error: BaseException, status: int, message: str, *, begin: str = "crosscut: ") -> NoReturn:
    """Print the message once and exit. With `--json`, the message is a JSON object on the standard output.

    Under torchrun, every rank fails with the same error. Rank 0 prints the message at once. The other ranks wait for
    some seconds before they print it, and normally torchrun stops them during this time.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_SECONDS_UNTIL_STOPPED)
    if message and _wants_json():
        told = {"kind": type(error).__name__, "message": printable(_shortened(message))}
        echo(json.dumps({"error": told}, ensure_ascii=False))
    elif message:
        echo(_shortened(f"{begin}{message}"), err=True, red=status == EXIT_DAMAGED)
    sys.exit(status)


def _shortened(message: str) -> str:
    """Shorten very long words in a message, such as a path of 100,000 characters."""
    return _LONG_WORD.sub(r"\1...\2", message)
