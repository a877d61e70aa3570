"""Tokens that a disk cannot take: one message, nothing half-written, and the same command again makes them."""

import re
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from crosscut.config import DataConfig, DataError
from crosscut.data import prepare
from tests.disks import remount, small_disk


@pytest.fixture
def config(corpus: Path, tokenizer_file: Path) -> DataConfig:
    return DataConfig(text=(str(corpus),), tokenizer=str(tokenizer_file), num_shards=3)


def message(run: Callable[[], object]) -> str:
    with pytest.raises(DataError) as error:
        run()
    return str(error.value)


@pytest.mark.parametrize(("trained", "kilobytes"), [(False, 4), (False, 24), (False, 40), (True, 4)])
def test_full_disk_is_told_and_leaves_nothing_of_the_tokens(
    config: DataConfig, tmp_path: Path, trained: bool, kilobytes: int
) -> None:
    config = replace(config, tokenizer="", vocab_size=300) if trained else config
    with small_disk(tmp_path / "disk", kilobytes) as disk:
        told = message(lambda: prepare(config, disk / "tokens", seed=5, progress=False))
        assert re.fullmatch(
            rf"`{disk}/tokens` must be writable, but writing failed: No space left on device \(0\.\d MB are free\)\. "
            r"Nothing is left of the unfinished tokens\. Free some space or choose another `data.tokens`, then start "
            r"the same command again\.",
            told,
        )
        assert list(disk.iterdir()) == []
        remount(disk, "size=1m")
        prepare(config, disk / "tokens", seed=5, progress=False)


@pytest.mark.parametrize("limit", [0, 1000])
def test_file_that_may_not_grow_is_told(config: DataConfig, tmp_path: Path, limit: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        told = message(lambda: prepare(config, tmp_path / "tokens", seed=5, progress=False))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert told.startswith(f"`{tmp_path}/tokens` must be writable, but writing failed: File too large. Nothing is left")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_read_only_folder_is_told_before_any_text_is_read(config: DataConfig, corpus: Path, tmp_path: Path) -> None:
    corpus.write_text("not JSON")  # whoever reads this would say so
    with small_disk(tmp_path / "disk", 1000) as disk:
        remount(disk, "ro")
        assert message(lambda: prepare(config, disk / "tokens", seed=5, progress=False)) == (
            f"`{disk}/tokens` must be a path where a folder can be created, but is not: Read-only file system. Choose "
            "another `data.tokens`."
        )
