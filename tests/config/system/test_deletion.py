"""Only what carries the marker of its run or corpus is removed. Links below the root are never followed."""

import os
import pickle
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from crosscut.config import ConfigError
from crosscut.config.system import deletion
from crosscut.config.system.deletion import (
    claim,
    make_folder,
    remove_file,
    remove_folder,
    remove_if_empty,
    rename_folder,
    why_kept,
)
from crosscut.config.system.files import copy_file, open_own, write_whole
from crosscut.config.system.markers import MARKER_FILE, ForeignFolderError, Marker, marker_of
from crosscut.config.system.object_deletion import Prefix
from crosscut.config.system.private_folders import why_not_private


def is_text(name: str) -> bool:
    return name.endswith(".txt")


def content(root: Path) -> dict[str, str]:
    """Everything below a folder, with the targets of links."""
    return {
        str(path.relative_to(root)): f"link to {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder that Crosscut made, with a file and a folder."""
    folder = make_folder(tmp_path / "run", "step")
    (folder / "a.txt").write_text("a")
    return folder


def test_folder_with_its_marker_is_removed(made: Path) -> None:
    (made / "more").mkdir()
    (made / "more" / "b").write_text("b")
    assert remove_folder(made.parent, "step") == ""
    assert not made.exists()
    assert remove_folder(made.parent, "step") == "", "what is gone is gone"


def other_id(folder: Path) -> None:
    (folder / MARKER_FILE).write_bytes(Marker("0" * 16, "step").content())


def other_name(folder: Path) -> None:
    (folder / MARKER_FILE).write_bytes(Marker(claim(folder.parent), "other").content())


def linked_marker(folder: Path) -> None:
    """A link to a good marker elsewhere proves nothing about this folder."""
    (folder / MARKER_FILE).rename(folder.parent / "good")
    (folder / MARKER_FILE).symlink_to(folder.parent / "good")


SPOIL: dict[str, Callable[[Path], object]] = {
    "no marker": lambda folder: (folder / MARKER_FILE).unlink(),
    "another id": other_id,
    "another name": other_name,
    "a link": linked_marker,
    "no JSON": lambda folder: (folder / MARKER_FILE).write_text("{"),
    "numbers": lambda folder: (folder / MARKER_FILE).write_text('{"id": 1, "folder": "step"}'),
    "nested": lambda folder: (folder / MARKER_FILE).write_text("[" * 4000),
    "a foreign file": lambda folder: (folder / "mine.doc").write_text("mine"),
    "a foreign folder": lambda folder: (folder / "mine.txt").mkdir(),
    "a link to a file": lambda folder: (folder / "mine.txt").symlink_to("a.txt"),
    "no id above": lambda folder: (folder.parent / MARKER_FILE).unlink(),
}


@pytest.mark.parametrize("spoil", SPOIL)
@pytest.mark.parametrize("hidden", ["", ".step.dropped"])
def test_folder_without_proof_stays_whole_and_is_named(made: Path, spoil: str, hidden: str) -> None:
    SPOIL[spoil](made)
    before = content(made.parent)
    left = remove_folder(made.parent, "step", only=is_text, hidden=hidden)
    assert left.startswith(f"`{made}` stays, because Crosscut removes only what it wrote, but it")
    assert left.endswith(f" If nobody needs it, remove it with `rm -r {made}`.")
    assert why_kept(made.parent, "step", only=is_text) == left
    assert content(made.parent) == before


def test_copy_under_another_name_is_not_the_folder(made: Path) -> None:
    copy = made.parent / "copy"
    copy.mkdir()
    for path in made.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert "is that of another folder" in remove_folder(made.parent, "copy")
    assert (copy / "a.txt").exists()


def test_run_that_was_moved_still_owns_its_folders(made: Path) -> None:
    moved = made.parent.rename(made.parent.with_name("moved"))
    assert remove_folder(moved, "step") == ""
    assert list(moved.iterdir()) == [moved / MARKER_FILE]


def test_link_in_place_of_a_folder_is_not_followed(made: Path) -> None:
    outside = made.rename(made.parent.parent / "outside")
    made.symlink_to(outside)
    for act in (remove_folder, why_kept):
        assert "but it is a link" in act(made.parent, "step")
    with pytest.raises(ForeignFolderError, match="it is a link"):
        make_folder(made.parent, "step")
    assert (outside / "a.txt").read_text() == "a"


def test_links_inside_a_folder_are_removed_and_their_targets_stay(made: Path) -> None:
    outside = made.parent.parent / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    (made / "folder").symlink_to(outside)
    (made / "file").symlink_to(outside / "mine")
    os.link(outside / "mine", made / "hard")
    assert remove_folder(made.parent, "step") == ""
    assert content(outside) == {"mine": "mine"}


def test_links_up_to_the_root_are_followed(made: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(made.parent)
    assert remove_folder(tmp_path / "link", "step") == ""
    assert not made.exists()


def test_folder_that_is_exchanged_during_the_removal_is_not_emptied(made: Path, monkeypatch) -> None:
    """Somebody puts a link or another folder in the place of the one that was checked."""
    outside = made.parent.parent / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    check = deletion._why_foreign

    def exchange(*arguments: object) -> str:
        why = check(*arguments)  # type: ignore[arg-type]
        made.rename(made.with_name("aside"))
        made.symlink_to(outside)
        return why

    monkeypatch.setattr(deletion, "_why_foreign", exchange)
    with pytest.raises(OSError, match="Not a directory"):
        remove_folder(made.parent, "step")
    assert content(outside) == {"mine": "mine"}


@pytest.mark.parametrize("leave", ["nothing", "half a marker"])
def test_kill_between_a_folder_and_its_marker_blocks_nothing(tmp_path: Path, leave: str) -> None:
    (tmp_path / "draft").mkdir()
    if leave == "half a marker":
        (tmp_path / "draft" / f"{MARKER_FILE}.0123abcd").write_text('{"id"')
    assert make_folder(tmp_path, "draft") == tmp_path / "draft"
    assert marker_of(tmp_path / "draft") == Marker(claim(tmp_path), "draft")
    assert remove_folder(tmp_path, "draft") == ""
    (tmp_path / "draft").mkdir()
    assert remove_folder(tmp_path, "draft") == "", "an empty folder holds nothing of anybody"


def test_copy_of_all_but_the_marker_of_the_root_can_be_used(tmp_path: Path) -> None:
    made = make_folder(tmp_path / "run", "work")
    for name in ("copy", "other", "named"):
        (tmp_path / name).mkdir()
    shutil.copytree(made, tmp_path / "copy" / "work")  # as `cp -r run/* copy`
    assert make_folder(tmp_path / "copy", "work").is_dir()
    assert claim(tmp_path / "copy") == claim(tmp_path / "run")
    shutil.copytree(made, tmp_path / "other" / "mine")
    assert claim(tmp_path / "other", "mine") != claim(tmp_path / "run"), "the marker has another name"
    (tmp_path / "named" / "work").symlink_to(made)
    assert claim(tmp_path / "named", "work") != claim(tmp_path / "run"), "a link is not followed"


def test_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        make_folder(tmp_path, "work")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    place = f"`{tmp_path}/work`"
    assert str(caught.value) == (
        f"Crosscut must be able to use {place}, but did not make it. {place} stays, because Crosscut removes only what "
        "it wrote, but it has no marker `.crosscut` and holds `thesis.txt`. If nobody needs it, remove it with "
        f"`rm -r {tmp_path}/work`."
    )
    assert content(tmp_path / "work") == {"thesis.txt": "mine"}


def test_processes_that_claim_a_root_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda number: (claim(tmp_path), make_folder(tmp_path, f"{number % 3}")), range(60)))
    assert len({owner for owner, _ in made}) == 1
    assert {path.name for path in tmp_path.rglob("*")} == {MARKER_FILE, "0", "1", "2"}
    assert {marker_of(path) for _, path in made} == {Marker(made[0][0], f"{number}") for number in range(3)}


def test_folder_that_another_process_makes_at_the_same_time_is_used(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "watch").mkdir()
    first_foreign = deletion._first_foreign

    def late(folder: int, only: Callable[[str], bool]) -> str:
        monkeypatch.setattr(deletion, "_first_foreign", first_foreign)
        (make_folder(tmp_path, "watch") / "rank-00000").touch()
        return first_foreign(folder, only)

    monkeypatch.setattr(deletion, "_first_foreign", late)
    assert make_folder(tmp_path, "watch") == tmp_path / "watch"


def test_root_is_never_removed(tmp_path: Path) -> None:
    claim(tmp_path)
    make_folder(tmp_path, "inner")
    claim(tmp_path / "inner")
    assert remove_folder(tmp_path.parent, tmp_path.name) != ""


def test_file_is_removed_only_beside_a_marker(made: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (made / "link").symlink_to(tmp_path / "mine.txt")
    assert not remove_file(tmp_path / "mine.txt")
    assert not remove_file(made / "link")
    assert not remove_file(made.parent / "step"), "a folder is no file"
    assert remove_file(made / "a.txt") and remove_file(made / "a.txt") and remove_file(tmp_path / "no" / "b")
    assert content(tmp_path).keys() >= {"mine.txt", "run/step/link"}


def test_folder_that_others_still_use_is_not_removed_as_empty(made: Path) -> None:
    remove_if_empty(made.parent, "step")
    assert (made / "a.txt").exists()
    (made / "a.txt").unlink()
    remove_if_empty(made.parent, "step")
    assert not made.exists()


def test_renaming_replaces_no_folder(made: Path) -> None:
    other = made.with_name("other")
    other.mkdir()
    (other / "mine").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        rename_folder(made, other)
    (made.parent / "link").symlink_to(other)
    with pytest.raises(NotADirectoryError):
        rename_folder(made.parent / "link", made.with_name("third"))
    assert (other / "mine").read_text() == "mine"


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "dangling link", "FIFO", "folder", "device"])
@pytest.mark.parametrize("mode", ["w", "wb", "a", "ab"])
def test_nothing_is_written_through_a_link(tmp_path: Path, kind: str, mode: str) -> None:
    outside, path = tmp_path / "outside", tmp_path / "own"
    outside.write_text("mine")
    make: dict[str, Callable[[], object]] = {
        "symbolic link": lambda: path.symlink_to(outside),
        "hard link": lambda: os.link(outside, path),
        "dangling link": lambda: path.symlink_to("nowhere"),
        "FIFO": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/null"),
    }
    make[kind]()
    with pytest.raises(OSError, match=r"It is a link|No such device|Is a directory|not a regular file"):
        open_own(path, mode)
    assert outside.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_own_files_are_written_and_extended(tmp_path: Path) -> None:
    with open_own(tmp_path / "a", "w") as file:
        file.write("long text")
    with open_own(tmp_path / "a", "w") as file:
        file.write("né")
    with open_own(tmp_path / "a", "ab") as file:
        file.write(b"w")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "néw"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~_umask()
    copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_whole_file_is_not_written_through_a_link_that_is_planted_for_it(tmp_path: Path) -> None:
    """The name of the temporary file was once predictable."""
    (tmp_path / "outside").write_text("mine")
    (tmp_path / f".a.{os.getpid()}").symlink_to(tmp_path / "outside")
    write_whole(tmp_path / "a", "new")
    assert (tmp_path / "outside").read_text() == "mine"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder such as /dev/shm, in which all users may create folders."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm").chmod(0o1777)
    return tmp_path / "shm"


def test_folder_in_memory_is_private(shared: Path) -> None:
    assert why_not_private(shared, "own", "a", "b") == ""
    assert stat.S_IMODE((shared / "own").stat().st_mode) == 0o700
    (shared / "own" / "a" / "b").mkdir(parents=True)
    assert why_not_private(shared, "own", "a", "b") == ""
    (shared / "own" / "a").chmod(0o775)  # the usual mode with a umask of 002
    assert why_not_private(shared, "own", "a", "b") == "", "others cannot enter `own`"
    (shared / "own").chmod(0o750)
    assert "other users may write" in why_not_private(shared, "own", "a", "b")
    shared.chmod(0o777)
    assert "other users may rename the folders" in why_not_private(shared, "own", "a", "b")


@pytest.mark.parametrize("level", ["own", "own/a", "own/a/b"])
@pytest.mark.parametrize("how", ["link", "file", "writable", "owner"])
def test_folder_in_memory_that_is_not_safe_is_told(shared: Path, level: str, how: str) -> None:
    path = shared / level
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "link":
        (shared / "outside").mkdir()
        path.symlink_to(shared / "outside")
    elif how == "file":
        path.touch()
    else:
        path.mkdir()
    if how == "writable":
        path.chmod(0o777)
    if how == "owner":
        if os.geteuid():
            pytest.skip("only root can give a folder to another user")
        os.chown(path, 12345, -1)
    told = {
        "link": "is a link",
        "file": "is not a folder",
        "writable": "other users may write",
        "owner": "another user",
    }
    assert told[how] in why_not_private(shared, "own", "a", "b")


def stored(path: str) -> tuple[Prefix, fsspec.AbstractFileSystem]:
    store = fsspec.filesystem("memory")
    return Prefix(store, path), store


def test_objects_are_removed_with_their_marker_alone() -> None:
    above, store = stored("/deletion/run")
    store.pipe_file("/deletion/run/step/a.txt", b"mine")
    remove = {"last": "a.txt", "only": is_text, "shown": "s3://b/run/step"}
    assert above.remove("step", **remove) == (
        "`s3://b/run/step` stays, because Crosscut removes only what it wrote, but it has no marker `.crosscut`. If "
        "nobody needs it, remove it with `aws s3 rm --recursive s3://b/run/step`."
    )
    above.make("step")
    store.pipe_file("/deletion/run/step/more/b.doc", b"mine")
    assert "it holds `more/b.doc`" in above.remove("step", **remove)
    assert store.cat_file("/deletion/run/step/a.txt") == b"mine"
    store.rm_file("/deletion/run/step/more/b.doc")
    store.pipe_file("/deletion/run/step2/a.txt", store.cat_file("/deletion/run/step/.crosscut"))
    store.pipe_file("/deletion/run/step2/.crosscut", store.cat_file("/deletion/run/step/.crosscut"))
    assert "that of another folder" in above.remove("step2", **remove)
    assert above.remove("step", **remove) == above.remove("gone", **remove) == ""
    assert not store.exists("/deletion/run/step/a.txt")
    assert store.exists("/deletion/run/step2/a.txt")
    with pytest.raises(FileExistsError):
        above.rename("gone", "step2")
