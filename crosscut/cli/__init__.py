"""The command line: one thin file per command. `crosscut --help` imports no torch; a command imports what it runs."""

from crosscut.cli.main import main

__all__ = ["main"]
