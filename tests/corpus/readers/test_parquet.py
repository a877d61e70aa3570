"""A row is a document, and a bad one costs no other; a file of another schema says which columns it has."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crosscut.corpus.readers import RawText
from tests.corpus.reads import read, rejects, skips, texts


def write(folder: Path, columns: dict[str, object], **options: object) -> Path:
    path = folder / "a.parquet"
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_document_has_what_its_columns_say(tmp_path: Path) -> None:
    columns = {"n": [1, 2], "text": ["one", "two"], "url": ["u", None], "karma": [3, None], "title": ["t", None]}
    path = write(tmp_path, columns)
    size = path.stat().st_size
    assert read(path) == [
        RawText("one", 1, size // 2, url="u", karma=3.0, title="t"),
        RawText("two", 2, size),
    ]


def test_rows_keep_their_numbers_across_row_groups(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": [f"text {n}" for n in range(100)]}, row_group_size=7)
    assert [(item.text, item.record) for item in read(path)] == [(f"text {n}", n + 1) for n in range(100)]


def test_null_blank_long_and_broken_texts_cost_no_other(tmp_path: Path) -> None:
    bad = pa.array([b"good", None, b"\xff\xfe", b" ", b"x" * 101, b"last"], pa.binary()).cast(pa.string(), safe=False)
    items = read(write(tmp_path, {"text": bad}), max_bytes=100)
    assert texts(items) == ["good", "last"]
    assert rejects(items) == [("row 2", "no text"), ("row 3", "not UTF-8"), ("row 5", "too long")]
    assert skips(items) == ["blank"]


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_batch_is_read_alike_at_once_and_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr("crosscut.data.text.parquet._BATCH_BYTES", most)
    url = pa.array([b"u", None, b"\xff", b"v"], pa.binary()).cast(pa.string(), safe=False)
    path = write(tmp_path, {"text": ["one", "two", "three", "four"], "url": url})
    first, second, third, fourth = read(path)
    assert rejects([third]) == [("row 3", "not UTF-8")]
    size = path.stat().st_size
    assert [first, second] == [RawText("one", 1, size // 4, url="u"), RawText("two", 2, size // 2)]
    assert fourth == RawText("four", 4, size, url="v")


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_other_types_of_strings_are_read(tmp_path: Path, kind: pa.DataType) -> None:
    assert texts(read(write(tmp_path, {"text": pa.array(["one", "two"], kind)}))) == ["one", "two"]


def test_url_that_is_no_plain_value_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": ["one"], "url": [["a", "b"]], "karma": [{"up": 1}]})
    assert read(path) == [RawText("one", 1, path.stat().st_size)]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"body": ["a"], "n": [1]}, "there is no column `text`; the columns are: body, n"),
        ({"text": [1, 2]}, "column `text` holds int64 instead of strings"),
        ({"text": [["a"]]}, "column `text` holds list<element: string> instead of strings"),
    ],
)
def test_file_with_another_schema_is_rejected_as_a_whole(
    tmp_path: Path, columns: dict[str, object], reason: str
) -> None:
    path = write(tmp_path, columns)
    (reject,) = read(path)
    assert (reject.place, reject.rule, reject.reason) == ("row 1", "other schema", reason)
    assert reject.lost == path.stat().st_size


def test_file_that_is_no_parquet_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for content in (b"", b"PAR1", b"no parquet at all"):
        path.write_bytes(content)
        (reject,) = read(path)
        assert (reject.place, reject.rule) == ("row 1", "damaged file")
        assert reject.reason.startswith("the file cannot be read: ")


def test_damaged_page_costs_only_what_is_left_of_its_row_group(tmp_path: Path) -> None:
    written = [" ".join(str(n * k % 9973) for k in range(1, 200)) for n in range(200)]
    path = write(tmp_path, {"text": written}, row_group_size=20, compression="gzip")
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 400] = b"\xff" * 400
    path.write_bytes(data)
    items = read(path)
    (place,) = (place for place, item in enumerate(items) if not isinstance(item, RawText))
    before, reject, after = items[:place], items[place], items[place + 1 :]
    assert (reject.place, reject.rule) == (f"row {place + 1}", "damaged file")
    assert reject.reason.startswith(f"rows {place + 1} to ")
    assert texts(before) == written[:place]
    assert texts(after) == written[-len(after) :]
    assert [item.record for item in after if isinstance(item, RawText)] == list(range(201 - len(after), 201))
    assert 180 <= len(before) + len(after) < 200
    assert 0 < reject.lost <= path.stat().st_size // 10
