"""SQuAD's files and RACE's folders."""

import json
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import DataError
from crosscut.finetuning.tasks import exact_match_and_f1, read_race, read_squad
from tests.refusals import refusal

CONTEXT = "The Normans gave their name to Normandy, a region in France."
QUESTIONS: list[dict[str, Any]] = [
    {
        "question": "In what country is Normandy?", "id": "56ddde6b", "is_impossible": False,
        "answers": [{"text": "France", "answer_start": 53}, {"text": "in France", "answer_start": 50}],
    },
    {
        "question": "Who gave their name to Normandy in the 1000's?", "id": "5ad39d53", "is_impossible": True,
        "answers": [], "plausible_answers": [{"text": "Normans", "answer_start": 4}],
    },
]  # fmt: skip
SQUAD2: dict[str, Any] = {
    "version": "v2.0",
    "data": [{"title": "Normans", "paragraphs": [{"context": CONTEXT, "qas": QUESTIONS}]}],
}


def write(path: Path, table: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))
    return path


def message(path: Path) -> str:
    with pytest.raises(DataError) as error:
        read_squad(path)
    return str(error.value)


def test_questions_with_and_without_answers(tmp_path: Path) -> None:
    first, second = read_squad(write(tmp_path / "dev-v2.0.json", SQUAD2))
    assert (first.context, first.answers, first.starts) == (CONTEXT, ("France", "in France"), (53, 50))
    assert (second.id, second.answers, second.starts) == ("5ad39d53", (), ())


def test_answers_that_do_not_occur_are_an_error(tmp_path: Path) -> None:
    wrong = json.loads(json.dumps(SQUAD2))
    wrong["data"][0]["paragraphs"][0]["qas"][0]["answers"][1]["answer_start"] = 3
    path = write(tmp_path / "train.json", wrong)
    assert message(path) == (
        f"Every answer in `{path}` must occur in the text at `answer_start`, but 1 do not. The first of them is "
        "'in France', an answer to question '56ddde6b'. Correct the file."
    )


def test_another_format_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "train.json", {"data": [{"paragraphs": [{"context": CONTEXT}]}]})
    assert message(path) == (
        f"`{path}` must have SQuAD's format (data, paragraphs, qas, answers), but does not: KeyError at 'qas'. Check "
        "that this is a SQuAD 1.1 or 2.0 file."
    )
    assert message(tmp_path / "none.json").endswith("No such file or directory. Check the path.")


def test_scores_count_empty_predictions_for_questions_without_answer(tmp_path: Path) -> None:
    examples = read_squad(write(tmp_path / "dev-v2.0.json", SQUAD2))
    scores = exact_match_and_f1({"56ddde6b": "France!", "5ad39d53": ""}, examples)
    assert scores == (1.0, 1.0, 1.0, 1.0, 1.0)
    scores = exact_match_and_f1({"56ddde6b": "region in France", "5ad39d53": "the Normans"}, examples)
    assert scores == (0.0, 0.4, 0.0, 0.8, 0.0)
    assert exact_match_and_f1({"5ad39d53": ""}, examples).exact == 0.5, "a missing prediction is wrong"
    assert refusal(DataError, exact_match_and_f1, {"x": "", "y": ""}, examples) == (
        "Every prediction must name a question of the file, but 2 do not. The first of them names 'x'. Check that the "
        "predictions are for this file."
    )


def test_scores_on_xquad_are_those_of_the_official_program(shared: Path) -> None:
    """The expected values are those of torchmetrics 1.9, which follows SQuAD's program, for the same predictions."""
    examples = read_squad(shared / "data" / "bert-tasks" / "xquad.en.json")
    assert len(examples) == 1190
    predicted = {}
    for number, example in enumerate(examples):
        answer = example.answers[0]
        predicted[example.id] = (
            answer, f"The {answer.upper()}!", answer.split()[0], f"{answer} and more words", "nothing", "",
            " ".join(answer.split()[::-1]),
        )[number % 7]  # fmt: skip
    scores = exact_match_and_f1(predicted, examples)
    assert 100 * scores.exact == pytest.approx(37.9832, abs=1e-4)
    assert 100 * scores.f1 == pytest.approx(60.4221, abs=1e-4)


RACE = {
    "answers": ["A", "D"],
    "options": [["one", "two", "three", "four"], ["a", "b", "c", "d"]],
    "questions": ["How many?", "Which letter is _ ?"],
    "article": "One is the first number.",
    "id": "middle1.txt",
}


def test_race_reads_all_subfolders_in_order(tmp_path: Path) -> None:
    write(tmp_path / "train" / "middle" / "1.txt", RACE)
    write(tmp_path / "train" / "high" / "2.txt", {**RACE, "article": "Another."})
    examples = read_race(tmp_path / "train")
    assert [(one.passage[:3], one.question, one.label) for one in examples] == [
        ("Ano", "How many?", 0),
        ("Ano", "Which letter is _ ?", 3),
        ("One", "How many?", 0),
        ("One", "Which letter is _ ?", 3),
    ]
    assert examples[0].options == ("one", "two", "three", "four")
    assert len(read_race(tmp_path / "train" / "high")) == 2


def test_faults_of_race_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read_race(tmp_path)
    assert str(error.value) == (
        f"`{tmp_path}` must be a RACE folder that has .txt files, or whose subfolders have .txt files, but there is "
        "no .txt file. Check the path."
    )
    path = write(tmp_path / "1.txt", {**RACE, "answers": ["A"]})
    with pytest.raises(DataError) as error:
        read_race(tmp_path)
    assert str(error.value) == (
        f"`{path}` must have a string as `article`, and lists of equal length as `questions`, `options` and `answers`, "
        "but does not. Check that this is a file of RACE."
    )
    write(path, {**RACE, "answers": ["A", "E"]})
    assert refusal(DataError, read_race, tmp_path) == (
        f"Question 2 in `{path}` must have a text, a list of options and an answer from A to D, but the question "
        "'Which letter is _ ?' has the answer 'E'. Correct the file."
    )


def test_a_file_without_questions_is_an_error(tmp_path):
    path = tmp_path / "empty.json"
    path.write_text('{"data": []}')
    with pytest.raises(DataError, match="must have at least one question, but has none"):
        read_squad(path)
