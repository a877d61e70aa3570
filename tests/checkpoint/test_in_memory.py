"""Checkpoints in the memory of several machines: which files a machine gets, and which checkpoint is complete."""

import hashlib
from pathlib import Path

import pytest
import torch.distributed as dist

from crosscut.checkpoint.format.manifest import FileEntry, Manifest, Progress, current_versions, dump_manifest
from crosscut.checkpoint.in_memory import (
    FOLDER_VARIABLE,
    Held,
    Hosts,
    forget_all,
    look_into,
    make_memory_folder,
    memory_folder,
    newest_complete,
    restore,
)
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config.system.markers import MARKER_FILE
from crosscut.parallel.state.files import Transfer

KEY = "00112233445566ff"
FILES = {"rank-0.safetensors": b"zero", "rank-1.safetensors": b"one", "rank-2.safetensors": b""}


def write(root: Path, step: int, names: list[str], *, wrote: str = "data 3") -> None:
    """Write a machine's folder of a checkpoint, with some of its files."""

    entries = {name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items()}
    progress = Progress(step=step, samples=step, layout=wrote)
    manifest = Manifest(progress=progress, files=entries, tensors={}, values=(), versions=current_versions())
    folder = root / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_bytes(dump_manifest(manifest))
    for name in names:
        (folder / name).write_bytes(FILES[name])


ZERO, ONE, TWO = FILES


def found_in(*roots: Path) -> tuple[int, dict[str, int]] | None:
    found = newest_complete([look_into(root) for root in roots])
    return None if found is None else (found.step, dict(found.holders))


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Folders of three machines. Each has the file of its own rank and the file of the previous machine, of step 4."""
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for root, names in zip(folders, ([ZERO, TWO], [ONE, ZERO], [TWO, ONE]), strict=True):
        write(root, 4, names)
    return folders


def test_any_two_of_three_machines_hold_all_files(roots: list[Path]) -> None:
    assert found_in(*roots) == (4, {ZERO: 0, ONE: 1, TWO: 0, "manifest.json": 0})
    for lost in range(3):
        left = [root for number, root in enumerate(roots) if number != lost]
        assert found_in(*left) is not None
    assert found_in(roots[0]) is None


def test_a_damaged_file_counts_as_missing(roots: list[Path]) -> None:
    (roots[0] / "step-00000004" / ZERO).write_bytes(b"zerO")
    assert found_in(*roots) == (4, {ZERO: 1, ONE: 1, TWO: 0, "manifest.json": 0})
    (roots[1] / "step-00000004" / ZERO).write_bytes(b"zer")
    assert found_in(*roots) is None


def test_an_incomplete_newer_checkpoint_is_passed_over(roots: list[Path]) -> None:
    write(roots[0], 6, [ZERO, TWO])
    assert found_in(*roots) == (4, {ZERO: 0, ONE: 1, TWO: 0, "manifest.json": 0})
    write(roots[1], 6, [ONE])
    assert found_in(*roots) == (6, {ZERO: 0, ONE: 1, TWO: 0, "manifest.json": 0})


def test_files_of_two_starts_are_not_mixed(roots: list[Path]) -> None:
    write(roots[0], 6, [ZERO, TWO], wrote="data 3")
    write(roots[1], 6, [ONE, ZERO], wrote="tensor 3")
    assert found_in(*roots) == (4, {ZERO: 0, ONE: 1, TWO: 0, "manifest.json": 0})


def test_a_folder_with_the_name_of_another_step_is_none(roots: list[Path]) -> None:
    for root in roots:
        (root / "step-00000004").rename(root / "step-00000009")
    assert found_in(*roots) is None


def test_no_machine_holds_anything() -> None:
    assert newest_complete([{}, {}]) is None
    assert newest_complete([{4: Held("m", {"a": 1}, frozenset())}]) is None


@pytest.mark.parametrize(
    ("hosts", "pairs"),
    [
        ((0, 0), []),
        ((0, 1), [(0, 1), (1, 0)]),
        ((0, 0, 1, 1), [(0, 2), (1, 3), (2, 0), (3, 1)]),
        ((0, 1, 2), [(0, 1), (2, 0), (1, 2)]),
        ((0, 0, 0, 1), [(0, 3), (1, 3), (2, 3), (3, 0)]),
    ],
)
def test_each_rank_sends_its_file_to_the_next_machine(hosts: tuple[int, ...], pairs: list[tuple[int, int]]) -> None:
    names = [f"rank-{rank}" for rank in range(len(hosts))]
    expected = [Transfer(names[source], 5, source, target) for source, target in pairs]
    assert Hosts(hosts).copies([5] * len(hosts), names) == expected


def test_a_file_that_was_not_written_is_not_sent() -> None:
    assert Hosts((0, 1)).copies([-1, 5], ["a", "b"]) == [Transfer("b", 5, 1, 0)]


def restored(roots: list[Path], newer_than: int) -> str | None:
    """On one of several ranks, each on a machine of its own: the folder that is restored."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(roots[dist.get_rank()]))
        root = memory_folder(Path("run"), KEY)
        assert root.is_relative_to(roots[dist.get_rank()])
        found = restore(root, newer_than=newer_than)
        return None if found is None else str(found)


@pytest.fixture
def machines(ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Folders in memory of two machines, and the folders of the run in them. The run has step 4 and an older step."""
    tops = [tmp_path / "first", tmp_path / "second"]
    folders = []
    for top, names in zip(tops, ([ZERO, ONE, TWO], []), strict=True):
        monkeypatch.setenv(FOLDER_VARIABLE, str(top))
        folders.append(memory_folder(Path("run"), KEY))
        make_memory_folder(folders[-1])
        make_memory_folder(folders[-1].with_name("0123456789abcdef"))  # of an earlier run
        for name in ("step-00000004", "step-00000002", ".step-00000006.partial", "../0123456789abcdef/step-00000009"):
            (LocalFolder(folders[-1]) / name).make()
        if names:
            write(folders[-1], 4, names)
            write(folders[-1], 2, names)
    return tops, folders


def test_a_machine_without_files_gets_all_of_them_and_old_ones_are_removed(ranks, machines) -> None:
    tops, folders = machines
    assert ranks.run(2, restored, tops, 3) == [str(folder / "step-00000004") for folder in folders]
    for folder in folders:
        assert {path.name: path.read_bytes() for path in (folder / "step-00000004").iterdir()}.items() >= FILES.items()
        assert {path.name for path in folder.iterdir()} == {MARKER_FILE, "step-00000004"}
        assert {path.name for path in folder.parent.iterdir()} == {MARKER_FILE, KEY}


@pytest.mark.parametrize("name", ["step-00000002", "."])
def test_link_in_memory_is_not_followed(roots: list[Path], tmp_path: Path, monkeypatch, name: str) -> None:
    """A key, or a step, that is a link to checkpoints of another run."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "memory"))
    root, other = memory_folder(Path("run"), KEY), tmp_path / "runs" / "checkpoints"
    make_memory_folder(root)
    (LocalFolder(other) / "step-00000002").make()
    (other / "step-00000002" / ZERO).write_bytes(b"mine")
    link = root / name if name != "." else root.with_name("0123456789abcdef")
    link.symlink_to(other / name)
    forget_all(root.parent)
    assert (other / "step-00000002" / ZERO).read_bytes() == b"mine"


def test_a_stale_checkpoint_is_removed(ranks, machines) -> None:
    tops, folders = machines
    assert ranks.run(2, restored, tops, 4) == [None, None]
    assert not any(folder.exists() for folder in folders)


def test_a_machine_that_has_no_room_makes_all_ranks_read_the_disk(ranks, machines) -> None:
    tops, _ = machines
    assert ranks.run(2, without_room, tops) == [None, None]


def without_room(roots: list[Path]) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosscut.checkpoint.in_memory.free_bytes", lambda _: 3)
        return restored(roots, 3)
