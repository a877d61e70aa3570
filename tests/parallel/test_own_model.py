"""A model of somebody's own: the page's code as it stands, and the example on two ranks."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from crosscut import parallel
from crosscut.config import Layout
from crosscut.parallel import spatial

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_model.py"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def threads_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("threads_restored")
def test_the_page_s_code_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "docs.parallel"}
    for block in BLOCK.findall((ROOT / "docs" / "parallel.md").read_text()):
        exec(compile(block, "docs/parallel.md", "exec"), names)
    learned, *report, messages = capsys.readouterr().out.splitlines()
    right = re.fullmatch(r"tensor 1 x data 1: (\d+)% right", learned)
    assert int(right[1]) > 90
    assert "tensor 1 x data 1 equals the uncut model" in "\n".join(report)
    assert messages == "[]"


def _run_example() -> list[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLE), "--steps", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return [line.split(": ", 1)[1] for line in ended.stdout.splitlines()]


@pytest.mark.usefixtures("threads_restored")
@pytest.mark.slow
def test_the_example_trains_alike_on_one_and_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["train"](Layout(), 8)
    one = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert len(one) == 4
    assert one == _run_example()


def test_every_public_name_is_on_the_page() -> None:
    page = (ROOT / "docs" / "parallel.md").read_text()
    assert [name for name in (*parallel.__all__, *spatial.__all__) if f"`{name}`" not in page] == []
