"""The command line, with one thin file per command. `crosscut --help` does not import torch; each command imports only
the modules that it runs.
"""

from crosscut.cli.main import main

__all__ = ["main"]
