"""EleutherAI's lm-eval on a model at any layout: its tasks, its protocols, our scores and texts.

Needs the optional extra `harness`. Importing this room imports lm-eval only where it is used.
"""

from crosscut.harness.command import run_command
from crosscut.harness.tasks import Harness, run_harness

__all__ = ["Harness", "run_command", "run_harness"]
