"""Find a model that predicts the same for every example.

The fine-tuning of a small file with a large learning rate can end in a model that ignores its input (Mosbach et al.
2021, arXiv 2006.04884). Its accuracy is then the fraction of the most frequent label, which may look like a result.
"""

from collections.abc import Sequence

import numpy as np

from crosscut.config.parts.head import HeadKind
from crosscut.finetuning.downstream.predictions import Prediction
from crosscut.finetuning.downstream.task import Example, TunedTask, of_kind
from crosscut.finetuning.tasks import SpanExample, TextExample

_SPREAD = 0.01
"""Numbers count as equal if their standard deviation is below this fraction of that of the true numbers."""

REMEDY = (
    "Try more `--epochs`, a lower `optimizer.learning_rate` (for a small model a higher one), a longer `--warmup` or "
    "another seed."
)


def constant_prediction(task: TunedTask, predictions: Sequence[Prediction], examples: Sequence[Example]) -> str:
    """Return the prediction that all examples get although their labels differ. Empty if predictions differ, and for
    examples whose labels are equal or missing.
    """
    if task.head is HeadKind.NUMBER:
        return _constant_number(predictions, of_kind(TextExample, examples))
    wanted = {example.answers if isinstance(example, SpanExample) else example.label for example in examples}
    found = {one.text for one in predictions}
    return (found.pop() or "no answer") if len(wanted) > 1 and len(found) == 1 else ""


def _constant_number(predictions: Sequence[Prediction], examples: Sequence[TextExample]) -> str:
    numbers = [example.number for example in examples if example.number is not None]
    found = [one.number for one in predictions]
    is_constant = numbers and np.std(found) < _SPREAD * np.std(numbers)
    return f"about {np.mean(found):.4g}" if is_constant else ""
