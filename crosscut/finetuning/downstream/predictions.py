"""Compute predictions and scores from a model's outputs.

The outputs of classes and choices are the logits [E, C] of the examples. The outputs of spans are two logits for each
token of each window, [T, 2]. Probabilities have the same shapes:

    classes, choices    softmax over the C logits of an example
    spans               softmax over the tokens of all windows of a question, for the first and for the last token

The probabilities of an ensemble are the mean of the probabilities of its runs.

Shapes: E examples, C classes or options, T tokens of all rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from crosscut.config.model import HeadKind
from crosscut.finetuning.downstream.task import TunedTask
from crosscut.finetuning.encoding import EncodedRows, best_answers
from crosscut.finetuning.tasks import accuracy, exact_match_and_f1, f1, matthews

Outputs = npt.NDArray[np.float64]

_SCORES = {"accuracy": accuracy, "f1": f1, "matthews": matthews}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Prediction for one example."""

    label: int
    """Index of the label or option. For a question about a text: 1 if there is an answer, and otherwise 0."""
    text: str
    """Name of the label or, for a question about a text, the answer."""
    probability: float
    """Probability of the prediction."""


def probabilities_of(task: TunedTask, rows: EncodedRows, outputs: Outputs) -> Outputs:
    """Convert a model's outputs to probabilities."""
    if task.head is not HeadKind.SPANS:
        return _softmax(outputs)
    counted = _counted_tokens(rows, is_causal=task.is_causal)
    owners = np.repeat(rows.sources, rows.lengths)[counted]
    found = np.zeros_like(outputs)
    for column in range(outputs.shape[1]):
        own = outputs[counted, column]
        highest = np.full(int(owners.max()) + 1, -np.inf)
        np.maximum.at(highest, owners, own)
        weights = np.exp(own - highest[owners])
        found[counted, column] = weights / np.bincount(owners, weights)[owners]
    return found


def predict(task: TunedTask, rows: EncodedRows, examples: Sequence[Any], probabilities: Outputs) -> list[Prediction]:
    """Return the prediction for each example, in the order of the file."""
    if task.head is HeadKind.SPANS:
        return _predict_spans(task, rows, examples, probabilities)
    labels = probabilities.argmax(1)
    return [
        Prediction(label=label, text=task.labels[label], probability=float(own[label]))
        for label, own in zip(labels.tolist(), probabilities, strict=True)
    ]


def scores_of(task: TunedTask, predictions: Sequence[Prediction], examples: Sequence[Any]) -> dict[str, float]:
    """Return the task's scores for `predictions`, keyed by name (`TunedTask.score_names`). The result is empty if
    the examples have no labels.
    """
    if task.head is HeadKind.SPANS:
        answers = {example.id: one.text for example, one in zip(examples, predictions, strict=True)}
        found: Mapping[str, float] = exact_match_and_f1(answers, examples)._asdict()
    elif any(example.label is None for example in examples):
        return {}
    else:
        labels = [example.label for example in examples]
        predicted = [one.label for one in predictions]
        found = {name: _SCORES[name](predicted, labels) for name in task.score_names}
    return {name: found[name] for name in task.score_names}


def _softmax(outputs: Outputs) -> Outputs:
    weights: Outputs = np.exp(outputs - outputs.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return weights


def _counted_tokens(rows: EncodedRows, *, is_causal: bool) -> npt.NDArray[np.int64]:
    """Return the indices of the tokens at which an answer may begin or end: the tokens of the texts, and the summary
    token of each window.
    """
    counted = rows.offsets[:, 0] >= 0
    counted[rows.ends - 1 if is_causal else rows.ends - rows.lengths] = True
    return counted.nonzero()[0]


def _predict_spans(
    task: TunedTask, rows: EncodedRows, examples: Sequence[Any], probabilities: Outputs
) -> list[Prediction]:
    with np.errstate(divide="ignore"):
        logarithms = np.log(probabilities)
    windows = [logarithms[rows.row(window)] for window in range(len(rows.ends))]
    contexts = {number: example.context for number, example in enumerate(examples)}
    best = best_answers(rows, windows, contexts, is_causal=task.is_causal)
    found = []
    for number in range(len(examples)):
        answer = best[number].chosen(may_be_empty=task.may_be_empty, threshold=task.threshold)
        probability = float(np.exp(min(answer.score, 0.0)))
        found.append(Prediction(label=int(bool(answer.text)), text=answer.text, probability=probability))
    return found
