"""Numbers in a file come back as they were written, and a change of the file is told instead of killing the process."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from crosscut.config import DataConfig, DataError
from crosscut.data import Sampler, TokenFolder, ValidationSampler, prepare
from crosscut.data.shards.array_file import ArrayFile
from tests.data.conftest import make_texts, write_jsonl

SAFE = (
    "Checkpoints that have been written are safe. Restore the file or make it again, then resume the run from its last "
    "checkpoint."
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "train-0.tokens"
    np.arange(1000, dtype="<u2").tofile(path)
    return path


def test_slices_and_elements_are_those_of_an_array(path: Path) -> None:
    file, array = ArrayFile(path, "<u2", 1000), np.arange(1000)
    assert len(file) == 1000
    for key in (slice(None), slice(3, 7), slice(990, 2000), slice(7, 3), slice(-5, None), slice(1000, 1000)):
        assert np.array_equal(file[key], array[key])
    assert (file[0], file[999], file[-1]) == (0, 999, 999)
    for key in (1000, -1001):
        with pytest.raises(IndexError):
            file[key]
    assert ArrayFile(path, "<u2", 10, offset=6)[:3].tolist() == [3, 4, 5]


def truncate(path: Path) -> None:
    os.truncate(path, 100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


CHANGES = {truncate: "now has 100 bytes instead of {}", empty: "now has 0 bytes instead of {}"}


def test_file_that_became_too_short_is_told_by_the_read(path: Path) -> None:
    for change, what in CHANGES.items():
        np.arange(1000, dtype="<u2").tofile(path)
        file = ArrayFile(path, "<u2", 1000)
        change(path)
        with pytest.raises(DataError) as error:
            file[500:600]
        told = what.format("2,000")
        assert str(error.value) == f"`{path}` must not change while it is read, but {told}. {SAFE}"


def test_file_that_is_deleted_or_replaced_is_read_as_it_was(path: Path) -> None:
    file = ArrayFile(path, "<u2", 1000)
    np.zeros(1000, dtype="<u2").tofile(path.with_name("new"))
    path.with_name("new").replace(path)
    assert file[:].tolist() == list(range(1000))
    path.unlink()
    assert file[:].tolist() == list(range(1000))
    file.check_unchanged()


def test_descriptors_do_not_pile_up(path: Path) -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(20):
        assert ArrayFile(path, "<u2", 1000)[5] == 5
    assert len(list(Path("/dev/fd").iterdir())) <= before  # a file of an earlier test may have been closed meanwhile


@pytest.fixture(scope="module")
def prepared(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    corpus = write_jsonl(folder / "corpus.jsonl", make_texts(90))
    config = DataConfig(text=(str(corpus),), tokenizer=str(tokenizer_file), num_shards=1)
    return prepare(config, folder / "tokens", seed=5, progress=False).path


@pytest.fixture
def tokens(prepared: Path, tmp_path: Path) -> TokenFolder:
    """A copy of the tokens, to change."""
    return TokenFolder.open(shutil.copytree(prepared, tmp_path / "tokens"))


@pytest.mark.parametrize("change", [truncate, empty, overwrite, append])
@pytest.mark.parametrize("name", ["train-0.tokens", "train-0.index", "validation.tokens", "validation.index"])
def test_shard_that_changes_while_samples_are_taken_is_told(
    tokens: TokenFolder, change: Callable[[Path], None], name: str
) -> None:
    training = Sampler(tokens.train, sequence_length=16, seed=1)
    validation = ValidationSampler(tokens.validation, sequence_length=16).batches(batch_size=1)
    training.batch(0, batch_size=2)
    next(validation)
    file = tokens.path / name
    size = file.stat().st_size
    change(file)
    with pytest.raises(DataError) as error:
        training.batch(1, batch_size=2) if name.startswith("train") else next(validation)
    now = file.stat().st_size
    told = "another program has written to it" if now == size else f"now has {now:,} bytes instead of {size:,}"
    assert str(error.value) == f"`{file}` must not change while it is read, but {told}. {SAFE}"
