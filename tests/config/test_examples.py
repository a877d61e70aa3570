"""The runs that the project ships are runs."""

from pathlib import Path

import pytest

from crosscut.config import load_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "path", [*ROOT.glob("examples/*.toml"), ROOT / "crosscut" / "config" / "demo.toml"], ids=lambda path: path.name
)
def test_shipped_run_loads(path):
    assert load_run(path).layout.world_size >= 1
