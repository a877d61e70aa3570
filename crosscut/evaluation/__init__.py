"""Scores of a given model, on any layout."""

from crosscut.evaluation.perplexity import Score, evaluate_loss

__all__ = ["Score", "evaluate_loss"]
