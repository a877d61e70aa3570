"""Turns a config into a trained model."""

from crosscut.training.run import run_training

__all__ = ["run_training"]
