"""A run that loses nodes and gets them back, under torchrun."""

import random
from pathlib import Path

import pytest

from benchmarks.recovery.elastic import MOST_APART, compare, disturb, group, undisturbed
from benchmarks.recovery.runs import newest_step, write_text


@pytest.mark.slow  # torchrun starts new processes at every restart
def test_a_run_whose_node_is_killed_and_comes_back_has_the_losses_of_an_undisturbed_run(tmp_path: Path) -> None:
    settings = (f"data.text={write_text(tmp_path, copies=5)}", "checkpoint.every=10")
    with group(tmp_path / "disturbed", *settings) as nodes:
        disturb(nodes, 1, random.Random(1), lambda _: None)
        nodes.stop()
        lost, back = nodes.restarts()
    assert (lost["after"], back["after"]) == ("tensor 2 x data 1", "tensor 2 x data 2, zero2")
    assert back["steps_lost"] == 0
    with group(tmp_path / "undisturbed", *settings) as nodes:
        undisturbed(nodes, newest_step(tmp_path / "disturbed"))
    steps, apart = compare(tmp_path / "disturbed", tmp_path / "undisturbed")
    assert steps > lost["step"]
    assert apart < MOST_APART
