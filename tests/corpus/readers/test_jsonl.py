"""A line is a document, and a bad one costs no other."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from crosscut.corpus.readers import RawText, Skip
from tests.corpus.reads import read, rejects, skips, texts

LONG = 1000
"""A longest document for the tests, in bytes."""


def line(text: str, **more: object) -> bytes:
    return json.dumps({"text": text, **more}).encode() + b"\n"


def write(folder: Path, *lines: bytes) -> Path:
    path = folder / "a.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def test_document_has_what_its_keys_say(tmp_path: Path) -> None:
    path = write(tmp_path, b"\n", line("one", url="https://a.org", karma=7, title="One"), b'{"text": "two"}')
    first, second = read(path)
    size = path.stat().st_size
    assert first == RawText("one", 2, size, url="https://a.org", karma=7.0, title="One")
    assert second == RawText("two", 3, size)


def test_keys_are_the_sources_own(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"body": "one", "link": "u", "score": "3.5", "name": "t"}')
    (item,) = read(path, text_key="body", url_key="link", karma_key="score", title_key="name")
    assert item == RawText("one", 1, path.stat().st_size, url="u", karma=3.5, title="t")


@pytest.mark.parametrize("value", [None, True, "many", [], "nan", 10**400])
def test_bad_karma_url_and_title_are_left_out(tmp_path: Path, value: object) -> None:
    path = write(tmp_path, line("one", karma=value, url=7, title=["t"]))
    assert read(path) == [RawText("one", 1, path.stat().st_size)]


@pytest.mark.parametrize(
    ("bad", "rule", "reason"),
    [
        (b'{"text": "cut', "not JSON", "Unterminated string starting at at column 10"),
        (b'{"text": "caf\xe9"}', "not UTF-8", "byte 14 of the line is not UTF-8: invalid continuation byte"),
        (b'["text"]', "not a JSON object", "the line holds a value of type list instead of a JSON object"),
        (b'{"body": "b", "n": 1}', "no text", "there is no key `text`; the keys are: body, n"),
        (b"{}", "no text", "there is no key `text`; the keys are: none"),
        (b'{"text": null}', "no text", "`text` is null"),
        (b'{"text": 7}', "text is not a string", "`text` has the type int instead of string"),
        (b'{"text": "\\ud800 half"}', "lone surrogate", "UTF-8 cannot encode half of a surrogate pair"),
        (b'{"n": ' + b"9" * 10_000 + b"}", "not JSON", "an integer has more than 4,300 digits"),
        (b'{"text": "a", "n": [-' + b"1" * 5000 + b"]}", "not JSON", "an integer has more than 4,300 digits"),
        (b"[" * 200_000, "not JSON", "nested too deeply"),
        (b'{"text": ' + b'{"a":' * 200_000, "not JSON", "nested too deeply"),
        (b'{"\\udfff": 1e9999}', "no text", "there is no key `text`; the keys are: ?"),
    ],
)
def test_bad_line_is_rejected_with_its_place_and_reason(
    tmp_path: Path, bad: bytes, rule: str, reason: str | None
) -> None:
    first, reject, last = read(write(tmp_path, line("before"), bad + b"\n", line("after")))
    assert (first.text, last.text) == ("before", "after")
    assert (reject.place, reject.rule) == ("line 2", rule)
    assert reason in (None, reject.reason)
    assert bool(reject.excerpt) == (bad != b"{}")
    assert (reject.excerpt + reject.reason).encode()


def test_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    assert texts(read(write(tmp_path, b'{"text": "\\ud83d\\ude00"}'))) == ["\N{GRINNING FACE}"]


def test_nul_bytes_are_left_to_the_cleaning(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"text": "a\x00b\\u0000c"}\n')
    assert texts(read(path)) == ["a\0b\0c"]


def test_line_behind_a_run_of_nuls_is_not_lost(tmp_path: Path) -> None:
    """As files have it that were open when a machine went down."""
    path = write(tmp_path, line("one"), b"\0" * 5000 + line("two"), b"\0" * 70_000)
    assert texts(read(path)) == ["one", "two"]
    assert rejects(read(path)) == []


def test_blank_texts_are_passed_over_and_told(tmp_path: Path) -> None:
    assert read(write(tmp_path, line(""), line(" \n"))) == [Skip("blank", 1), Skip("blank", 2)]


def test_byte_order_mark_and_line_ends_of_windows(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + line("one").replace(b"\n", b"\r\n"), line("two"))
    assert texts(read(path)) == ["one", "two"]


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_line_that_is_too_long_is_rejected_and_its_neighbours_are_read(tmp_path: Path, where: str, suffix: str) -> None:
    long = line("x" * 300_000)
    lines = [line("a"), line("b")]
    lines.insert(["first", "middle", "last"].index(where), long)
    packed = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](b"".join(lines))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    items = read(path, max_bytes=LONG)
    assert texts(items) == ["a", "b"]
    assert rejects(items) == [(f"line {1 + lines.index(long)}", "too long")]


def test_longest_line_is_read(tmp_path: Path) -> None:
    text = "x" * (LONG - len(line("")) + 1)
    assert texts(read(write(tmp_path, line(text)), max_bytes=LONG)) == [text]
    assert rejects(read(write(tmp_path, line(text + "x")), max_bytes=LONG)) == [("line 1", "too long")]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_what_came_before_the_end_of_a_truncated_file_is_kept(tmp_path: Path, suffix: str, pack) -> None:
    whole = b"".join(line(f"{n} " + "".join(chr(97 + n * k % 26) for k in range(300))) for n in range(3000))
    packed = pack(whole)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    expected = texts(read(path))
    path.write_bytes(packed[: len(packed) * 2 // 3])
    items = read(path)
    found = texts(items)
    assert found == expected[: len(found)]
    assert len(found) > 1000
    (reject,) = (item for item in items if not isinstance(item, RawText))
    assert reject is items[-1]
    assert (reject.place, reject.rule) == (f"byte {path.stat().st_size}", "damaged file")
    assert reject.reason == (
        f"line {len(found) + 1} and everything after it cannot be read: `{path}` must hold complete {suffix} data, but "
        f"is truncated at byte {path.stat().st_size}. Get the file again."
    )
    assert skips(items) == []


def test_damage_in_the_middle_counts_the_bytes_that_are_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    good = gzip.compress(line("one"))
    path.write_bytes(good + b"no such data" * 1000)
    *kept, reject = read(path)
    assert texts(kept) == ["one"]
    assert 10_000 < reject.lost <= path.stat().st_size
