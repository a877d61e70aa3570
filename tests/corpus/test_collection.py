"""A document's number leads to it, and numbers ascend in the order of the corpus."""

import numpy as np
import pytest

from crosscut.config.errors import DataError
from crosscut.corpus.collection import collect, split_by_part
from tests.corpus.duplicates.corpora import ingest


def test_numbers_lead_to_documents_of_earlier_runs_and_of_this_one(tmp_path):
    ingest(tmp_path / "old" / "work", [["a", "b"]], name="old")
    work = ingest(tmp_path / "new", [["c"], ["d", "e"]], name="new")
    collection = collect(work, (str(tmp_path / "old"),), filters=(), cleaned=False)
    rows = np.arange(2, dtype=np.uint32)
    numbers = np.concatenate(
        [collection.numbers(0, rows), collection.numbers(1, rows[:1]), collection.numbers(2, rows)]
    )
    assert np.array_equal(numbers, np.sort(numbers))
    assert [document.text for document in collection.documents(numbers)] == ["a", "b", "c", "d", "e"]
    assert collection.ids(numbers[[4, 0, 4]]) == ["new1.1", "old0.0", "new1.1"]
    assert collection.is_earlier(numbers).tolist() == [True, True, False, False, False]
    assert [(index, rows.tolist()) for index, rows in split_by_part(numbers)] == [(0, [0, 1]), (1, [0]), (2, [0, 1])]
    assert len(collection.earlier_digests()) == 1


def test_an_earlier_run_must_be_there(tmp_path):
    with pytest.raises(
        DataError, match=r"`duplicates.against` must name output folders .* but `.*` holds no documents"
    ):
        collect(tmp_path, (str(tmp_path / "gone"),), filters=(), cleaned=False)
