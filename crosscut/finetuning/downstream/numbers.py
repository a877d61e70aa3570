"""Comparison of predicted numbers with the true ones, for a report."""

from collections.abc import Iterator, Sequence

import numpy as np

from crosscut.config.system.wording import markdown_table
from crosscut.finetuning.downstream.predictions import Outputs, Prediction
from crosscut.finetuning.downstream.task import Example, of_kind
from crosscut.finetuning.tasks import TextExample


def numbers_of(examples: Sequence[Example], predictions: Sequence[Prediction]) -> tuple[Outputs, Outputs]:
    """Return the true and the predicted numbers of examples that have numbers."""
    true = [example.number for example in of_kind(TextExample, examples)]
    return np.array(true, dtype=np.float64), np.array([one.number for one in predictions])


def number_lines(examples: Sequence[Example], predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield the lines of a report that compare the predicted numbers with the true ones, in Markdown."""
    true, predicted = numbers_of(examples, predictions)
    rows = [
        [name, *(f"{value:.4g}" for value in (values.mean(), values.std(), values.min(), values.max()))]
        for name, values in (("label", true), ("prediction", predicted))
    ]
    yield from markdown_table(["", "mean", "standard deviation", "smallest", "largest"], rows)
    yield from ["", f"Mean absolute error: {np.abs(true - predicted).mean():.4g}."]
