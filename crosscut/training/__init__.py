"""Training of a model from a config: the loop, the optimizer step, and everything that watches or speeds up a run."""

from crosscut.training.job import run_training

__all__ = ["run_training"]
