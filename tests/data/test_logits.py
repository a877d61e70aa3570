"""The store of a teacher's logits holds what was written, in every type."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from crosscut.config import DataError
from crosscut.data import logits as stored
from crosscut.data.logits import LogitForm, LogitStore
from crosscut.data.shards.array_file import ArrayFile
from tests.refusals import refusal


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("vocab_size", [1 << 16, (1 << 16) + 1])
def test_rows_are_read_as_written(
    tmp_path: Path, precision: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = LogitForm(k=3, vocab_size=vocab_size, precision=precision, length=1 << 14)
    assert form.part_samples == 4
    store, drawn = LogitStore.find(tmp_path, form), np.random.default_rng(0)
    store.begin()
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
    other = ThreadPoolExecutor(1)
    monkeypatch.setattr(
        ArrayFile, "__len__", lambda held: (other.submit(store._opened.clear).result(), held._length)[1]
    )
    np.testing.assert_array_equal(
        store.read(0, 6)[0], rows["ids"]
    )  # another thread reads another part at the same time
    monkeypatch.undo()
    assert "must hold the logits of sequence 7 of the run" in refusal(DataError, store.read, 6, 1)


def test_only_what_a_killed_command_left_is_removed(tmp_path: Path) -> None:
    form = LogitForm(k=3, vocab_size=8, precision="float32", length=4)
    left = [tmp_path / f".{name}.0123abcd" for name in ("cache.json", "logits-00000.rows", "logits-00000.json")]
    for path in left:
        path.touch()
    store = LogitStore.find(tmp_path, form)
    store.begin()
    assert [path.name for path in tmp_path.iterdir()] == ["cache.json"]
    (tmp_path / ".logits-dir").mkdir()
    (tmp_path / ".logits-mine.txt").touch()
    LogitStore.find(tmp_path, form).begin()
    assert (tmp_path / ".logits-dir").is_dir()
    assert (tmp_path / ".logits-mine.txt").is_file()


def test_a_part_that_was_deleted_loses_its_description_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LogitStore.find(tmp_path, LogitForm(k=3, vocab_size=8, precision="float32", length=4))
    store.begin()
    store.write(range(1), np.zeros((1, 4), store.form.row))
    (tmp_path / "logits-00000.rows").unlink()
    monkeypatch.setattr(stored, "write_json", lambda *_: None)  # as if killed after the rows
    store.write(range(1), np.ones((1, 4), store.form.row))
    assert store.missing(1) == [range(1)]


def test_a_store_that_cannot_be_read_is_not_to_be_prepared_again(tmp_path: Path) -> None:
    form = LogitForm(k=3, vocab_size=8, precision="float32", length=4)
    LogitStore.find(tmp_path, form).begin()
    for content in ("{", "{}"):
        (tmp_path / "cache.json").write_text(content)
        assert "Delete the folder with its logits, or choose" in refusal(DataError, LogitStore.find, tmp_path, form)
