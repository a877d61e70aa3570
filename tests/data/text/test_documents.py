"""From files to documents: every format gives the same texts, and every fault its place."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.config import DamagedDataError, DataError
from crosscut.config.system.extras import install_command
from crosscut.data import read_documents
from crosscut.data.text import sources
from crosscut.data.text.documents import PIECE_CHARACTERS
from tests.refusals import refusal

TEXTS = ["One short text.", "Ünïcode — ☂ 😀\nover two lines", "  spaces stay  ", "x" * 50_000]


SET_KEY = "Set `data.text_key` (or `evaluation.text_key`) to the key of the text."


def write(path: Path, texts: list[str], *, key: str = "text") -> Path:
    data = "".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts).encode()
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(data))
    return path


def read(path: Path, **options: str) -> list[str]:
    return [document.text for document in read_documents([str(path)], **options)]


def check_message(path: Path, message: str, **options: str) -> None:
    assert refusal(DataError, read, path, **options) == message


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl_line_is_a_document(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.jsonl{suffix}", TEXTS)
    documents = list(read_documents([str(path)]))
    assert [document.text for document in documents] == TEXTS
    assert [document.record for document in documents] == [1, 2, 3, 4]
    assert documents[-1].position == path.stat().st_size
    assert documents[0].source.name == str(path)


def test_jsonl_does_not_depend_on_how_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 7)
    assert read(path) == TEXTS


def test_jsonl_passes_over_blank_lines_and_empty_texts_but_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"text": " \\n"}\n{"text": ""}\n{"text": "b"}')
    assert [(document.text, document.record) for document in read_documents([str(path)])] == [("a", 1), ("b", 6)]


def test_only_blanks_of_json_make_a_line_blank(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\xc2\xa0\n')
    check_message(
        path,
        f"`{path}`, line 2, must be valid JSON, but is not: Expecting value at column 1. Correct or remove the line.",
    )


def test_the_end_of_a_table_is_not_a_row(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"text\none\n\ntwo\n")
    found = read_documents([str(path)], blank=True)
    assert [(document.text, document.record) for document in found] == [("one", 2), ("", 3), ("two", 4)]


def test_parquet_row_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for kind in (pa.string(), pa.large_string()):
        pq.write_table(pa.table({"n": [1, 2, 3, 4], "body": pa.array(TEXTS, kind)}), path, row_group_size=3)
        documents = list(read_documents([str(path)], text_key="body"))
        assert [document.text for document in documents] == TEXTS
        assert [document.record for document in documents] == [1, 2, 3, 4]
        assert documents[-1].position == path.stat().st_size


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_short_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(suffix, bytes)
    path.write_bytes(pack("\ufeffOne.\r\n\r\nTwo ☂.\rThree.\n".encode()))
    assert read(path) == ["One.\n\nTwo ☂.\nThree.\n"]


@pytest.mark.parametrize(
    ("mark", "ending"), [("\n\n", "\n\n"), ("\n \t\n", "\n \t\n"), ("\n", "\n"), (" ", " "), ("", "a")]
)
def test_text_file_is_cut_at_the_best_mark_there_is(tmp_path: Path, mark: str, ending: str) -> None:
    path = tmp_path / "a.txt"
    # Each mark comes among lesser ones.
    filler = "aaa" + (" bbb" if len(mark) else "") + ("\nccc" if "\n" in mark else "")
    path.write_text((filler + mark) * 20_000)
    pieces = read(path)
    assert len(pieces) > 3
    assert "".join(pieces) == (filler + mark) * 20_000
    assert all(piece.endswith(ending) for piece in pieces)
    assert all(PIECE_CHARACTERS // 2 <= len(piece) <= PIECE_CHARACTERS for piece in pieces[:-1])


def test_documents_of_a_text_file_know_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {number}\n" for number in range(1, 9001)))
    documents = list(read_documents([str(path)]))
    assert len(documents) > 4
    for document in documents:
        assert document.text.startswith(f"line {document.record}\n")


@settings(max_examples=30)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(["word ", "é☂😀", "\n", "\n\n", "x" * 999, "line\n"]), st.integers(1, 900)),
        max_size=40,
    ),
    chunk=st.integers(1000, 100_000),
)
def test_cutting_loses_nothing_and_does_not_depend_on_how_the_file_is_read(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, int]], chunk: int
) -> None:
    text = "start " + "".join(part * times for part, times in parts)
    # A longer run of blanks fills documents of its own, which are passed over.
    text = text.replace("\n" * 400, "\nword\n")
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_text(text, encoding="utf-8")
    pieces = read(path)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE_CHARACTERS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK_BYTES", chunk)
        assert read(path) == pieces


@pytest.mark.parametrize("mark", ["\n", "\n\n", " ", "\n \t\n"])
@pytest.mark.parametrize("before", ["word ", "x", "line\n", "☂\n\n"])
@pytest.mark.parametrize("after", ["", "end"])
def test_blanks_that_cross_the_limit_of_a_document_are_kept(tmp_path: Path, before: str, mark: str, after: str) -> None:
    path = tmp_path / "a.txt"
    for short in (1, 2, 200, 4000):
        head = (before * PIECE_CHARACTERS)[: PIECE_CHARACTERS - short - 1] + "x"
        text = head + mark * 4000 + after
        path.write_text(text, encoding="utf-8")
        pieces = read(path)
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= PIECE_CHARACTERS


def test_holes_of_a_file_hold_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"before" + b"\n" * PIECE_CHARACTERS + b"\0" * 5 * PIECE_CHARACTERS + b"\nafter\0")
    found = "".join(read(path))
    assert found.startswith("before")
    assert found.endswith("after\0")
    assert found.count("\0") < 2 * PIECE_CHARACTERS
    path.write_bytes(b"\0" * 3 * PIECE_CHARACTERS)
    with pytest.raises(DataError, match="The corpus must hold text, but all documents are blank"):
        read(path)


def test_positions_run_over_all_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.jsonl", ["some text"]) for number in range(3)]
    documents = list(read_documents([str(tmp_path)]))
    sizes = [path.stat().st_size for path in paths]
    assert [document.position for document in documents] == [sizes[0], sizes[0] + sizes[1], sum(sizes)]
    assert [document.source.index for document in documents] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "count", "size"), [("state-of-the-union", 233, 10_000_000), ("tales", 175, 1_000_000)]
)
def test_builtin_corpus_is_clean(name: str, count: int, size: int) -> None:
    documents = list(read_documents([f"builtin:{name}"]))
    assert len(documents) == count
    text = "".join(document.text for document in documents)
    assert len(text.encode()) > size
    assert not any(mark in text for mark in ("&quot;", "&amp;", "\x02", "\ufffd", "  ", "Gutenberg"))


def test_corpus_without_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n")
    (tmp_path / "b.jsonl").write_text("\n")
    path = tmp_path / "a.txt"
    blank = f"(files: 2, first file: `{path}`)"
    check_message(
        tmp_path, f"The corpus must hold text, but all documents are blank {blank}. Name files that contain text."
    )


@pytest.mark.parametrize("chunk", [3, 64 * 1024])
def test_undecodable_byte_is_named_by_its_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk)
    good = '{"text": "☂☂"}\n'.encode()
    for name in ("a.txt", "a.jsonl"):
        path = tmp_path / name
        path.write_bytes(good * 2 + b'{"text": "\xff"}\n')
        check_message(
            path, f"`{path}` must be UTF-8 text, but byte {2 * len(good) + 10} is not. Convert the file to UTF-8."
        )
        path.write_bytes(good + "☂".encode()[:2])
        check_message(path, f"`{path}` must be UTF-8 text, but byte {len(good)} is not. Convert the file to UTF-8.")


def test_undecodable_byte_of_a_packed_file_counts_unpacked_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a" * 1000 + b"\xff"))
    check_message(
        path, f"`{path}` must be UTF-8 text, but byte 1000 of the decompressed data is not. Convert the file to UTF-8."
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"text": "b"',
            "must be valid JSON, but is not: Expecting ',' delimiter at column 13. Correct or remove the line.",
        ),
        (
            b'{"text": "b", "id": ' + b"9" * 10_000 + b"}",
            "must be valid JSON, but is not: an integer has more than 4,300 digits. Correct or remove the line.",
        ),
        (
            b'{"text": "b", "\\ud800": ' + b'{"a": ' * 100_000 + b"1",
            "must be valid JSON, but is not: nested too deeply. Correct or remove the line.",
        ),
        (b'{"\\ud800": "b"}', f"must hold a string under `text`, but its keys are: \ud800. {SET_KEY}"),
        (b'{"text": 1e999}', f"must hold a string under `text`, but holds inf. {SET_KEY}"),
        (
            b'{"text": "a\0b"}',
            "must be valid JSON, but is not: Invalid control character at at column 12. Correct or remove the line.",
        ),
        (b"[" * 100_000, "must be valid JSON, but is not: nested too deeply. Correct or remove the line."),
        (b'["b"]', "must be a JSON object with the text under `text`, but is a list. Correct or remove the line."),
        (b'{"body": "b", "id": 3}', f"must hold a string under `text`, but its keys are: body, id. {SET_KEY}"),
        (b"{}", f"must hold a string under `text`, but its keys are: none. {SET_KEY}"),
        (b'{"text": 7}', f"must hold a string under `text`, but holds 7. {SET_KEY}"),
        (b'{"text": null}', f"must hold a string under `text`, but holds None. {SET_KEY}"),
        (
            b'{"text": "half \\ud83d"}',
            "must hold text that is valid in UTF-8, but has a lone surrogate. Correct or remove the line.",
        ),
    ],
)
def test_faulty_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "whole \\ud83d\\ude00"}\n\n' + line + b"\n")
    check_message(path, f"`{path}`, line 3, {message}")


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_rows_of_a_table_are_documents(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / ("a.tsv" if pack is bytes else "a.tsv.gz")
    path.write_bytes(pack('\ufeffkind\tbody\r\nx\tsays "hi", twice\r\ny\t\r\nz\tlast\n\n'.encode()))
    found = [(d.text, d.record) for d in read_documents([str(path)], text_key="body")]
    assert found == [('says "hi", twice', 2), ("last", 4)]
    assert refusal(DataError, list, read_documents([str(path)])) == (
        f"`{path}` must have a column `text`, but its columns are: kind, body. Set `data.text_key` (or "
        "`evaluation.text_key`) to the column of the text."
    )
    path.write_bytes(pack(b"kind\tbody\nx\n"))
    with pytest.raises(DataError, match=r", line 2, must have 2 columns, like the first line, but has 1\."):
        list(read_documents([str(path)], text_key="body"))


def test_a_table_is_read_only_if_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("prose")
    (tmp_path / "labels.tsv").write_text("id\tlabel\n1\tx\n")
    assert [d.text for d in read_documents([str(tmp_path)])] == ["prose"]
    assert [d.text for d in read_documents([str(tmp_path / "*.tsv")], text_key="label")] == ["x"]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    check_message(path, f"`{path}` needs pyarrow, but pyarrow is not installed. Run `{install_command('parquet')}`.")


def test_faulty_parquet_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None], "n": [1, 2]}), path)
    again = "Set `data.text_key` (or `evaluation.text_key`) to the column of the text."
    check_message(path, f"`{path}` must have a column `body`, but its columns are: text, n. {again}", text_key="body")
    check_message(path, f"Column `n` of `{path}` must hold strings, but holds int64. {again}", text_key="n")
    check_message(
        path,
        f"`{path}`, row 2, must hold a string under `text`, but holds null. Remove the row, or set `data.text_key` "
        "(or `evaluation.text_key`) to another column.",
    )
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\x00\x00\x00\x00\x01\x00\x00\x00"), pa.py_buffer(b"\xff")]
    )
    pq.write_table(pa.table({"text": bad}), path)
    check_message(path, f"`{path}`, row 1, must be UTF-8 text, but is not. Correct or remove the row.")


@pytest.mark.parametrize("keep", [0, 3, 200])
def test_damaged_parquet_is_an_error(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["some text"] * 100}), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value).startswith(f"`{path}` must be an undamaged parquet file, but is not: ")
    assert str(error.value).endswith(". Get the file again.")


def test_parquet_with_damaged_pages_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {number}" for number in range(1000)]}), path, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[4:1004] = b"\xff" * 1000
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"must be an undamaged parquet file, but is not: .*\. Get the file again\."):
        read(path)


@pytest.mark.parametrize(("name", "is_damaged"), [("a.jsonl.gz", True), ("a.txt.gz", True), ("a.jsonl.gz", False)])
def test_damage_is_told_instead_of_the_garbage_that_it_leaves(tmp_path: Path, name: str, is_damaged: bool) -> None:
    """gzip stores this text unpacked, so damage to it is found by the checksum at the end alone."""
    path = tmp_path / name
    content = bytearray(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n', compresslevel=0))
    assert b'"two"}' in content
    if is_damaged:
        content[content.index(b'"two"}')] = 0xFF
        path.write_bytes(content)
    else:
        path.write_bytes(gzip.compress(b'{"text": "one"}\n{"text": \n'))
    told = "is damaged near byte" if is_damaged else "line 2, must be valid JSON"
    with pytest.raises(DataError, match=told) as caught:
        list(read_documents([str(path)]))
    assert isinstance(caught.value, DamagedDataError) == is_damaged
