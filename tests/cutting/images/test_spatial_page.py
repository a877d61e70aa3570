"""The program of the page on shared images, and the example with the ResNet of transformers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from crosscut.cutting.plan import IMAGES
from tests.docs.test_code_blocks import python_blocks

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "spatial.md"
EXAMPLE = ROOT / "examples" / "own_images.py"


def _run(*arguments: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, timeout=500, capture_output=True, text=True
    ).stdout


@pytest.mark.slow  # starts ranks
def test_the_pages_program_forecasts_and_proves(tmp_path: Path) -> None:
    (program,) = (block.code for block in python_blocks(PAGE.read_text(encoding="utf-8")))
    (tmp_path / "images.py").write_text(program)
    told = _run("images.py", folder=tmp_path)
    assert "x send over height" in told
    assert told.strip().endswith("proven")


def test_the_page_describes_every_style_of_images() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [style for style in IMAGES if f"| `{style}` |" not in page] == []


@pytest.mark.slow  # starts ranks
def test_the_example_proves_resnet_and_trains_alike_on_one_and_on_two_ranks(tmp_path: Path) -> None:
    alone, shared = (_run(str(EXAMPLE), "--grid", "1", num, "--steps", "3", folder=tmp_path) for num in "12")
    assert "proven: True" in shared
    losses = [[float(loss) for loss in re.findall(r"loss ([0-9.]+)", told)] for told in (alone, shared)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)
    assert len(losses[0]) == 3
    assert losses[0][-1] < losses[0][0]
