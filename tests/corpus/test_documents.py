"""Parts: rows keep their number, drops take documents away, cleaned texts stand for the first ones."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from crosscut.corpus.documents import (
    DOCUMENTS,
    MARKS_SUFFIX,
    READ,
    TEXTS,
    Drop,
    Judgement,
    Lineage,
    Part,
    read_columns,
    read_drops,
    read_table,
    write_drops,
    write_table,
)
from crosscut.corpus.execution.stages import Output, PlannedStage, TaskRecord, Yields
from crosscut.corpus.filters.judging import judge_part
from crosscut.corpus.parts import PartStage, find_parts

NAME = "000000-0000"


@pytest.fixture
def part(tmp_path: Path) -> Part:
    texts = ["zero", "one", "tw\u00f6", "three"]
    for stage in ("ingest", "cleaning", "urls"):
        (tmp_path / stage).mkdir()
    columns = {
        "id": [f"s/f#{row}" for row in range(4)], "text": texts, "url": ["", "http://x", "", ""],
        "karma": [None, 3.0, None, None], "title": ["", "", "Two", ""],
    }  # fmt: skip
    write_table(tmp_path / "ingest" / f"{NAME}.arrow", columns, DOCUMENTS, packed=True)
    write_drops(Output(tmp_path / "urls"), NAME, [Drop(1, "domain", "x")])
    cleaned = {"row": [0, 2, 3], "text": ["ZERO", "TW\u00d6", "THREE"]}
    write_table(tmp_path / "cleaning" / f"{NAME}.arrow", cleaned, TEXTS)
    return Part(tmp_path, NAME)


def told(part: Part) -> list[tuple[int, str]]:
    return [(document.row, document.text) for document in part.documents()]


def test_documents_are_those_that_filters_left_with_their_latest_text(part):
    assert told(part) == [(0, "zero"), (1, "one"), (2, "tw\u00f6"), (3, "three")]
    assert told(Part(part.work, NAME, Lineage(("urls",)))) == [(0, "zero"), (2, "tw\u00f6"), (3, "three")]
    assert told(Part(part.work, NAME, Lineage(("urls",), cleaned=True))) == [(0, "ZERO"), (2, "TW\u00d6"), (3, "THREE")]
    assert part.sizes() == {0: 4, 1: 3, 2: 4, 3: 5}
    assert Part(part.work, NAME, Lineage(("urls",), cleaned=True)).sizes() == {0: 4, 2: 4, 3: 5}
    one = list(part.documents())[1]
    assert (one.id, one.url, one.karma, one.title, one.num_bytes) == ("s/f#1", "http://x", 3.0, "", 3)


def test_texts_are_read_by_row(part):
    rows = np.array([3, 0], np.uint32)
    assert part.texts(rows) == ["three", "zero"]
    cleaned = Part(part.work, NAME, Lineage(("urls",), cleaned=True))
    assert cleaned.rows().tolist() == [0, 2, 3]
    assert cleaned.texts(rows) == ["THREE", "ZERO"]


def test_the_first_texts_are_not_read_where_cleaned_texts_stand_for_them(part, monkeypatch):
    read = []

    def note(path: Path, *names: str) -> pa.Table:
        read.extend(names)
        return read_columns(path, *names)

    monkeypatch.setattr("crosscut.corpus.documents.read_columns", note)
    assert told(Part(part.work, NAME, Lineage(("urls",), cleaned=True))) == [(0, "ZERO"), (2, "TW\u00d6"), (3, "THREE")]
    assert "id" in read
    assert "text" not in read


def short(limit: int):
    def judge(documents):
        drops = [Drop(d.row, "too short", f"{len(d.text)} characters") for d in documents if len(d.text) < limit]
        return Judgement(drops, {"characters": [len(d.text) for d in documents]})

    return judge


def test_a_filter_writes_who_goes_and_what_it_measured(part, tmp_path):
    folder = tmp_path / "length"
    folder.mkdir()
    counts = judge_part(Part(part.work, NAME, Lineage(("urls",))), short, (4,), "", Output(folder))
    assert counts == {
        "documents_in": 3, "documents_out": 2, "bytes_in": 13, "bytes_out": 9,
        "rules": {"too short": {"documents": 1, "bytes": 4}},
    }  # fmt: skip
    assert read_drops(tmp_path, "length", NAME).to_pylist() == [
        {"row": 2, "rule": "too short", "detail": "3 characters", "other": ""}
    ]
    marks = read_table(folder / f"{NAME}{MARKS_SUFFIX}")
    assert marks.to_pydict() == {"row": [0, 2, 3], "characters": [4, 3, 5]}
    assert told(Part(part.work, NAME, Lineage(("urls", "length"), cleaned=True))) == [(0, "ZERO"), (3, "THREE")]


def test_tables_have_the_same_bytes_for_the_same_values(tmp_path):
    for name in ("a", "b"):
        write_table(tmp_path / name, {"row": [1, 2], "text": ["x", "y"]}, TEXTS, packed=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with pytest.raises(pa.ArrowException):
        read_table(Path(__file__))


def test_a_stage_has_a_task_for_each_part_in_the_corpus_order(tmp_path):
    folder = tmp_path / "ingest"
    folder.mkdir()
    for task, parts in (("000001", {"000001-0000": 5}), ("000000", {"000000-0001": 7, "000000-0000": 6})):
        record = TaskRecord(task=task, key="k", seconds=0.0, size=1, files={}, sizes={}, counts={"parts": parts})
        (folder / f"{task}.json").write_text(record.content())
    assert [(part.name, size) for part, size in find_parts(tmp_path)] == [
        ("000000-0000", 6), ("000000-0001", 7), ("000001-0000", 5),
    ]  # fmt: skip
    stage = PartStage(name="length", version=1, function=judge_part, lineage=Lineage(("urls",), cleaned=True))
    first = stage.tasks(tmp_path)[0]
    assert (first.name, first.size) == ("000000-0000", 6)
    assert [path.relative_to(tmp_path).as_posix() for path in first.inputs] == [
        "ingest/000000-0000.arrow", "cleaning/000000-0000.arrow", "urls/000000-0000.drops.arrow",
    ]  # fmt: skip


def test_a_lineage_names_the_stages_that_yield_drops_and_new_texts():
    def stage(name: str, yields: Yields) -> PlannedStage:
        return PlannedStage(name=name, version=1, plan=lambda _: [], yields=yields)

    cleaned = READ.after([stage("urls", Yields.DROPS), stage("cleaning", Yields.DROPS | Yields.TEXTS)])
    assert cleaned == Lineage(("urls", "cleaning"), cleaned=True)
    assert cleaned.after([stage("tokenizer", Yields.FILES)]) == cleaned
    assert READ.after([stage("urls", Yields.DROPS)]) == Lineage(("urls",))
