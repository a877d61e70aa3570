"""The program of the page on own models, as it stands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crosscut import cutting
from crosscut.cutting import read_plan
from crosscut.cutting.plan import IMAGES
from tests.docs.test_code_blocks import python_blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own-models.md"


@pytest.mark.slow  # starts ranks
@pytest.mark.skipif(not hasattr(cutting, "plan_cuts"), reason="the search for plans is not part of this package yet")
def test_the_pages_program_finds_proves_cuts_and_trains(tmp_path: Path) -> None:
    (program,) = (block.code for block in python_blocks(PAGE.read_text(encoding="utf-8")))
    (tmp_path / "own.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "own.py"], cwd=tmp_path, env=environment, check=True, timeout=300)
    assert set(read_plan(tmp_path / "plan.toml").rules) >= {"1", "3"}
    weights = torch.load(tmp_path / "own.pt")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        "0.weight": (8,),
        "0.bias": (8,),
        "1.weight": (64, 8),
        "1.bias": (64,),
        "3.weight": (3, 64),
        "3.bias": (3,),
    }


def test_the_pages_plan_is_a_plan(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "plan.toml").write_text(text)
    assert read_plan(tmp_path / "plan.toml").values(4) == {"blocks.*.attention": {"num_heads": 2}}


def test_the_page_describes_every_style_and_name() -> None:
    page = PAGE.read_text(encoding="utf-8")
    styles = [style for style in cutting.Style if style not in IMAGES]  # another page describes images
    assert [style for style in styles if f"| `{style}` |" not in page] == []
    functions = [name for name in cutting.__all__ if name[0].islower()]
    assert [name for name in functions if f"{name}(" not in page and f"`{name}`" not in page] == []
