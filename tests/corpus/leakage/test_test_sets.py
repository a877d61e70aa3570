"""Test sets of every form come out as the texts that were meant."""

import json
from pathlib import Path

import pytest

from crosscut.config import DataError
from crosscut.corpus.leakage.test_sets import read_test_set, set_names
from tests.refusals import refusal

LINES = (
    "", "= Robert Boulter =", "", "Robert Boulter is an actor .", "", "= = Career = =", "",
    "= 1 rad / s and a nominal impedance k =", "He was in the <unk> Factory .", "",
    "= Du Fu =", "", "Du Fu was a poet .",
)  # fmt: skip
WIKITEXT = "".join(f" {line} \n" if line else " \n" for line in LINES)


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("name", ["wiki.test.raw", "wiki.test.tokens", "renamed.txt"])
def test_wikitext_is_cut_into_its_articles(tmp_path: Path, name: str) -> None:
    items = read_test_set(write(tmp_path, name, WIKITEXT), text_key="text")
    assert [item.title for item in items] == ["Robert Boulter", "Du Fu"]
    assert "".join(item.text for item in items) == WIKITEXT
    assert len(items[0].segments) == 2  # what stands on both sides of an unknown word is not consecutive


def test_lines_of_jsonl_are_items(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "one\ntwo", "question": "three"}), "", json.dumps({"text": "", "question": "four"})]
    path = write(tmp_path, "set.jsonl", "\n".join(lines))
    assert [item.text for item in read_test_set(path, text_key="text")] == ["one\ntwo", ""]
    assert [item.text for item in read_test_set(path, text_key="question")] == ["three", "four"]


def test_text_has_passages_between_blank_lines_or_else_lines(tmp_path: Path) -> None:
    passages = write(tmp_path, "passages.txt", "\none\ntwo\n \n\nthree\n")
    assert [item.text for item in read_test_set(passages, text_key="")] == ["one\ntwo", "three"]
    lines = write(tmp_path, "lines.txt", "one\ntwo\n")
    assert [item.text for item in read_test_set(lines, text_key="")] == ["one", "two"]
    odd = write(tmp_path, "odd.txt", "one\u2028and\x85two\r\nthree\n")
    assert [item.text for item in read_test_set(odd, text_key="")] == ["one\u2028and\x85two", "three"]


def test_words_that_were_cut_apart_are_whole(tmp_path: Path) -> None:
    (item,) = read_test_set(write(tmp_path, "lambada.txt", "he did n't know"), text_key="")
    assert item.segments == ["he didn't know"]


def test_names_tell_test_sets_apart() -> None:
    assert set_names(["a/test.jsonl", "b/test.jsonl", "b/wiki.test.raw"]) == [
        "a/test.jsonl", "b/test.jsonl", "wiki.test.raw",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("set.parquet", b"", r"must name files that end in .*jsonl.*but names `.*set\.parquet`"),
        ("set.txt", b"\n \n", r"set\.txt` must contain texts of a test set, but contains none"),
        ("set.txt", b"good \xff", r"set\.txt` must be UTF-8 text, but byte 5 is not valid UTF-8"),
        ("set.jsonl", b'{"text": "a"}\n{"text"', r"set\.jsonl`, line 2, must be valid JSON"),
        ("set.jsonl", b'{"txt": "a"}', r"string under `text`, but its keys are: txt\. Set `leakage\.text_key` to"),
        ("set.jsonl", b'{"text": 5}', r"line 1, must hold a string under `text`, but holds 5\. Set"),
        ("set.jsonl", b'{"n": ' + b"9" * 10_000 + b"}", r"line 1, must be valid JSON, but is not: an integer has more"),
        ("set.jsonl", b"[" * 100_000, r"valid JSON, but is not: nested too deeply\. Correct or remove the line"),
        ("set.jsonl", b'{"text": "\\ud800"}', r"line 1, must hold text that is valid in UTF-8, but has a lone"),
        ("set.jsonl", b"[5]", r"line 1, must be a JSON object with the text under `text`, but is a list"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_test_set(tmp_path / name, text_key="text")


def test_missing_file_is_named(tmp_path: Path) -> None:
    told = refusal(DataError, read_test_set, tmp_path / "no.txt", text_key="text")
    assert told.startswith(f"`{tmp_path / 'no.txt'}` must be a readable file, but is not: No such")
