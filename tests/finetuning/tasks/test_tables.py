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


def table(path: Path, values: list[str]) -> Path:
    """A `.tsv` file with these values in the column `l`."""
    path.write_text("t\tl\n" + "".join(f"x\t{value}\n" for value in values))
    return path


def labels_of(path: Path, *values: str) -> tuple[str, ...]:
    return read_table(table(path, list(values)), columns=TableColumns("t", label="l")).labels


def test_numbers_are_classes_in_numeric_order(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    assert labels_of(path, "10", "9", "-1", "1", "9") == ("-1", "1", "9", "10")
    assert labels_of(path, "10.0", "2.0", "1.5e2") == ("2.0", "10.0", "1.5e2")
    assert labels_of(path, "b", "10", "9", "a") == ("9", "10", "a", "b")
    assert labels_of(path, "3.5", "10", "other") == ("3.5", "10", "other"), "names, of which some are numbers"
    assert labels_of(path, "other", "3.10", "3.1", "03.1") == ("03.1", "3.1", "3.10", "other"), "names of versions"
    assert labels_of(path, "9007199254740993", "9007199254740992") == ("9007199254740992", "9007199254740993")
    assert labels_of(path, "1e400", "-1e400", "3") == ("-1e400", "3", "1e400")
    assert labels_of(path, "1e1000000000", "2") == ("2", "1e1000000000"), "a text"
    assert labels_of(path, "3,5", "1.2.3", "1_0", "0x1") == ("0x1", "1.2.3", "1_0", "3,5")
    named = read_table(table(path, ["3.11", "3.9"]), columns=TableColumns("t", label="l"), labels=("3.9", "3.11"))
    assert [one.label for one in named.examples] == [1, 0]
    rows: list[dict[str, object]] = [{"t": "x", "l": value} for value in (10, 9, 100)]
    assert read_table(write(tmp_path / "a.jsonl", rows), columns=TableColumns("t", label="l")).labels == (
        "9", "10", "100",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ["3", "3.8"],
            "must hold labels, but holds numbers with fractions, such as '3.8' in line 3. Pass --regression",
        ),
        (["1e-3", "2"], "holds numbers with fractions, such as '1e-3' in line 2. Pass --regression to predict the"),
        (["4", "", "2.5"], "holds numbers with fractions, such as '2.5' in line 4. Pass"),
        (["NaN", "-.5", "n/a"], "holds numbers with fractions, such as '-.5' in line 3. Pass"),
        (["4", "", "2"], "must hold a label in every line, but is '' in line 3. Correct the file, or name all"),
        (["4", "2", "NaN"], "must hold a label in every line, but is 'NaN' in line 4. Correct"),
        (["4", "1.0", "1"], "must write a number in one way, but has '1.0' and '1'. Correct the file, or name all"),
        (["01", "1"], "must write a number in one way, but has '01' and '1'. Correct"),
    ],
)
def test_columns_that_are_no_labels_are_refused(tmp_path: Path, values: list[str], message: str) -> None:
    path = table(tmp_path / "a.tsv", values)
    told = refusal(DataError, read_table, path, columns=TableColumns("t", label="l"))
    assert told.startswith(f"`l` in `{path}` must ")
    assert message in told


@pytest.mark.parametrize(
    ("value", "shown"), [("null", "None"), ("NaN", "nan"), ('["a", "b"]', "['a', 'b']"), ('{"a": 1}', "{'a': 1}")]
)
def test_values_of_json_that_are_no_label_are_refused(tmp_path: Path, value: str, shown: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": "x", "l": "a"}\n{"t": "x", "l": ' + value + "}\n")
    assert refusal(DataError, read_table, path, columns=TableColumns("t", label="l")) == (
        f"`l` in line 2 of `{path}` must be one label, but is {shown}. Correct the line."
    )


def test_numbers_are_read_as_numbers(tmp_path: Path) -> None:
    columns = TableColumns("t", label="l")
    found = read_table(table(tmp_path / "a.tsv", ["3", " 3.75", "-1e2"]), columns=columns, are_numbers=True)
    assert (found.labels, [one.number for one in found.examples]) == ((), [3.0, 3.75, -100.0])
    assert all(one.label is None and one.is_labelled for one in found.examples)
    rows: list[dict[str, object]] = [{"t": "x", "l": value} for value in (2, 2.5, "0.5")]
    found = read_table(write(tmp_path / "a.jsonl", rows), columns=columns, are_numbers=True)
    assert [one.number for one in found.examples] == [2.0, 2.5, 0.5]


@pytest.mark.parametrize(
    ("value", "shown"), [('"many"', "'many'"), ("null", "None"), ("true", "True"), ("NaN", "nan"), ("1e999", "inf")]
)
def test_values_that_are_no_finite_number_are_refused(tmp_path: Path, value: str, shown: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": "x", "l": 1}\n' + 2 * ('{"t": "x", "l": ' + value + "}\n"))
    told = refusal(DataError, read_table, path, columns=TableColumns("t", label="l"), are_numbers=True)
    assert told == (
        f"`l` in `{path}` must be a finite number, but is {shown.lower() if value == 'true' else shown} in line 2 (2 "
        "such lines). Correct the file."
    )
