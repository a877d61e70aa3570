"""`crosscut finetune table --regression` and `stsb`, from files to a report and to `transformers`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from crosscut.config import ConfigError, DataError
from crosscut.finetuning.downstream.folder import TaskRuns, load_outputs
from crosscut.pretrained import export_checkpoint, find_model
from tests.finetuning.downstream.conftest import EXACT, PLAIN, finetune, rows_of, sentences, write_table
from tests.finetuning.downstream.test_job import their_losses


def number_of(text: str, pair: str) -> float:
    """A number that the words of a pair determine."""
    return round(3.0 * ("fox" in text) + 0.5 * ("jumps" in text) + 0.25 * ("France" in pair) + 0.3, 2)


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Options that name the files of a task with numbers."""
    folder = tmp_path_factory.mktemp("numbers")
    for name, number, first in (("train", 44, 0), ("dev", 14, 100), ("test", 10, 200)):
        rows = [(text, pair, str(number_of(text, pair))) for text, pair, _ in sentences(number, first=first)]
        write_table(folder / f"{name}.tsv", rows, label="score")
    return ("--data", folder, "--text", "text", "--pair", "other", "--label", "score", "--regression")


def by_transformers(folder: Path, kept: TaskRuns, part: str) -> np.ndarray:
    """Numbers that the `pipeline` of `transformers` predicts from the texts of an exported folder."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert (model.config.problem_type, model.config.num_labels) == ("regression", 1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for example in kept.examples(part):
        with torch.no_grad():
            found.append(
                model(**tokenizer(example.text, example.pair, return_token_type_ids=True, return_tensors="pt"))
                .logits[0, 0]
                .item()
            )
    return np.array(found)


ENSEMBLE = pytest.param(("--seeds", 2, "--ensemble"), id="ensemble", marks=pytest.mark.slow)  # each seed is a run


@pytest.mark.parametrize("more", [pytest.param((), id="one seed"), ENSEMBLE])
def test_numbers_are_predicted_scored_and_exported(bert, tables, tmp_path, forked_ranks, more):
    out = tmp_path / "run"
    finetune("table", "--model", bert, *tables, "--output", out, *more, *PLAIN, "training.steps=3", "layout.tensor=2")
    kept = TaskRuns.load(out)
    assert (kept.task.labels, kept.run.model.head, kept.run.model.num_classes) == ((), "number", 0)
    scores, best = json.loads((out / "scores.json").read_text()), "ensemble" if more else "1234"
    for part in ("dev", "test"):
        true = [example.number for example in kept.examples(part)]
        outputs = [load_outputs(kept.run_of(seed), part)[:, 0] for seed in kept.seeds]
        found = dict(zip(map(str, kept.seeds), outputs, strict=True))
        if more:
            found["ensemble"] = np.mean(outputs, axis=0)
        for name, predicted in found.items():
            own = scores["ensemble"][part] if name == "ensemble" else scores["seeds"][name][part]
            assert own["pearson"] == pytest.approx(stats.pearsonr(predicted, true).statistic, abs=1e-6)
            assert own["spearman"] == pytest.approx(stats.spearmanr(predicted, true).statistic, abs=1e-6)
        lines = [line.split("\t") for line in (out / f"predictions-{part}.tsv").read_text().splitlines()]
        assert lines[0] == ["index", "prediction"]
        assert [float(line[1]) for line in lines[1:]] == pytest.approx(found[best].tolist(), rel=1e-5)
    report = (out / "report.md").read_text()
    assert all(told in report for told in ("Mean absolute error", "numbers.png", "not 3.8"))
    assert ("| ensemble |" in report) == bool(more)
    assert (out / "numbers.png").stat().st_size > 1000
    assert not (out / "confusion.png").exists()
    one = kept.run_of(1234).output.folder
    export_checkpoint(find_model(one), tmp_path / "hf")
    ours = load_outputs(kept.run_of(1234), "test")[:, 0]
    np.testing.assert_allclose(by_transformers(tmp_path / "hf", kept, "test"), ours, atol=1e-5)
    assert find_model(tmp_path / "hf").model == find_model(one).model
    path = write_table(tmp_path / "new.tsv", [(one.text, one.pair, "?") for one in kept.examples("test")], label="none")
    printed = finetune("predict", one, path, "--device", "cpu").stdout.splitlines()
    assert [json.loads(line)["number"] for line in printed] == pytest.approx(ours.tolist(), abs=1e-5)


@pytest.mark.slow  # tests/pretrained/test_tasks.py compares the loss and its gradients on the same layouts
def test_losses_of_numbers_equal_those_of_transformers(make_bert, tables, tmp_path, forked_ranks):
    folder = make_bert("BertForSequenceClassification", num_labels=1)
    finetune(
        "table", "--model", folder, *tables, "--output", tmp_path / "run", *PLAIN, "model.dropout=0",
        "training.steps=6", "--warmup", 0, "layout.tensor=2",
    )  # fmt: skip
    kept = TaskRuns.load(tmp_path / "run")
    assert rows_of(tmp_path / "run", "loss") == pytest.approx(their_losses(folder, kept, 6), rel=1e-5)


@pytest.mark.slow  # tests/model/test_task_heads.py finds the same in one step
def test_layouts_train_the_same_numbers_and_resume(bert, tables, tmp_path, forked_ranks):
    layouts = ((), ("layout.tensor=2", "layout.sequence_parallel=true"), ("layout.data=2", "layout.sharding=zero3"))
    fast = ("optimizer.learning_rate=0.01",)
    for number, layout in enumerate(layouts):
        finetune(
            "table", "--model", bert, *tables, "--output", tmp_path / str(number), "--epochs", 6, *EXACT, *fast, *layout
        )
        assert rows_of(tmp_path / str(number), "loss") == pytest.approx(rows_of(tmp_path / "0", "loss"), rel=1e-9)
    scores = json.loads((tmp_path / "0" / "scores.json").read_text())
    assert scores["seeds"]["1234"]["test"]["pearson"] > 0.9, "the task is learned"
    (tmp_path / "1" / "summary.json").unlink()
    finetune("table", "--resume", "--output", tmp_path / "1", "layout.tensor=1", "layout.sequence_parallel=false")
    ours, theirs = (np.load(tmp_path / name / "outputs-test.npy") for name in "10")
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"


@pytest.mark.slow  # the reader has a quick test, and heads of decoders are compared with those of `transformers`
def test_stsb_is_learned_by_a_decoder_and_its_test_file_gets_predictions(gpt2, tmp_path, forked_ranks):
    for name, number in (("train", 24), ("dev", 10), ("test", 6)):
        head = STSB + ("\tscore" if name != "test" else "")
        lines = [head]
        for i, (text, pair, _) in enumerate(sentences(number)):
            score = f"\t{number_of(text, pair):.3f}" if name != "test" else ""
            lines.append(f'{i}\tmain-captions\tMSRvid\t2012test\t000{i}\tnone\tnone\t{text} "\t{pair}{score}')
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    out = tmp_path / "run"
    finetune("stsb", "--model", gpt2, "--data", tmp_path, "--output", out, "--epochs", 2, *PLAIN)
    assert json.loads((out / "scores.json").read_text())["seeds"]["1234"]["dev"].keys() == {"pearson", "spearman"}
    assert len((out / "predictions-test.tsv").read_text().splitlines()) == 7
    export_checkpoint(find_model(out), tmp_path / "hf")
    assert find_model(tmp_path / "hf").model.head == "number"
    # A regressor is the start of another run: its head is read.
    told = finetune(
        "stsb", "--model", tmp_path / "hf", "--data", tmp_path, "--output", tmp_path / "again", "--epochs", 1, *PLAIN
    )
    assert "New weights" not in told.stderr


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        (
            (),
            DataError,
            r"`score` in `.*train.tsv` must hold labels, but holds numbers with fractions, such as '3.8' in",
        ),
        (("--regression", "--labels", "a,b"), ConfigError, "`--labels` must not be given with `--regression`, but is"),
        (
            ("--regression", "--label", "other"),
            DataError,
            r"`other` in `.*` must be a finite number, but is 'jumps over the d",
        ),
        (
            ("--regression", "--label", "mark"),
            DataError,
            r"Line 1 of `.*` must have the columns `mark`, but has `text`",
        ),
        (("--regression", "--label", "same"), DataError, r"`.*` must have at least 2 different numbers, but has 1\."),
    ],
)
def test_columns_that_are_no_numbers_or_no_classes_are_told(bert, tables, tmp_path, more, kind, message):
    lines = (tables[1] / "train.tsv").read_text().splitlines()
    (tmp_path / "train.tsv").write_text(
        "\n".join([f"{lines[0]}\tsame", *(f"{line}\t2.5" for line in lines[1:])]) + "\n"
    )
    asked = ("--train", tmp_path / "train.tsv", "--dev", tmp_path / "train.tsv", "--text", "text", "--label", "score")
    with pytest.raises(kind, match=message):
        finetune("table", "--model", bert, *asked, *more, "--output", tmp_path / "run", *PLAIN)


def test_the_same_prediction_for_every_example_is_named(bert, tmp_path, forked_ranks):
    for name, number in (("train", 9), ("dev", 8)):  # texts that say nothing about their labels
        rows = [("the fox", "sleeps", ("fox", "dog", "fox")[i % 3]) for i in range(number)]
        write_table(tmp_path / f"{name}.tsv", rows)
    columns = ("--data", tmp_path, "--text", "text", "--pair", "other", "--label", "kind")
    result = finetune(
        "table",
        "--model",
        bert,
        *columns,
        "--output",
        tmp_path / "run",
        "--seeds",
        2,
        "--ensemble",
        "--epochs",
        1,
        *PLAIN,
    )
    report = (tmp_path / "run" / "report.md").read_text()
    for whose in ("Seed 1234", "Seed 1235", "The ensemble"):
        told = f"{whose} predicts "
        assert told in result.output
        line = next(line for line in report.splitlines() if told in line)
        assert "for all 8 dev examples, although their labels differ.** Try more `--epochs`" in line
