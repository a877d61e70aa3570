"""Training of a model from a config: the loop, the optimizer step, and the code that watches a run or reduces its
memory or time.
"""

from crosscut.training.job import run_training

__all__ = ["run_training"]
