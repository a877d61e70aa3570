"""Whatever happens to a checkpoint's files is found, and named."""

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.recovery.damages import cut_short, files_of, flip_bit, remove
from crosscut.checkpoint import find_damage, latest_good_checkpoint, load_model, read_manifest, require_undamaged
from crosscut.checkpoint.format.index import INDEX_FILE
from crosscut.checkpoint.format.manifest import MANIFEST_FILE, FileEntry, Manifest, _render, dump_manifest
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import CheckpointError
from tests.checkpoint.states import progress_at, save_steps, small_state
from tests.endless import ENDLESS
from tests.memory import at_most
from tests.refusals import refusal


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    """Two checkpoints of two ranks."""
    root = tmp_path_factory.mktemp("saved")
    ranks.run(2, save_steps, root, [1, 2])
    return root


@pytest.fixture
def checkpoint(saved, tmp_path) -> Path:
    """A copy of the newer of them, to damage."""
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy" / "step-00000002"


def to_a_file(damage: Callable[[Path, random.Random], None]) -> Callable[[Path, random.Random], list[str]]:
    """Function that damages any file of a folder, and returns its name."""

    def damaged(folder: Path, generator: random.Random) -> list[str]:
        path = generator.choice(files_of(folder))
        damage(path, generator)
        return [path.name]

    return damaged


def swap(folder: Path, generator: random.Random) -> list[str]:
    one, other = generator.sample(files_of(folder), 2)
    content = one.read_bytes(), other.read_bytes()
    one.write_bytes(content[1])
    other.write_bytes(content[0])
    return [MANIFEST_FILE] if MANIFEST_FILE in (one.name, other.name) else [one.name, other.name]


def edit_manifest(folder: Path, generator: random.Random) -> list[str]:
    """Change what it says, leaving it JSON of the same form."""
    path = folder / MANIFEST_FILE
    table = json.loads(path.read_text())
    edits = [
        lambda: table["progress"].update(step=generator.randrange(3, 10**6)),
        lambda: table["progress"].update(samples=0),
        lambda: table["files"].pop(generator.choice(list(table["files"]))),
        lambda: table["files"].update({"extra.safetensors": {"size": 1, "sha256": "0" * 64}}),
        lambda: table["tensors"].update(more={"shape": [1], "dtype": "float32", "placement": "whole"}),
        lambda: table["tensors"].pop(generator.choice(list(table["tensors"]))),
        lambda: generator.choice(list(table["files"].values())).update(sha256=f"{generator.randrange(16**64):064x}"),
        lambda: table.update(sha256="0" * 64),
    ]
    generator.choice(edits)()
    path.write_text(json.dumps(table, indent=1) + "\n")
    return [MANIFEST_FILE]


DAMAGES = [*map(to_a_file, (flip_bit, cut_short, remove)), swap, edit_manifest]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", range(50))
def test_fifty_random_damages_are_found_and_named(checkpoint, capsys, number):
    damage = DAMAGES[number % len(DAMAGES)]
    named = damage(checkpoint, random.Random(number))
    found = " ".join(find_damage(LocalFolder(checkpoint)))
    for name in named:
        assert f"`{checkpoint}/{name}`" in found or (name == MANIFEST_FILE and f"`{name}` is missing" in found), found
    good = latest_good_checkpoint(checkpoint.parent)
    assert good.folder.name == "step-00000001", "a run goes on from the newest good one"
    assert all(name in " ".join(good.skipped) for name in named)
    assert f"Continuing from `{good.folder}`" in capsys.readouterr().err


def test_undamaged_checkpoint_is_good(checkpoint):
    assert find_damage(LocalFolder(checkpoint)) == []
    assert require_undamaged(LocalFolder(checkpoint)).progress.step == 2


def damaged(checkpoint: Path, path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return refusal(CheckpointError, require_undamaged, LocalFolder(checkpoint))


def test_changed_content_is_told(checkpoint):
    path = checkpoint / "rank-0.safetensors"
    content = path.read_bytes()
    message = damaged(checkpoint, path, bytes([content[0] ^ 1]) + content[1:])
    assert message.startswith(f"`{path}` must have the SHA-256 ")
    assert message.endswith(": the content has changed.")


def test_truncated_file_is_told_with_its_sizes(checkpoint):
    path = checkpoint / "rank-1.safetensors"
    size = path.stat().st_size
    message = damaged(checkpoint, path, path.read_bytes()[:100])
    assert message == f"`{path}` must have {size:,} bytes, but has 100."


def test_swapped_files_of_one_size_are_told_apart(tmp_path):
    contents = {"rank-0.safetensors": b"first", "rank-1.safetensors": b"other"}
    manifest = Manifest(
        progress=progress_at(1),
        files={name: FileEntry(5, hashlib.sha256(content).hexdigest()) for name, content in contents.items()},
        tensors={},
    )
    (tmp_path / MANIFEST_FILE).write_bytes(dump_manifest(manifest))
    (tmp_path / "rank-0.safetensors").write_bytes(b"other")
    (tmp_path / "rank-1.safetensors").write_bytes(b"first")
    first, second = find_damage(LocalFolder(tmp_path))
    assert first.startswith(f"`{tmp_path}/rank-0.safetensors` must have the SHA-256 ")
    assert first.endswith("The file now has the content of `rank-1.safetensors`.")
    assert second.endswith("The file now has the content of `rank-0.safetensors`.")


def test_file_of_another_checkpoint_is_told(checkpoint):
    path = checkpoint / "rank-2.safetensors"
    assert damaged(checkpoint, path, b"tensors") == (
        f"`{path}` must be listed in `manifest.json`, but is not. Move this file to another folder."
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{}", "be a checkpoint's manifest, but cannot be parsed: `sha256` is missing. The file is damaged."),
        (
            _render({"format": 9}),
            "have checkpoint format 2, but has format 9. Use the version of Crosscut that wrote it.",
        ),
        (_render({"format": 2, "progress": {"step": 1}}), "be a checkpoint's manifest, but is not: "),
    ],
)
def test_manifest_of_no_json_of_a_later_format_or_of_another_shape_is_told(checkpoint, content, told):
    path = checkpoint / MANIFEST_FILE
    assert damaged(checkpoint, path, content).startswith(f"`{path}` must {told}")


def test_unreadable_file_is_told(checkpoint):
    path = checkpoint / MANIFEST_FILE
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match="must be readable, but is not: Is a directory"):
        read_manifest(LocalFolder(checkpoint))


ENDLESS_AND_FOLDER = {**ENDLESS, "a folder": Path.mkdir}
WITHOUT_SIZE = 1 << 40
"""Bytes of a sparse file that takes no room on the disk."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [MANIFEST_FILE, INDEX_FILE, "rank-0.safetensors"])
@pytest.mark.parametrize("kind", ENDLESS_AND_FOLDER)
def test_file_whose_reading_never_ends_is_told_at_once(checkpoint, name, kind):
    """By whatever reads it: the check of all files, and the reading of the model, which is not checked before."""
    (checkpoint / name).unlink()
    ENDLESS_AND_FOLDER[kind](checkpoint / name)
    (damage,) = find_damage(LocalFolder(checkpoint))
    assert f"`{checkpoint}/{name}` must " in damage
    assert str(checkpoint) in refusal(CheckpointError, load_model, LocalFolder(checkpoint), model=small_state()[0])
    if name == MANIFEST_FILE:
        assert ("Is a directory" if kind == "a folder" else f"It is {kind}, not a regular file") in damage
    assert latest_good_checkpoint(checkpoint.parent).folder.name == "step-00000001"


@pytest.mark.parametrize("name", [MANIFEST_FILE, INDEX_FILE])
def test_sparse_file_takes_no_memory(checkpoint, name):
    with (checkpoint / name).open("wb") as file:
        file.truncate(WITHOUT_SIZE)
    with at_most(1 << 24):
        (damage,) = find_damage(LocalFolder(checkpoint))
        assert f"`{checkpoint}/{name}` must " in damage
        with pytest.raises(CheckpointError, match=r"It is larger than|must be readable, but is not"):
            load_model(LocalFolder(checkpoint), model=small_state()[0])
    assert latest_good_checkpoint(checkpoint.parent).folder.name == "step-00000001"


def test_checkpoint_with_the_name_of_another_step_is_told(checkpoint):
    moved = checkpoint.with_name("step-00000003")
    checkpoint.rename(moved)
    (damage,) = find_damage(LocalFolder(moved))
    assert damage == (
        f"`{moved}/manifest.json` must belong to step 3, the step in the folder's name, but belongs to step 2. "
        "Move the files to the folder of step 2."
    )
    assert latest_good_checkpoint(checkpoint.parent).folder.name == "step-00000001"


def test_all_damaged_is_an_error_that_lists_them(checkpoint):
    root = checkpoint.parent
    (root / "step-00000001" / "rank-0.safetensors").unlink()
    (root / "step-00000002" / MANIFEST_FILE).unlink()
    lines = refusal(CheckpointError, latest_good_checkpoint, root).splitlines()
    assert lines[0] == f"`{root}` must hold an undamaged checkpoint, but every checkpoint is damaged:"
    assert "step-00000002` must be a checkpoint, but `manifest.json` is missing" in lines[1]
    assert lines[2].endswith("step-00000001/rank-0.safetensors` must exist, but is missing.")


def test_large_checkpoints_show_how_far_the_check_is(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("crosscut.config.system.byte_progress.LARGE", 1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    find_damage(LocalFolder(checkpoint), progress=True)
    assert "check step-00000002" in capsys.readouterr().err


def test_a_long_check_writes_lines_into_a_log(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr("crosscut.config.system.byte_progress.SECONDS_BETWEEN_LINES", -1.0)
    assert not find_damage(LocalFolder(checkpoint), progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"check step-00000002  0\.0 of 0\.0 GB  [\d,]+ MB/s  0:00:00 left", lines[-1])
    assert not find_damage(LocalFolder(checkpoint))
    assert capsys.readouterr().err == ""
