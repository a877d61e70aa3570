"""EleutherAI's lm-eval on a model in any layout. lm-eval gives the tasks and protocols; Crosscut's model gives the
probabilities and texts.

This package needs the optional extra `harness`. lm-eval is imported only when a function needs it, not when this
package is imported.
"""

from crosscut.harness.command import run_command
from crosscut.harness.tasks import Harness, run_harness

__all__ = ["Harness", "run_command", "run_harness"]
