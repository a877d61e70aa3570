"""Files of a task under their published names, and predictions from a model's outputs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosscut.config import ConfigError, DataError
from crosscut.config.system.records import from_json, to_json
from crosscut.data.tokenization.decoder_rows import Special
from crosscut.finetuning.downstream.constant import constant_prediction
from crosscut.finetuning.downstream.predictions import Prediction, predict, probabilities_of, scores_of
from crosscut.finetuning.downstream.task import TASKS, Example, TunedTask, files_of, of_kind
from crosscut.finetuning.encoding.answers import best_answers
from crosscut.finetuning.encoding.questions import encode_questions
from crosscut.finetuning.tasks import ChoiceExample, SpanExample, TableColumns, TextExample
from tests.finetuning.encoding.conftest import TEXT, encoder_of, wordpiece  # noqa: F401 - a fixture


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("mnli", {"train": "train.tsv", "dev": "dev_matched.tsv", "test": "dev_mismatched.tsv"}),
        ("rte", {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}),
        ("squad", {"train": "train-v2.0.json", "dev": "dev-v2.0.json"}),
        ("race", {"train": "train", "dev": "dev", "test": "test"}),
        ("table", {"train": "train.jsonl", "dev": "dev.tsv"}),
    ],
)
def test_files_are_found_under_their_published_names(tmp_path: Path, name: str, names: dict[str, str]) -> None:
    assert name in TASKS
    for one in names.values():
        (tmp_path / one).write_text("")
    assert files_of(name, str(tmp_path), {}) == {part: tmp_path / one for part, one in names.items()}
    own = files_of(name, str(tmp_path), {"dev": "mine.tsv", "test": ""})
    assert own == {part: Path("mine.tsv") if part == "dev" else tmp_path / one for part, one in names.items()}
    (tmp_path / names["dev"]).unlink()
    with pytest.raises(ConfigError, match=r"`--dev` must name the examples of the task, or .* Pass --dev."):
        files_of(name, str(tmp_path), {})


def test_a_task_is_kept_as_json() -> None:
    task = TunedTask(
        name="table", labels=("a", "b"), columns=TableColumns("text", "", "kind"), special=Special(None, 3)
    )
    assert from_json(TunedTask, json.loads(json.dumps(to_json(task)))) == task


def test_lines_that_the_published_file_lacks_columns_in_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("id\tquestion1\tquestion2\tis_duplicate\n0\ta\tb\t1\n1\ta\n")
    task, examples, skipped = TunedTask(name="qqp").read(path)
    assert (task.labels, len(examples), skipped) == (("0", "1"), 1, 1)


def test_probabilities_of_classes_are_a_softmax() -> None:
    task, examples = TunedTask(name="sst-2", labels=("0", "1")), [TextExample(text="x", pair=None, label=1)] * 2
    outputs = np.array([[0.0, np.log(3.0)], [1000.0, 0.0]])
    found = predict(task, None, examples, probabilities_of(task, None, outputs))  # type: ignore[arg-type]
    assert [(one.text, one.probability) for one in found] == [("1", pytest.approx(0.75)), ("0", pytest.approx(1.0))]
    assert scores_of(task, found, examples) == {"accuracy": 0.5}
    unlabelled = [TextExample(text="x", pair=None, label=None)] * 2
    assert scores_of(task, found, unlabelled) == {}


NUMBERS = (1.0, 2.5, 4.0)


@pytest.mark.parametrize(
    ("task", "labels", "predicted", "told"),
    [
        (TunedTask(name="sst-2", labels=("0", "1")), (0, 1, 1), ("1", "1", "1"), "1"),
        (TunedTask(name="sst-2", labels=("0", "1")), (0, 1, 1), ("1", "0", "1"), ""),
        (TunedTask(name="sst-2", labels=("0", "1")), (1, 1, 1), ("1", "1", "1"), ""),
        (TunedTask(name="sst-2", labels=("0", "1")), (None, None, None), ("1", "1", "1"), ""),
        (TunedTask(name="race", labels=("A", "B")), (0, 1, 1), ("A", "A", "A"), "A"),
        (TunedTask(name="squad", may_be_empty=True), (("x",), (), ("y",)), ("", "", ""), "no answer"),
        (TunedTask(name="squad", may_be_empty=True), ((), (), ()), ("", "", ""), ""),
        (TunedTask(name="squad"), (("x",), ("y",), ("y",)), ("z", "z", "z"), "z"),
        (TunedTask(name="stsb"), NUMBERS, (2.501, 2.5, 2.499), "about 2.5"),
        (TunedTask(name="table", is_regression=True), NUMBERS, (2.4, 2.5, 2.7), ""),
        (TunedTask(name="table", is_regression=True), (None, None, None), (2.5, 2.5, 2.5), ""),
    ],
)
def test_a_model_that_predicts_the_same_for_every_example_is_named(
    task: TunedTask, labels: tuple[Any, ...], predicted: tuple[Any, ...], told: str
) -> None:
    examples: list[Example] = []
    for label in labels:
        if task.head == "spans":
            examples.append(SpanExample(id="q", context="x y", question="?", answers=label, starts=(0,) * len(label)))
        elif task.head == "choice":
            examples.append(ChoiceExample(passage="", question="", options=("x", "y"), label=label))
        else:
            of_kind = "number" if task.head == "number" else "label"
            examples.append(TextExample(**{"text": "x", "pair": None, "label": None, of_kind: label}))
    is_number = task.head == "number"
    found = [Prediction(label=0, text=str(one), number=one if is_number else 0.0) for one in predicted]
    assert constant_prediction(task, found, examples) == told


def test_numbers_are_predicted_as_they_are(tmp_path: Path) -> None:
    task = TunedTask(name="table", columns=TableColumns("t", label="l"), is_regression=True)
    path = tmp_path / "a.tsv"
    path.write_text("t\tl\nx\t1.5\ny\t-2\n")
    task, examples, _ = task.read(path)
    assert (task.head, task.score_names, task.num_classes) == ("number", ("pearson", "spearman"), 0)
    outputs = np.array([[0.25], [3.0]])
    found = predict(task, None, examples, probabilities_of(task, None, outputs))  # type: ignore[arg-type]
    assert [(one.text, one.number) for one in found] == [("0.25", 0.25), ("3", 3.0)]
    assert scores_of(task, found, examples) == {"pearson": pytest.approx(-1), "spearman": pytest.approx(-1)}
    path.write_text("t\nx\n")
    _, examples, _ = task.read(path, has_labels=None)
    assert scores_of(task, found[:1], examples) == {}


@pytest.mark.parametrize(
    "task",
    [
        TunedTask(name="table", columns=TableColumns("sentence", label="label"), is_regression=True),
        TunedTask(name="table", columns=TableColumns("sentence", label="label"), labels=("a", "b")),
        TunedTask(name="sst-2"),
    ],
)
def test_predictions_need_no_labels(tmp_path: Path, task: TunedTask) -> None:
    path = tmp_path / "a.tsv"
    for content in ("sentence\tlabel\nx\t\ny\t?\n", "sentence\nx\ny\n"):
        path.write_text(content)
        _, examples, _ = task.read(path, has_labels=False)
        assert [(one.text, one.is_labelled) for one in of_kind(TextExample, examples)] == [("x", False), ("y", False)]
        with pytest.raises(DataError, match=r"must be|must have the columns `label`|must have labels, but has none"):
            task.read(path)


@pytest.mark.parametrize("may_be_empty", [False, True])
def test_probabilities_of_spans_keep_the_best_answers(wordpiece: Path, may_be_empty: bool) -> None:  # noqa: F811
    examples = [
        SpanExample(id=f"q{i}", context=TEXT, question="Who gave their name?", answers=(), starts=()) for i in range(6)
    ]
    rows = encode_questions(encoder_of(wordpiece, length=32), examples, name="dev.json", stride=6).rows
    outputs = np.random.default_rng(1).normal(size=(len(rows.ids), 2)) * 3
    task = TunedTask(name="squad", may_be_empty=may_be_empty)
    probabilities = probabilities_of(task, rows, outputs)
    owners = np.repeat(rows.sources, rows.lengths)
    for column in (0, 1):
        sums = np.bincount(owners, probabilities[:, column])
        np.testing.assert_allclose(sums, np.ones(len(examples)))
    assert (probabilities[(rows.offsets[:, 0] < 0).nonzero()[0]] > 0).all(1).sum() == len(rows.ends)
    windows = [outputs[rows.row(window)] for window in range(len(rows.ends))]
    best = best_answers(rows, windows, dict.fromkeys(range(6), TEXT), is_causal=False)
    wanted = [best[i].chosen(may_be_empty=may_be_empty).text for i in range(6)]
    assert [one.text for one in predict(task, rows, examples, probabilities)] == wanted
    assert len(set(wanted)) > 2
