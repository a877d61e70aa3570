"""Batches of encoded examples."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from crosscut.config import DataError
from crosscut.config.conventions import IGNORED
from crosscut.finetuning.encoding.rows import EncodedRow, EncodedRows


def rows_of(lengths: list[int], *, width: int = 1) -> EncodedRows:
    rows = [EncodedRow(np.arange(5, 5 + size, dtype=np.int32), np.ones(size, dtype=np.uint8)) for size in lengths]
    number = len(lengths) // width
    return EncodedRows.of(rows, np.arange(number), list(range(number)))


def test_every_example_counts_once_in_an_epoch() -> None:
    rows = rows_of([2] * 10)
    assert rows.steps_per_epoch(4) == 3
    for epoch in range(2):
        batches = [rows.batch(3 * epoch + step, batch_size=4, seed=1) for step in range(3)]
        seen = Counter(np.concatenate(batches).tolist())
        assert seen == {-1: 2, **dict.fromkeys(range(10), 1)}
        assert all((batch >= 0).all() for batch in batches[:2])
    orders = {tuple(rows.batch(step, batch_size=10, seed=seed)) for step in range(2) for seed in (1, 2)}
    assert len(orders) == 4, "epochs and seeds have orders of their own"


def test_rows_are_padded_to_the_longest_of_the_batch() -> None:
    rows = rows_of([2, 5, 3])
    chosen = np.array([2, 0, -1])
    assert rows.longest(chosen, multiple=4) == 4
    padded = rows.padded(chosen, length=4, padding=9)
    assert padded.tokens.tolist() == [[5, 6, 7, 9], [5, 6, 9, 9], [9, 9, 9, 9]]
    assert padded.segments.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert padded.mask.sum(1).tolist() == [3, 2, 1], "attention in an empty row needs one token"
    assert padded.labels.tolist() == [2, 0, IGNORED]


def test_the_options_of_a_question_are_successive_rows() -> None:
    rows = rows_of([1, 2, 3, 4], width=2)
    assert (rows.num_examples, rows.width) == (2, 2)
    padded = rows.padded(np.array([1, 0, -1]), length=4, padding=0)
    assert padded.mask.sum(1).tolist() == [3, 4, 1, 2, 1, 1]
    assert padded.labels.tolist() == [1, 0, IGNORED]


def test_rows_are_kept_in_a_file(tmp_path: Path) -> None:
    rows = rows_of([2, 5, 3])
    rows.save(tmp_path / "rows.npz")
    read = EncodedRows.load(tmp_path / "rows.npz")
    assert read.fingerprint == rows.fingerprint
    assert read.labels.tolist() == rows.labels.tolist()
    (tmp_path / "rows.npz").write_bytes((tmp_path / "rows.npz").read_bytes()[:200])
    with pytest.raises(DataError, match="must hold the encoded examples of the run, but cannot be read"):
        EncodedRows.load(tmp_path / "rows.npz")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ids", np.zeros((10, 1), dtype=np.int32)),
        ("ids", np.full(10, -1, dtype=np.int32)),
        ("ids", np.full(10, 0.5)),
        ("types", np.zeros(9, dtype=np.uint8)),
        ("ends", np.array([2, 1, 10])),
        ("ends", np.array([], dtype=np.int64)),
        ("labels", np.zeros((3, 3), dtype=np.int64)),
        ("labels", np.zeros(2, dtype=np.int64)),
        ("labels", np.full(3, "a")),
        ("sources", np.array(0)),
        ("sources", np.array([0, 1, -2])),
        ("offsets", np.zeros((4, 2), dtype=np.int32)),
    ],
)
def test_arrays_that_contradict_each_other_are_not_read(tmp_path: Path, name: str, value: npt.NDArray[Any]) -> None:
    rows = rows_of([2, 5, 3])
    assert (rows.num_examples, rows.ids.size) == (3, 10)
    replace(rows, **{name: value}).save(tmp_path / "rows.npz")
    with pytest.raises(DataError, match="cannot be read: the types, shapes or values of its arrays contradict"):
        EncodedRows.load(tmp_path / "rows.npz")


def test_an_archive_of_a_method_that_is_not_supported_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    rows_of([2]).save(path)
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 10] = 77  # the method of the first entry
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read: That compression method is not supported"):
        EncodedRows.load(path)
