"""Predictions of a fine-tuned run, and the run as an ordinary model."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from crosscut.config import ConfigError
from crosscut.finetuning.downstream.folder import TaskRuns
from crosscut.pretrained import export_checkpoint, find_model
from tests.finetuning.downstream.conftest import PLAIN, finetune, write_table
from tests.nursery import forked


@pytest.fixture(scope="module")
def tuned(bert: Path, tables: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fine-tuned run of two seeds. The tests only read it."""
    forked()
    folder = tmp_path_factory.mktemp("tuned") / "run"
    encoder = shutil.copytree(bert, folder.with_name("tiny-bert"))
    (encoder / "modules.json").write_text('[{"name": "0", "path": "", "type": "sentence_transformers.Transformer"}]')
    finetune("table", "--model", encoder, *tables, "--output", folder, "--seeds", 2, "--epochs", 2, *PLAIN)
    return folder


def test_a_run_predicts_the_examples_of_a_file(tuned, tmp_path):
    examples = TaskRuns.load(tuned).examples("dev")
    path = write_table(tmp_path / "new.tsv", [(one.text, one.pair, "x") for one in examples], label="unknown")
    printed = finetune("predict", tuned, path, "--tensor", 2, "--device", "cpu").stdout
    found = [json.loads(line) for line in printed.splitlines()]
    kept = [line.split("\t") for line in (tuned / "predictions-dev.tsv").read_text().splitlines()[1:]]
    assert [(str(one["index"]), one["label"]) for one in found] == [(line[0], line[1]) for line in kept]
    assert [one["probability"] for one in found] == pytest.approx([float(line[2]) for line in kept], abs=1e-5)
    results = {seed: json.loads((tuned / f"seed-{seed}" / "summary.json").read_text()) for seed in (1234, 1235)}
    best = max(results, key=lambda seed: results[seed]["scores"]["dev"]["accuracy"])
    other = finetune("predict", tuned / f"seed-{best}", path, "--device", "cpu").stdout
    assert [json.loads(line)["label"] for line in other.splitlines()] == [one["label"] for one in found]


def test_a_run_is_exported_with_the_names_of_its_labels(tuned, tmp_path, capsys):
    """The run started from a sentence encoder, whose modules describe the model before the run."""
    from transformers import BertForSequenceClassification

    export_checkpoint(find_model(tuned / "seed-1234"), tmp_path / "hf")
    assert capsys.readouterr().err == (
        f"crosscut: `{tmp_path / 'hf'}` has no `modules.json`. The files of sentence-transformers beside the model "
        "from which the run started describe that model; copy them if they still apply.\n"
    )
    assert not (tmp_path / "hf" / "modules.json").exists()
    model = BertForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    assert model.config.id2label == {0: "dog", 1: "fox"}
    kept = TaskRuns.load(tuned)
    rows = kept.rows("test")
    padded = rows.padded(np.arange(rows.num_examples), length=int(rows.lengths.max()), padding=kept.padding)
    tokens, types, mask = map(torch.from_numpy, (padded.tokens, padded.segments, padded.mask))
    with torch.no_grad():
        logits = model(tokens, token_type_ids=types, attention_mask=mask.long()).logits
    np.testing.assert_allclose(logits.numpy(), np.load(tuned / "seed-1234" / "outputs-test.npy"), atol=1e-5)


def test_a_decoder_is_exported_with_the_rows_of_its_run(gpt2, tables, tmp_path, forked_ranks):
    from transformers import pipeline

    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(gpt2, model)
    inner = Tokenizer.from_file(str(model / "tokenizer.json"))
    begin = inner.token_to_id("a")
    inner.post_processor = TemplateProcessing(single="a $A", pair="a $A $B", special_tokens=[("a", begin)])
    inner.save(str(model / "tokenizer.json"))
    finetune("table", "--model", model, *tables, "--output", run, "--epochs", 1, *PLAIN, "training.sequence_length=20")
    kept = TaskRuns.load(run)
    assert (kept.task.special, find_model(run).special) == ((begin, 0), (begin, 0))
    export_checkpoint(find_model(run), tmp_path / "hf")
    classify = pipeline("text-classification", str(tmp_path / "hf"), top_k=None, truncation=True)
    outputs = np.load(run / "outputs-test.npy")
    weights = np.exp(outputs - outputs.max(1, keepdims=True))
    for example, wanted in zip(kept.examples("test"), weights / weights.sum(1, keepdims=True), strict=True):
        found = {one["label"]: one["score"] for one in classify({"text": example.text, "text_pair": example.pair})}
        assert [found[label] for label in kept.task.labels] == pytest.approx(wanted.tolist(), abs=1e-5)
    (run / "special.json").write_text('{"begin": "a", "end": 0}')
    with pytest.raises(
        ConfigError, match=r"special.json` must hold the ids `begin` \(or null\) and `end` of the tokens"
    ):
        find_model(run)


def test_a_folder_of_another_kind_is_told(bert, tmp_path):
    path = write_table(tmp_path / "new.tsv", [("the fox", "sleeps", "x")])
    with pytest.raises(ConfigError, match=r"must be the folder of a run of `crosscut finetune TASK`, but has no `task"):
        finetune("predict", bert, path, "--device", "cpu")
