"""Tables with named columns."""

import json
from pathlib import Path

import pytest

from crosscut.config import DataError
from crosscut.finetuning.tasks import TableColumns, read_table
from tests.refusals import refusal

COLUMNS = TableColumns("body", "other", "kind")


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    else:
        lines = [list(rows[0]), *(list(map(str, row.values())) for row in rows)]
        path.write_text("".join("\t".join(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("name", ["a.tsv", "a.jsonl"])
def test_both_formats_give_the_same_examples(tmp_path: Path, name: str) -> None:
    rows = [
        {"id": 1, "kind": "spam", "body": "Buy", "other": "now"},
        {"id": 2, "kind": "ham", "body": "Hi", "other": ""},
    ]
    examples = read_table(write(tmp_path / name, rows), columns=COLUMNS)
    assert examples.labels == ("ham", "spam")
    assert [(one.text, one.pair, one.label) for one in examples.examples] == [("Buy", "now", 1), ("Hi", "", 0)]
    alone = read_table(tmp_path / name, columns=TableColumns("body"))
    assert [(one.text, one.pair, one.label) for one in alone.examples] == [("Buy", None, None), ("Hi", None, None)]
    named = read_table(tmp_path / name, columns=COLUMNS, labels=("spam", "ham", "other"))
    assert [one.label for one in named.examples] == [0, 1]


def test_labels_of_json_may_be_numbers_and_truth_values(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"t": "x", "l": 1}, {"t": "y", "l": True}, {"t": "z", "l": "1"}])
    examples = read_table(path, columns=TableColumns("t", label="l"))
    assert examples.labels == ("1", "true")
    assert [one.label for one in examples.examples] == [0, 1, 0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "A file of examples must end in .tsv or .jsonl, but is `{}`. Rename or convert the file."),
        (
            "a.tsv",
            "body\tkind\n",
            (
                "Line 1 of `{}` must have the columns `other`, but has `body`, `kind`. Correct the file, or the names "
                "of the columns."
            ),
        ),
        (
            "a.tsv",
            "body\tother\tkind\na\tb\n",
            "Line 2 of `{}` must have 3 columns, like the first line, but has 2. Correct the line.",
        ),
        ("a.jsonl", "[1]\n", "Line 1 of `{}` must be a JSON object, but is [1]. Correct the line."),
        (
            "a.jsonl",
            '{"body": 3, "other": "", "kind": 1}',
            "`body` in line 1 of `{}` must be a string, but is 3. Correct the line.",
        ),
        (
            "a.jsonl",
            '\n{"body": "x"}',
            (
                "Line 2 of `{}` must have the columns `other`, `kind`, but has `body`. Correct the file, or the names "
                "of the columns."
            ),
        ),
    ],
)
def test_messages(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert refusal(DataError, read_table, path, columns=COLUMNS) == message.format(path)


def test_line_that_is_not_json_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x", "other": "", "kind": 1}\n{"body": \n')
    with pytest.raises(DataError, match=r"^Line 2 of `.*a.jsonl` must be JSON, but is not: .*\. Correct the line\.$"):
        read_table(path, columns=COLUMNS)
