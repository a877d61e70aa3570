"""Output to the user's terminal. Every command and every rank prints through the functions of this module.

Names, messages and generated text may come from unknown sources. On a terminal, a control character in such a text can
rename the window, hide lines or type commands. Therefore, `printable` replaces control characters with visible escapes
in all text for a terminal, and in all errors. Text that goes to a file or a pipe is not changed.
"""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from crosscut.config.errors import OutputClosed

if TYPE_CHECKING:
    from rich.console import Console

_CONTROLS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u206a-\u206f\ud800-\udfff]|\r(?!\n)"
)
"""Control characters of ASCII and Latin-1 except tabs and line ends; characters that reorder the text around them; and
lone surrogates. Marks of ordinary text, such as the joiner in an emoji, are not included."""


def printable(text: str) -> str:
    """Replace control characters with visible escapes. All other characters of all languages are unchanged."""
    return _CONTROLS.sub(lambda match: _escape(ord(match[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def echo(text: object = "", *, err: bool = False, nl: bool = True, bold: bool = False, red: bool = False) -> None:
    """Print text. `err` selects the error stream, and `nl` adds a line end. `bold` and `red` have an effect only on a
    terminal with colours. Raises `OutputClosed` if the text goes to a pipe whose reader has gone.
    """
    is_terminal = (sys.stderr if err else sys.stdout).isatty()
    shown = printable(str(text)) if err or is_terminal else str(text)
    if is_terminal and (bold or red) and _has_colours():
        shown = click.style(shown, bold=bold or None, fg="red" if red else None)
    try:
        click.echo(shown, err=err, nl=nl, color=True)
    except BrokenPipeError:
        raise OutputClosed("The reader of the output has gone.") from None


def _has_colours() -> bool:
    """Whether the terminal shows colours. As in rich, `NO_COLOR` and a dumb terminal turn colours off."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def new_console(*, stderr: bool = False, width: int | None = None) -> "Console":
    """Make a console for tables and progress bars. Strings are printed as they are, without rich's markup and emoji
    codes.

    Output that does not go to a terminal has `width` columns. By default, it has 80 columns, but a table is as wide as
    its text, and no word is cut: a file or a pipe has no edge.
    """
    from crosscut.config.system.console import PrintableConsole

    console = PrintableConsole(stderr=stderr, markup=False, emoji=False)
    console.has_edge = console.is_terminal or width is not None
    if width is not None and not console.is_terminal:
        console.width = width
    return console


def show_cursor() -> None:
    """Show the terminal's cursor again after a progress bar has hidden it. Does nothing without a terminal."""
    if sys.stdout.isatty():
        click.echo("\x1b[?25h", nl=False)


def typed_command() -> str:
    """Return the command that started this program, as the user typed it, so that printed suggestions can be pasted."""
    typed = Path(sys.argv[0])
    return "python -m crosscut" if typed.name == "__main__.py" else shlex.quote(str(typed))
