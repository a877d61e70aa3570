"""A folder takes another's place whole, and what a killed process left is removed."""

import os
import socket
from pathlib import Path

import pytest

from crosscut.config import DataError
from crosscut.data.folders import beside, exchange, is_taken


def test_new_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "tokens"
    for number in (1, 2):
        with beside(target, setting="folder") as temporary:
            (temporary / f"{number}.txt").write_text("new")
            assert temporary.parent == tmp_path
            exchange(temporary, target)
        assert [path.name for path in target.iterdir()] == [f"{number}.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_old_folder_of_a_process_that_was_killed_between_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f".tokens.unfinished.{socket.gethostname()}.{os.getpid()}.old"
    left.mkdir()
    with beside(tmp_path / "tokens", setting="folder"):
        assert not left.exists()


def test_failure_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "tokens"
    target.mkdir()
    (target / "old.txt").write_text("old")
    with pytest.raises(ValueError, match="no"), beside(target, setting="folder") as temporary:
        (temporary / "new.txt").write_text("new")
        raise ValueError("no")
    assert [path.name for path in tmp_path.rglob("*")] == ["tokens", "old.txt"]


def test_place_is_taken_by_anything_but_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert [is_taken(tmp_path / name) for name in ("nothing", "empty", "file", ".")] == [False, False, True, True]


def test_setting_is_named_where_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"must be a path where a folder can be created.*Choose another `folder`"):
        beside(tmp_path / "file" / "tokens", setting="folder").__enter__()
