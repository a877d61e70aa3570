"""A folder takes another's place whole, and what a killed process left is removed."""

import os
import socket
from pathlib import Path

import pytest

from crosscut.config import DataError
from crosscut.config.system.deletion import make_folder
from crosscut.config.system.markers import DRAFT, MARKER_FILE
from crosscut.data.folders import beside, complete, exchange, is_taken


def test_new_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "tokens"
    for number in (1, 2):
        with beside(target, setting="folder", root=tmp_path) as temporary:
            (temporary / f"{number}.txt").write_text("new")
            assert temporary.parent == tmp_path
            exchange(temporary, target, lambda name: name.endswith(".txt"))
        assert {path.name for path in target.iterdir()} == {f"{number}.txt", MARKER_FILE}
    assert {path.name for path in tmp_path.iterdir()} == {"tokens", MARKER_FILE}


def test_folder_that_is_complete_belongs_to_the_user(tmp_path: Path) -> None:
    with beside(tmp_path / "tokens", setting="folder") as temporary:
        (temporary / "a.txt").write_text("new")
        complete(temporary, tmp_path / "tokens")
    assert [path.name for path in tmp_path.rglob("*")] == ["tokens", "a.txt"], "no marker is left"


def left_by_a_killed_process(tmp_path: Path, *, has_marker: bool) -> Path:
    name = f".tokens.unfinished.{socket.gethostname()}.{os.getpid()}.old"
    left = make_folder(tmp_path, name, of="tokens", id=DRAFT) if has_marker else tmp_path / name
    left.mkdir(exist_ok=True)
    (left / "a.txt").write_text("old")
    return left


def test_old_folder_of_a_process_that_was_killed_between_is_removed(tmp_path: Path) -> None:
    left = left_by_a_killed_process(tmp_path, has_marker=True)
    with beside(tmp_path / "tokens", setting="folder"):
        assert not left.exists()


def test_folder_of_this_name_that_crosscut_did_not_make_stays_and_is_named(tmp_path: Path, capsys) -> None:
    left = left_by_a_killed_process(tmp_path, has_marker=False)
    with beside(tmp_path / "tokens", setting="folder"):
        pass
    assert (left / "a.txt").read_text() == "old"
    assert f"remove it with `rm -r {left}`" in capsys.readouterr().err


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
