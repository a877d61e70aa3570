"""The user's terminal, for commands and for ranks that end without unwinding their stack."""

import sys


def show_cursor() -> None:
    """Show the cursor of the terminal again, which a progress bar has hidden. Does nothing without a terminal."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # noqa: T201
