"""Scores of classification, beside the values of scikit-learn 1.9 for the same labels, and correlations, beside
scipy.
"""

import numpy as np
import pytest
from scipy import stats

from crosscut.config import DataError
from crosscut.finetuning.tasks import accuracy, confusion, f1, matthews, pearson, spearman
from tests.refusals import refusal

SCIKIT_LEARN = [
    # seed, examples, labels, right, accuracy, F1, Matthews
    (0, 1000, 2, 80, 0.8, 0.8050682261208577, 0.5997550434729687),
    (1, 997, 2, 55, 0.551654964894684, 0.4710059171597633, 0.09805662583333104),
    (2, 500, 3, 70, 0.7, None, 0.5496292553897381),
    (3, 50, 2, 100, 1.0, 1.0, 1.0),
]


@pytest.mark.parametrize(("seed", "count", "kinds", "right", "expected", "expected_f1", "correlation"), SCIKIT_LEARN)
def test_scores_are_those_of_scikit_learn(
    seed: int, count: int, kinds: int, right: int, expected: float, expected_f1: float | None, correlation: float
) -> None:
    labels = [(i * i * 7 + i // 3 + seed) % 11 % kinds for i in range(count)]
    predicted = [y if (i * 13 + seed) % 100 < right else (y + 1) % kinds for i, y in enumerate(labels)]
    assert accuracy(predicted, labels) == pytest.approx(expected, abs=1e-12)
    assert matthews(predicted, labels) == pytest.approx(correlation, abs=1e-12)
    if expected_f1 is not None:
        assert f1(predicted, labels) == pytest.approx(expected_f1, abs=1e-12)


def test_scores_without_variation_are_zero() -> None:
    assert matthews([1, 1, 1], [0, 1, 1]) == 0
    assert f1([0, 0], [0, 0]) == 0
    assert f1([0, 0], [0, 1]) == 0


def test_confusion_counts_labels_by_rows() -> None:
    assert confusion([0, 1, 1, 2], [0, 0, 1, 1], num_labels=4).tolist() == [
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]


@pytest.mark.parametrize(("predicted", "labels"), [([1], [1, 0]), ([], [])])
def test_other_numbers_of_predictions_and_labels_are_an_error(predicted: list[int], labels: list[int]) -> None:
    assert refusal(DataError, accuracy, predicted, labels) == (
        "A score needs the same number of predictions and labels, and at least one of each, but there are "
        f"{len(predicted)} predictions and {len(labels)} labels."
    )


@pytest.mark.parametrize("kind", ["plain", "ties", "far from zero", "tiny", "huge", "two", "opposite"])
def test_correlations_are_those_of_scipy(kind: str) -> None:
    draw = np.random.default_rng(7)
    numbers = draw.normal(size=2 if kind == "two" else 400)
    predicted = -numbers if kind == "opposite" else numbers + draw.normal(size=len(numbers))
    if kind == "ties":
        numbers, predicted = numbers.round(), predicted.round(1)
    scale, shift = {"far from zero": (1, 1e6), "tiny": (1e-200, 0), "huge": (1e200, 0)}.get(kind, (1, 0))
    numbers = numbers * scale + shift
    assert pearson(predicted, numbers) == pytest.approx(stats.pearsonr(predicted, numbers).statistic, abs=1e-9)
    assert spearman(predicted, numbers) == pytest.approx(stats.spearmanr(predicted, numbers).statistic, abs=1e-12)


def test_correlations_without_variation_are_zero_and_pairs_are_required() -> None:
    assert [score([2.5, 2.5, 2.5], [1.0, 2.0, 3.0]) for score in (pearson, spearman)] == [0.0, 0.0]
    assert [score([1.0, 2.0], [0.1, 0.1]) for score in (pearson, spearman)] == [0.0, 0.0]
    for predicted, numbers in (([1.0], [1.0, 0.0]), ([], [])):
        for score in (pearson, spearman):
            assert refusal(DataError, score, predicted, numbers).endswith(
                f"but there are {len(predicted)} predictions and {len(numbers)} labels."
            )
