"""Starts from a classifier whose classes have other names, or another order, than those of the task."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crosscut.finetuning.downstream.folder import TaskRuns
from crosscut.pretrained import export_checkpoint, find_model
from tests.finetuning.downstream.conftest import PLAIN, finetune

STILL = (*PLAIN, "optimizer.learning_rate=1e-30", "training.steps=1", "--warmup", 0)
"""A step that does not change the model."""


def logits_of(folder: Path, kept: TaskRuns) -> tuple[dict[int, str], np.ndarray[Any, np.dtype[np.float32]]]:
    """Names of the classes of a published model, and its logits of the development examples, by `transformers`."""
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(folder).eval()
    rows = kept.rows("dev")
    padded = rows.padded(np.arange(rows.num_examples), length=int(rows.lengths.max()), padding=kept.padding)
    tokens, types, mask = map(torch.from_numpy, (padded.tokens, padded.segments, padded.mask))
    with torch.no_grad():
        return model.config.id2label, model(tokens, token_type_ids=types, attention_mask=mask.long()).logits.numpy()


def started(model: Path, tables: tuple[object, ...], output: Path, *more: object) -> tuple[TaskRuns, str]:
    """A run that has not changed the model, and the messages of the command."""
    told = finetune("table", "--model", model, *tables, "--output", output, *STILL, *more).stderr
    return TaskRuns.load(output), told


@pytest.mark.one_in(3)
@pytest.mark.parametrize("names", [("fox", "dog"), ("FOX", "Dog"), ("dog", "fox")], ids=",".join)
def test_a_classifier_keeps_the_names_of_its_rows(make_bert, tables, tmp_path, forked_ranks, names):
    folder = make_bert("BertForSequenceClassification", id2label=dict(enumerate(names)))
    kept, told = started(folder, tables, tmp_path / "run")
    assert kept.task.labels == ("dog", "fox"), "a table without --labels"
    assert ("is kept, with its classes in another order: 'dog', 'fox'" in told) == (names != ("dog", "fox"))
    assert "New weights" not in told
    theirs, logits = logits_of(folder, kept)
    lines = (tmp_path / "run" / "predictions-dev.tsv").read_text().splitlines()[1:]
    wanted = [theirs[int(best)].lower() for best in logits.argmax(1)]
    assert [line.split("\t")[1] for line in lines] == wanted
    columns = [[name.lower() for name in names].index(label) for label in ("dog", "fox")]
    np.testing.assert_allclose(np.load(tmp_path / "run" / "outputs-dev.npy"), logits[:, columns], atol=1e-5)


@pytest.mark.slow  # `test_classes_that_differ_are_new` finds the same without a run
@pytest.mark.parametrize("is_run", [False, True], ids=["published", "run"])
def test_a_classifier_with_other_names_is_new(make_bert, tables, tmp_path, forked_ranks, is_run):
    folder = make_bert("BertForSequenceClassification", id2label={0: "cat", 1: "cow"})
    if is_run:
        started(folder, tables, tmp_path / "first")
        folder = tmp_path / "first"
        (folder / "labels.json").write_text(json.dumps(["cat", "cow"]))
    kept, told = started(folder, tables, tmp_path / "run")
    assert "The classifier is new: the classes of" in told
    assert "are 'cat', 'cow', but must be 'dog', 'fox'." in told
    assert "New weights, drawn from the seed: task.classifier.weight, task.classifier.bias" in told
    ours = np.load(tmp_path / "run" / "outputs-dev.npy")
    export_checkpoint(find_model(tmp_path / "run"), tmp_path / "hf")
    names, logits = logits_of(tmp_path / "hf", kept)
    assert names == {0: "dog", 1: "fox"}
    np.testing.assert_allclose(ours, logits, atol=1e-5)


@pytest.mark.slow  # `test_names_of_classes_decide_about_a_classifier` finds the same without a run
def test_labels_of_a_table_choose_the_order(make_bert, tables, tmp_path, forked_ranks):
    names = ("cow", "fox", "dog")
    folder = make_bert("BertForSequenceClassification", id2label=dict(enumerate(names)))
    kept, told = started(folder, tables, tmp_path / "run", "--labels", "dog,cow,fox")
    assert "in another order: 'dog', 'cow', 'fox'" in told
    _, logits = logits_of(folder, kept)
    np.testing.assert_allclose(np.load(tmp_path / "run" / "outputs-dev.npy"), logits[:, [2, 0, 1]], atol=1e-5)
    _, told = started(folder, tables, tmp_path / "fewer")
    assert "To keep the classifier, pass --labels cow,fox,dog." in told
