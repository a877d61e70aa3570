"""What a layer does on an H100 does not grow: its code is generated here, without a GPU, and counted."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.benchmarks.conftest import run_program

COUNTED = Path(__file__).parents[3] / "benchmarks" / "gpu" / "counted.json"
"""Counts at the last change, which `benchmarks/gpu/count.py --json` wrote with PyTorch 2.13 and Triton 3.7."""

LAYERS = ("gpt", "llama", "gpt eighth split", "gpt float8")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton generates the code of a GPU")
def test_layers_do_no_more_than_what_was_counted(tmp_path):
    """No layer launches more kernels, moves more bytes, multiplies more often or keeps more than when counted last."""
    run_program("gpu/count.py", *LAYERS, "--json", tmp_path / "now.json")
    now, counted = (json.loads(path.read_text()) for path in (tmp_path / "now.json", COUNTED))
    before = {layer: counted[layer] for layer in LAYERS}
    grown = [
        f"{layer}, {way}: {what} {now[layer][way][what]:,}, before {most:,}"
        for layer, ways in before.items()
        for way, counts in ways.items()
        for what, most in counts.items()
        if now[layer][way][what] > most
    ]
    assert not grown
