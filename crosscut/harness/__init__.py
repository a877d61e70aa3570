"""EleutherAI's lm-eval on a model in any layout: the tasks and protocols of lm-eval with the scores and texts of
Crosscut.

This package needs the optional extra `harness`. Importing it does not import lm-eval, which is imported only when it is
used.
"""

from crosscut.harness.command import run_command
from crosscut.harness.tasks import Harness, run_harness

__all__ = ["Harness", "run_command", "run_harness"]
