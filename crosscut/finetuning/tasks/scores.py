"""Official scores of the tasks: accuracy, F1 and Matthews correlation for classification, Pearson and Spearman
correlation for numbers, and SQuAD's EM and F1.

Scores are fractions from 0 to 1 (correlations: -1 to 1). SQuAD's own program prints them multiplied by 100.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crosscut.config.errors import DataError
from crosscut.finetuning.tasks.spans import SpanExample

Labels = Sequence[int] | npt.NDArray[np.int64]
Numbers = Sequence[float] | npt.NDArray[np.float64]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def accuracy(predicted: Labels, labels: Labels) -> float:
    """Return the fraction of predictions that are right. Raises `DataError` unless there are as many predictions as
    labels, and at least one.
    """
    table = confusion(predicted, labels)
    return float(np.trace(table) / table.sum())


def f1(predicted: Labels, labels: Labels) -> float:
    """Return the F1 score of the label 1: the harmonic mean of precision and recall, 0 if label 1 never occurs."""
    table = confusion(predicted, labels)
    found = int(table[1, 1]) if len(table) > 1 else 0
    either = int(table[1].sum() + table[:, 1].sum()) if len(table) > 1 else 0
    return 2 * found / either if either else 0.0


def matthews(predicted: Labels, labels: Labels) -> float:
    """Return the Matthews correlation (Gorodkin's form for any number of labels), 0 if all predictions or all labels
    are equal.
    """
    table = [[int(count) for count in row] for row in confusion(predicted, labels)]
    total, right = sum(map(sum, table)), sum(row[number] for number, row in enumerate(table))
    of_label = [sum(row) for row in table]
    of_prediction = [sum(column) for column in zip(*table, strict=True)]
    covariance = right * total - sum(a * b for a, b in zip(of_label, of_prediction, strict=True))
    variances = (total**2 - sum(a * a for a in of_label)) * (total**2 - sum(b * b for b in of_prediction))
    return covariance / sqrt(variances) if variances else 0.0


SCORES = {"accuracy": accuracy, "f1": f1, "matthews": matthews}
"""Scores of classification, by name."""


def pearson(predicted: Numbers, numbers: Numbers) -> float:
    """Return Pearson's correlation of predicted and true numbers, 0 if all predictions or all true numbers are equal.
    Raises `DataError` unless there are as many predictions as numbers, and at least one.
    """
    ours, theirs = (np.asarray(values, dtype=np.float64) for values in (predicted, numbers))
    _require_pairs(len(ours), len(theirs))
    if any(np.all(values == values[0]) for values in (ours, theirs)):
        return 0.0
    first, second = (_unit(values) for values in (ours, theirs))
    return float(np.clip(first @ second, -1.0, 1.0))


def _unit(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the differences from the mean, scaled to length 1. The first scale keeps squares from overflowing."""
    apart = values / np.abs(values).max()
    apart -= apart.mean()
    found: npt.NDArray[np.float64] = apart / np.linalg.norm(apart)
    return found


def spearman(predicted: Numbers, numbers: Numbers) -> float:
    """Return Spearman's correlation: Pearson's correlation of the ranks. Equal numbers share the mean of their
    ranks.
    """
    return pearson(_ranks(predicted), _ranks(numbers))


def _ranks(numbers: Numbers) -> npt.NDArray[np.float64]:
    _, places, counts = np.unique(np.asarray(numbers, dtype=np.float64), return_inverse=True, return_counts=True)
    means: npt.NDArray[np.float64] = counts.cumsum() - (counts - 1) / 2
    return means[places]


CORRELATIONS = {"pearson": pearson, "spearman": spearman}
"""Scores of predicted numbers, by name."""


def confusion(predicted: Labels, labels: Labels, *, num_labels: int = 0) -> npt.NDArray[np.int64]:
    """Return the confusion matrix, [labels, labels]: element (i, j) counts examples of label i that were predicted as
    label j. `num_labels` is the minimum number of rows and columns. Raises `DataError` unless there are as many
    predictions as labels, and at least one.
    """
    theirs, ours = np.asarray(labels, dtype=np.int64), np.asarray(predicted, dtype=np.int64)
    _require_pairs(len(ours), len(theirs))
    size = max(int(theirs.max()), int(ours.max()), num_labels - 1) + 1
    return np.bincount(theirs * size + ours, minlength=size * size).reshape(size, size)


def _require_pairs(num_predictions: int, num_labels: int) -> None:
    if num_predictions != num_labels or not num_labels:
        raise DataError(
            f"A score needs the same number of predictions and labels, and at least one of each, but there are "
            f"{num_predictions:,} predictions and {num_labels:,} labels."
        )


class SpanScores(NamedTuple):
    """Scores of SQuAD, as fractions. The scores of a group without questions are 0."""

    exact: float
    """Fraction of predictions that equal an answer if case, punctuation, articles and spacing are ignored."""

    f1: float
    """F1 score between the words of the prediction and the words of the answer, averaged over the questions. If a
    question has several answers, the highest F1 counts."""

    exact_with_answer: float
    """`exact` of the questions that have an answer."""

    f1_with_answer: float
    """`f1` of the questions that have an answer."""

    exact_without_answer: float
    """`exact` of the questions without an answer: the fraction of empty predictions."""


def exact_match_and_f1(predicted: Mapping[str, str], examples: Sequence[SpanExample]) -> SpanScores:
    """Return the scores of SQuAD's official programs. `predicted` maps the id of each question to an answer, or to an
    empty string for "no answer". A question without a prediction counts as wrong.

    Raises `DataError` if there are no questions, or if a prediction names an unknown question.
    """
    if not examples:
        raise DataError("A score needs at least one question, but there are none.")
    if unknown := sorted(set(predicted) - {example.id for example in examples}):
        raise DataError(
            f"Every prediction must name a question of the file, but {len(unknown):,} do not. The first of "
            f"them names {unknown[0]!r:.60}. Check that the predictions are for this file."
        )
    scores = np.array([_score(predicted.get(example.id), example) for example in examples])
    has_answer = np.array([bool(example.answers) for example in examples])
    parts = [_means(scores), _means(scores[has_answer]), _means(scores[~has_answer])]
    return SpanScores(*parts[0], *parts[1], parts[2][0])


def _means(scores: npt.NDArray[np.float64]) -> tuple[float, float]:
    return (float(scores[:, 0].mean()), float(scores[:, 1].mean())) if len(scores) else (0.0, 0.0)


def _score(prediction: str | None, example: SpanExample) -> tuple[float, float]:
    """Return EM and F1 of one question."""
    if prediction is None:
        return 0.0, 0.0
    # An answer that is only articles or punctuation is left out, as in the program of SQuAD 2.0.
    answers = [answer for answer in map(_words, example.answers) if answer] or [[]]
    ours = _words(prediction)
    return max(float(ours == answer) for answer in answers), max(_f1(ours, answer) for answer in answers)


def _f1(prediction: list[str], answer: list[str]) -> float:
    if not prediction or not answer:
        return float(prediction == answer)
    shared = (Counter(prediction) & Counter(answer)).total()
    return 2 * shared / (len(prediction) + len(answer))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()
