"""The store of a teacher's logits holds what was written, in every type."""

from pathlib import Path

import numpy as np
import pytest

from crosscut.config import DataError
from crosscut.data.logits import LogitForm, LogitStore
from tests.refusals import refusal


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("vocab_size", [1 << 16, (1 << 16) + 1])
def test_rows_are_read_as_written(tmp_path: Path, precision: str, vocab_size: int) -> None:
    form = LogitForm(k=3, vocab_size=vocab_size, precision=precision, length=1 << 14)
    assert form.part_samples == 4
    store, drawn = LogitStore.make(tmp_path, form), np.random.default_rng(0)
    rows = np.empty((6, form.length), form.row)
    rows["ids"] = drawn.integers(0, vocab_size, rows["ids"].shape)
    logits = drawn.integers(-100, 100, rows["logits"].shape) / 4  # exact in all types
    bits = (logits.astype(np.float32).view(np.uint32) >> 16) if precision == "bfloat16" else logits
    rows["logits"], rows["rest"] = bits, drawn.normal(size=rows["rest"].shape)
    assert store.missing(6) == [range(4), range(4, 6)]
    store.write(range(4), rows[:4])
    store.write(range(4, 6), rows[4:])
    assert not store.missing(6)
    store = LogitStore.open(tmp_path)
    store.require_samples(6, verify=True)
    for first, count in ((0, 6), (3, 2), (5, 1), (1, 2)):
        ids, values = store.read(first, count)
        assert ids.dtype == np.int32
        assert values.dtype == (np.float64 if precision == "float64" else np.float32)
        np.testing.assert_array_equal(ids, rows["ids"][first : first + count])
        np.testing.assert_array_equal(values[..., :-1], logits[first : first + count])
        np.testing.assert_array_equal(values[..., -1], rows["rest"][first : first + count])
    assert "must hold the logits of sequence 7 of the run" in refusal(DataError, store.read, 6, 1)
