"""`crosscut finetune TASK` for classes, from files to a report, on any layout."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from crosscut.checkpoint import list_checkpoints
from crosscut.config import ConfigError
from crosscut.finetuning.downstream.folder import TaskRuns, load_outputs
from crosscut.finetuning.downstream.predictions import predict, probabilities_of, scores_of
from crosscut.model import Batch
from crosscut.pretrained import find_model
from tests.finetuning.downstream.conftest import EXACT, PLAIN, finetune, rows_of


@pytest.mark.slow
def test_several_seeds_are_scored_and_reported(bert, tables, tmp_path, forked_ranks):
    out = tmp_path / "run"
    result = finetune(
        "table", "--model", bert, *tables, "--output", out, "--seeds", 2, "--ensemble", "--epochs", 6, *PLAIN,
        "optimizer.learning_rate=0.003",
    )  # fmt: skip
    kept = TaskRuns.load(out)
    assert kept.seeds == (1234, 1235)
    assert (kept.task.labels, kept.run.model.dropout) == (("dog", "fox"), 0.1)
    report = (out / "report.md").read_text()
    summaries = []
    for seed in kept.seeds:
        run = kept.run_of(seed)
        summary = json.loads((Path(run.output.folder) / "summary.json").read_text())
        scores = rows_of(Path(run.output.folder), "dev_accuracy")
        assert len(scores) == 6, "the development examples are scored after every epoch"
        assert summary["scores"]["dev"]["accuracy"] == max(scores)
        assert summary["scores"]["test"]["accuracy"] > 0.8, "the task is learned"
        assert summary["best_step"] == 6 * (1 + scores.index(max(scores)))
        assert [one.name for one in list_checkpoints(run.checkpoints_folder)] == [f"step-{summary['best_step']:08}"]
        assert find_model(run.output.folder).model.num_classes == 2
        summaries.append(summary)
    for part in ("dev", "test"):
        examples, rows = kept.examples(part), kept.rows(part)
        outputs = [load_outputs(kept.run_of(seed), part) for seed in kept.seeds]
        for own, summary in zip(outputs, summaries, strict=True):
            found = predict(kept.task, rows, examples, probabilities_of(kept.task, rows, own))
            assert scores_of(kept.task, found, examples) == summary["scores"][part]
        mean = np.mean([probabilities_of(kept.task, rows, own) for own in outputs], axis=0)
        right = np.mean([one.label for one in examples] == mean.argmax(1))
        assert f"{100 * right:.2f}" in next(line for line in report.splitlines() if line.startswith("| ensemble"))
        lines = (out / f"predictions-{part}.tsv").read_text().splitlines()
        assert [line.split("\t")[1] for line in lines[1:]] == [kept.task.labels[one] for one in mean.argmax(1)]
    accuracies = sorted(summary["scores"]["dev"]["accuracy"] for summary in summaries)
    median = next(line for line in report.splitlines() if line.startswith("| median"))
    assert f"{50 * sum(accuracies):.2f}" in median
    assert (out / "confusion.png").stat().st_size > 1000
    assert "median" in result.output
    assert rows_of(out / "seed-1234", "loss") != rows_of(out / "seed-1235", "loss")


@pytest.mark.slow  # the resumed run trains on two layouts
def test_layouts_train_the_same_model(bert, tables, tmp_path, forked_ranks):
    layouts = ((), ("layout.tensor=2", "layout.sequence_parallel=true"), ("layout.data=2", "layout.sharding=zero3"))
    for number, layout in enumerate(layouts):
        finetune("table", "--model", bert, *tables, "--output", tmp_path / str(number), "--epochs", 2, *EXACT, *layout)
    first = rows_of(tmp_path / "0", "loss")
    assert len(first) == 12
    for number in range(1, len(layouts)):
        assert rows_of(tmp_path / str(number), "loss") == pytest.approx(first, rel=1e-9)
        scores = rows_of(tmp_path / str(number), "dev_accuracy")
        assert scores == rows_of(tmp_path / "0", "dev_accuracy")
    outputs = [np.load(tmp_path / str(number) / "outputs-test.npy") for number in range(len(layouts))]
    for other in outputs[1:]:
        np.testing.assert_allclose(other, outputs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_runs_are_resumed_on_another_layout_without_their_files(bert, tables, tmp_path, forked_ranks, monkeypatch):
    copied = tmp_path / "files"
    shutil.copytree(tables[1], copied)
    asked = ("--model", bert, "--data", copied, *tables[2:], "--seeds", 2, "--epochs", 1, *EXACT, "checkpoint.every=3")
    finetune("table", *asked, "--output", tmp_path / "whole", "layout.tensor=2")
    # A run that is killed in its second seed, after step 3 of 6.
    with monkeypatch.context() as patched:
        patched.setattr("crosscut.finetuning.downstream.job.keep_best", lambda *_: None)
        finetune("table", *asked, "--output", tmp_path / "killed", "checkpoint.keep=9")
    shutil.rmtree(copied)
    second = tmp_path / "killed" / "seed-1235"
    (second / "summary.json").unlink()
    shutil.rmtree(second / "checkpoints" / "step-00000006")
    (tmp_path / "killed" / "report.md").unlink()
    with pytest.raises(ConfigError, match=r"must name the folder of a run of the task 'rte', but .* holds a run of 't"):
        finetune("rte", "--resume", "--output", tmp_path / "killed")
    for setting in ("training.seed=5", "training.batch_size=4"):
        with pytest.raises(ConfigError, match=f"`{setting.partition('=')[0]}` must be .* as in .*killed`, but is"):
            finetune("table", "--resume", "--output", tmp_path / "killed", setting)
    finetune("table", "--resume", "--output", tmp_path / "killed", "--ensemble", "layout.tensor=2")
    for seed in (1234, 1235):
        whole, killed = (tmp_path / name / f"seed-{seed}" for name in ("whole", "killed"))
        assert len(rows_of(killed, "loss")) == 6
        assert rows_of(killed, "loss") == pytest.approx(rows_of(whole, "loss"), rel=1e-9)
        ours, theirs = (np.load(folder / "outputs-dev.npy") for folder in (killed, whole))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert len(list_checkpoints(second / "checkpoints")) == 1
    assert "| ensemble |" in (tmp_path / "killed" / "report.md").read_text()
    scores = json.loads((tmp_path / "killed" / "scores.json").read_text())
    assert scores["seeds"]["1235"]["dev"] == json.loads((second / "summary.json").read_text())["scores"]["dev"]
    assert scores["ensemble"]["dev"].keys() == scores["seeds"]["1234"]["dev"].keys()
    for name in ("summary.json", "metrics.jsonl"):
        (second / name).unlink()
    finetune("table", "--resume", "--output", tmp_path / "killed")
    assert json.loads((second / "summary.json").read_text())["best_step"] == 6, "without metrics, the last step counts"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tensor", [1, 2])
def test_losses_equal_those_of_transformers(make_bert, tables, tmp_path, forked_ranks, tensor):
    folder = make_bert("BertForSequenceClassification", id2label={0: "dog", 1: "fox"})
    steps = 10
    finetune(
        "table", "--model", folder, *tables, "--output", tmp_path / "run", *PLAIN, "model.dropout=0",
        f"training.steps={steps}", f"layout.tensor={tensor}", "--warmup", 0, "optimizer.learning_rate=0.001",
    )  # fmt: skip
    kept = TaskRuns.load(tmp_path / "run")
    ours = rows_of(tmp_path / "run", "loss")
    assert ours == pytest.approx(their_losses(folder, kept, steps), abs=1e-5)
    assert len(set(ours)) == steps


def their_losses(folder: Path, kept: TaskRuns, steps: int) -> list[float]:
    """Losses of a loop of `transformers` over the same batches: AdamW, linear schedule, clipped gradients."""
    from transformers import BertForSequenceClassification, get_linear_schedule_with_warmup

    model = BertForSequenceClassification.from_pretrained(
        folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model.train()
    plain = [parameter for name, parameter in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    decayed = [
        parameter for name, parameter in model.named_parameters() if "bias" not in name and "LayerNorm" not in name
    ]
    rate = kept.run.optimizer.learning_rate
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=rate
    )
    schedule = get_linear_schedule_with_warmup(optimizer, 0, steps)
    rows, losses = kept.rows("train"), []
    for step in range(steps):
        chosen = rows.batch(step, batch_size=8, seed=kept.run.training.seed)
        chosen = chosen[chosen >= 0]
        padded = rows.padded(chosen, length=rows.longest(chosen), padding=0)
        tokens, types, mask, labels = Batch.of(padded).tensors()
        labels = labels.float() if labels.is_floating_point() else labels
        loss = model(tokens, token_type_ids=types, attention_mask=mask.long(), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
