"""Questions about a text, questions with options, and decoders, from files to a report."""

import json
from pathlib import Path

import numpy as np
import pytest

from crosscut.finetuning.downstream.folder import TaskRuns
from crosscut.finetuning.tasks import exact_match_and_f1
from crosscut.pretrained import find_model
from tests.finetuning.downstream.conftest import EXACT, PLAIN, finetune, rows_of
from tests.finetuning.encoding.conftest import TEXT

FRANCE, NORMANS = TEXT.index("France"), TEXT.index("Normans")


def write_squad(path: Path, number: int, *, is_new: bool) -> None:
    """Questions with one of two answers and, if `is_new`, some without an answer."""
    questions = []
    for i in range(number):
        answer, start, question = (
            ("France", FRANCE, "In what country is Normandy?"), ("Normans", NORMANS, "Who gave their name to it?")
        )[i % 2]  # fmt: skip
        empty = is_new and i % 4 == 3
        answers = [] if empty else [{"text": answer, "answer_start": start}]
        questions.append({"id": f"q{i}", "question": question, "answers": answers, "is_impossible": empty})
    path.write_text(json.dumps({"data": [{"title": "x", "paragraphs": [{"context": TEXT, "qas": questions}]}]}))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_new", [False, True], ids=["SQuAD 1.1", "SQuAD 2.0"])
def test_answers_are_found_in_windows_of_a_text(bert, tmp_path, forked_ranks, is_new):
    version = "2.0" if is_new else "1.1"
    write_squad(tmp_path / f"train-v{version}.json", 12, is_new=is_new)
    write_squad(tmp_path / f"dev-v{version}.json", 8, is_new=is_new)
    out = tmp_path / "run"
    finetune(
        "squad", "--model", bert, "--data", tmp_path, "--output", out, "--stride", 8, "--epochs", 6,
        *PLAIN, "training.validate_every=10", "optimizer.learning_rate=0.01", "layout.tensor=2",
    )  # fmt: skip
    kept = TaskRuns.load(out)
    assert kept.task.may_be_empty == is_new
    assert kept.rows("dev").num_examples > 8, "a text has several windows"
    predicted = json.loads((out / "predictions-dev.json").read_text())
    found = exact_match_and_f1(predicted, kept.examples("dev"))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["scores"]["dev"]["f1"] == pytest.approx(found.f1)
    assert summary["scores"]["dev"]["exact"] == pytest.approx(found.exact)
    assert ("exact_without_answer" in summary["scores"]["dev"]) == is_new
    assert summary["scores"]["dev"]["f1"] == max(rows_of(out, "dev_f1"))
    if not is_new:
        assert found.exact > 0.4, "the task is learned"
    assert (out / "confusion.png").exists() == is_new
    assert find_model(out).model.head == "spans"


def write_race(folder: Path, number: int) -> None:
    (folder / "high").mkdir(parents=True)
    for i in range(number):
        table = {
            "article": TEXT[: 90 + i], "questions": ["The quick brown _ jumps over the dog.", "Who sleeps?"],
            "options": [["fox", "name", "region", "country"], ["The fox", "France", "The dog", "Normandy"]],
            "answers": ["A", "C"],
        }  # fmt: skip
        (folder / "high" / f"{i}.txt").write_text(json.dumps(table))


def test_options_are_chosen_on_any_layout(bert, tmp_path, forked_ranks):
    for part, number in (("train", 8), ("dev", 3), ("test", 2)):
        write_race(tmp_path / "RACE" / part, number)
    for number, layout in enumerate(("layout.tensor=1", "layout.data=2")):
        result = finetune(
            "race", "--model", bert, "--data", tmp_path / "RACE", "--output", tmp_path / str(number), "--epochs", 1,
            *EXACT, "training.batch_size=6", "training.sequence_length=28", layout,
        )  # fmt: skip
        assert "of 16 examples of" in result.stderr, "passages are cut"
    one, two = (tmp_path / str(number) for number in (0, 1))
    assert len(rows_of(one, "loss")) == 3, "the last batch is filled up"
    assert rows_of(two, "loss") == pytest.approx(rows_of(one, "loss"), rel=1e-9)
    np.testing.assert_allclose(np.load(two / "outputs-dev.npy"), np.load(one / "outputs-dev.npy"), rtol=1e-5)
    assert np.load(one / "outputs-dev.npy").shape == (6, 4)
    assert (two / "predictions-test.tsv").read_text().splitlines()[1].split("\t")[1] in "ABCD"
    assert "| A |" in (one / "report.md").read_text()
    assert find_model(one).model.head == "choice"


@pytest.mark.slow  # several whole runs
def test_decoders_are_fine_tuned(gpt2, tables, tmp_path, forked_ranks):
    for number, layout in enumerate(("layout.tensor=1", "layout.tensor=2")):
        finetune(
            "table", "--model", gpt2, *tables, "--output", tmp_path / str(number), "--epochs", 2, *EXACT, layout
        )  # fmt: skip
    one, two = (rows_of(tmp_path / str(number), "loss") for number in (0, 1))
    assert two == pytest.approx(one, rel=1e-9)
    assert one[-1] < one[0]
    kept = TaskRuns.load(tmp_path / "0")
    rows = kept.rows("train")
    assert set(rows.ids[rows.ends - 1].tolist()) == {kept.task.special.end}
    # A fine-tuned run is the start of another one, with another head.
    write_squad(tmp_path / "squad.json", 4, is_new=False)
    finetune(
        "squad", "--model", tmp_path / "0", "--train", tmp_path / "squad.json", "--dev", tmp_path / "squad.json",
        "--output", tmp_path / "again", "--epochs", 1, "--stride", 8, *PLAIN,
    )  # fmt: skip
    assert json.loads((tmp_path / "again" / "summary.json").read_text())["scores"]["dev"].keys() == {"f1", "exact"}
