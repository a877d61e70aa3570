"""Evaluate a model with EleutherAI's lm-eval, on any layout. lm-eval provides the tasks and protocols, and Crosscut's
model computes the probabilities and generates the texts.

This package needs the optional extra `harness`. lm-eval is imported only when a function needs it, not when this
package is imported.
"""

from crosscut.harness.command import run_command
from crosscut.harness.tasks import Harness, run_harness

__all__ = ["Harness", "run_command", "run_harness"]
