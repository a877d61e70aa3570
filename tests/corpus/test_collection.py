"""A document's number leads to it, and numbers ascend in the order of the corpus."""

from pathlib import Path

import numpy as np
import pytest

from crosscut.config.corpora import SourceConfig
from crosscut.config.errors import ConfigError, DataError
from crosscut.config.system.deletion import claim
from crosscut.corpus.collection import collect, earlier_id, split_by_part
from crosscut.corpus.documents import READ, TEXTS, Drop, Lineage, Part, write_drops, write_table
from crosscut.corpus.execution.stages import Output
from crosscut.corpus.finished import mark_finished, mark_unfinished
from tests.corpus.duplicates.corpora import ingest
from tests.refusals import refusal


def finish(work: Path, *filters: str, cleaned: bool = False) -> None:
    mark_finished(work, Lineage(filters, cleaned))


def test_numbers_lead_to_documents_of_earlier_runs_and_of_this_one(tmp_path):
    finish(ingest(tmp_path / "old" / "work", [["a", "b"]], name="old"))
    work = ingest(tmp_path / "new", [["c"], ["d", "e"]], name="new")
    collection = collect(work, (str(tmp_path / "old"),), READ)
    rows = np.arange(2, dtype=np.uint32)
    numbers = np.concatenate(
        [collection.numbers(0, rows), collection.numbers(1, rows[:1]), collection.numbers(2, rows)]
    )
    assert np.array_equal(numbers, np.sort(numbers))
    texts = [text for index, some in split_by_part(numbers) for text in collection.parts[index].texts(some)]
    assert texts == ["a", "b", "c", "d", "e"]
    assert collection.ids(numbers[[4, 0, 4]]) == ["new1.1", f"[{tmp_path / 'old'}] old0.0", "new1.1"]
    assert collection.is_earlier(numbers).tolist() == [True, True, False, False, False]
    assert [(index, rows.tolist()) for index, rows in split_by_part(numbers)] == [(0, [0, 1]), (1, [0]), (2, [0, 1])]
    assert len(collection.earlier_digests()) == 1


def test_what_an_earlier_run_kept_is_what_its_own_stages_kept(tmp_path):
    work = ingest(tmp_path / "old" / "work", [["a", "b", "c"]])
    for stage, row in (("length", 0), ("language", 1)):
        (work / stage).mkdir()
        write_drops(Output(work / stage), "000000-0000", [Drop(row, "rule")])
    (work / "cleaning").mkdir()
    rows = {"row": [0, 1, 2], "text": ["A", "B", "C"]}
    write_table(work / "cleaning" / "000000-0000.arrow", rows, TEXTS)

    def kept(*filters: str, cleaned: bool = False) -> tuple[list[str], list[str]]:
        finish(work, *filters, cleaned=cleaned)
        collection = collect(tmp_path / "new", (str(tmp_path / "old"),), READ)
        texts = [document.text for document in collection.parts[0].documents()]
        return texts, collection.earlier_digests()

    assert kept()[0] == ["a", "b", "c"]  # the other folders are of runs before
    assert kept("length")[0] == ["b", "c"]
    assert kept("length", "language", cleaned=True)[0] == ["C"]
    assert kept("length")[1] == kept("length")[1] != kept("length", cleaned=True)[1]


def test_ids_are_read_without_texts(tmp_path, monkeypatch):
    work = ingest(tmp_path, [["a", "b"]])
    collection = collect(work, (), READ)
    monkeypatch.setattr(Part, "texts", None)
    monkeypatch.setattr("crosscut.corpus.documents.read_table", None)
    assert collection.ids(collection.numbers(0, np.array([1, 0], np.uint32))) == ["0.1", "0.0"]


def test_documents_of_earlier_runs_are_named_as_no_source_can_be():
    with pytest.raises(ConfigError, match=r"`sources.name` must consist of letters"):
        SourceConfig(name=earlier_id("runs/old", "web/a.jsonl#1").partition("/")[0], files=("-",))


@pytest.mark.parametrize("harm", [None, mark_unfinished], ids=["gone", "begun"])
def test_an_earlier_run_must_have_ended_well(tmp_path, harm):
    folder = tmp_path / "old"
    if harm:
        finish(work := ingest(folder / "work", [["a"]]))
        claim(work)
        harm(work)
    assert refusal(DataError, collect, tmp_path, (str(folder),), READ) == (
        f"`duplicates.against` must name output folders of finished runs of `crosscut prepare`, but `{folder}` "
        f"holds no finished run. Its folder `work` may be missing, or the run may be interrupted or still "
        f"running. Finish the run first, or remove `{folder}` from `duplicates.against`."
    )
