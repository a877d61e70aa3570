"""Command line of Crosscut, with one short file per command. Each command imports only the modules that the command
runs, so `crosscut --help` does not import torch.
"""

from crosscut.cli.main import main

__all__ = ["main"]
