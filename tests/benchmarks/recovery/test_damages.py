"""Random damages of real checkpoints are all found, and a damage that is not found is reported."""

import random
import shutil
from pathlib import Path

import pytest
from rich.progress import Progress

from benchmarks.recovery import damages
from benchmarks.recovery.damages import DAMAGES, damage_at_random, files_of, find_all
from tests.checkpoint.states import save_steps


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    """Three checkpoints of two ranks."""
    root = tmp_path_factory.mktemp("saved")
    ranks.run(2, save_steps, root, [1, 2, 3])
    return root


def test_sixty_damaged_checkpoints_are_all_found(saved):
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with Progress(disable=True) as bar:
        found = find_all([saved], 60, random.Random(0), bar)
    assert found.number == 60
    assert found.lost == []
    assert {*DAMAGES} <= {*found.kinds}, "each kind occurs"
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before, "only copies are damaged"


def test_damage_that_is_not_found_is_reported(saved, monkeypatch):
    monkeypatch.setattr(damages, "find_damage", lambda _: [])
    with Progress(disable=True) as bar:
        found = find_all([saved], 3, random.Random(0), bar)
    assert len(found.lost) >= 3
    assert found.lost[0].startswith("not found or not named: step-00000003, ")


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_kind_changes_the_file(saved, tmp_path, kind):
    root = tmp_path / "copy"
    shutil.copytree(saved, root)
    path = files_of(root / "step-00000003")[1]
    before = path.read_bytes()
    DAMAGES[kind](path, random.Random(0))
    assert not path.is_file() or path.read_bytes() != before


def test_damage_depends_on_the_seed_only(saved, tmp_path):
    told = []
    for name in ("one", "two"):
        shutil.copytree(saved, tmp_path / name)
        told.append([*map(str, damage_at_random(tmp_path / name / "step-00000003", random.Random(5)))])
    assert told[0] == told[1]
