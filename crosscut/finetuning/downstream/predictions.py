"""Compute predictions and scores from a model's outputs.

The outputs of classes and choices are the logits [E, C] of the examples. The outputs of numbers are the numbers [E, 1].
The outputs of spans are two logits for each token of each window, [T, 2]. Probabilities have the same shapes:

    classes, choices    softmax over the C logits of an example
    numbers             the numbers themselves
    spans               softmax over the tokens of all windows of a question, for the first and for the last token

The probabilities of an ensemble are the mean of the probabilities of its runs.

Shapes: E examples, C classes or options, T tokens of all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
import numpy.typing as npt

from crosscut.config.parts.head import HeadKind
from crosscut.finetuning.downstream.task import Example, TunedTask, of_kind
from crosscut.finetuning.encoding.answers import best_answers
from crosscut.finetuning.encoding.rows import EncodedRows
from crosscut.finetuning.tasks import SpanExample, TextExample, exact_match_and_f1
from crosscut.finetuning.tasks.scores import CORRELATIONS, SCORES

Outputs = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Prediction for one example."""

    label: int
    """Index of the label or option. For a question about a text: 1 if there is an answer, and otherwise 0. For a
    number: 0."""
    text: str
    """Name of the label, the number in six digits or, for a question about a text, the answer."""
    probability: float = nan
    """Probability of the prediction; NaN for a number."""
    number: float = nan
    """Predicted number; NaN if the task is not to predict a number."""


def probabilities_of(task: TunedTask, rows: EncodedRows, outputs: Outputs) -> Outputs:
    """Convert a model's outputs to probabilities. Numbers stay as they are."""
    if task.head is HeadKind.NUMBER:
        return outputs
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


def predict(
    task: TunedTask, rows: EncodedRows, examples: Sequence[Example], probabilities: Outputs
) -> list[Prediction]:
    """Return the prediction for each example, in the order of the file."""
    if task.head is HeadKind.SPANS:
        return _predict_spans(task, rows, of_kind(SpanExample, examples), probabilities)
    if task.head is HeadKind.NUMBER:
        return [Prediction(label=0, text=f"{one:.6g}", number=one) for one in probabilities[:, 0].tolist()]
    labels = probabilities.argmax(1)
    return [
        Prediction(label=label, text=task.labels[label], probability=float(own[label]))
        for label, own in zip(labels.tolist(), probabilities, strict=True)
    ]


def scores_of(task: TunedTask, predictions: Sequence[Prediction], examples: Sequence[Example]) -> dict[str, float]:
    """Return the task's scores for `predictions`, keyed by name (`TunedTask.score_names`). The result is empty if
    the examples have no labels.
    """
    if task.head is HeadKind.SPANS:
        questions = of_kind(SpanExample, examples)
        scores = exact_match_and_f1(answers_of(questions, predictions), questions)
        return {name: getattr(scores, name) for name in task.score_names}
    if task.head is HeadKind.NUMBER:
        numbers = [example.number for example in of_kind(TextExample, examples) if example.number is not None]
        ours = [one.number for one in predictions]
        return {name: CORRELATIONS[name](ours, numbers) for name in task.score_names if len(numbers) == len(ours)}
    labels = [example.label for example in examples if example.label is not None]
    if len(labels) < len(examples):
        return {}
    predicted = [one.label for one in predictions]
    return {name: SCORES[name](predicted, labels) for name in task.score_names}


def answers_of(questions: Sequence[SpanExample], predictions: Sequence[Prediction]) -> dict[str, str]:
    """Return the predicted answers, keyed by the ids of the questions."""
    return {question.id: one.text for question, one in zip(questions, predictions, strict=True)}


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
    task: TunedTask, rows: EncodedRows, examples: Sequence[SpanExample], probabilities: Outputs
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
