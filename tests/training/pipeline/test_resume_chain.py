"""A run whose ranks are killed goes on at another layout, and again at another: its losses are those of one run."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from crosscut.checkpoint import latest_good_checkpoint
from crosscut.config import RunConfig
from crosscut.training.loop import Loop
from tests.ranks import RankError, RankPool
from tests.training.jobs import parts
from tests.training.pipeline.jobs import EXACT, LLAMA
from tests.training.pipeline.test_equality import layout_of

STEPS, EVERY = 12, 3


def train(run: RunConfig, losses: Path, resume: bool, killed_at: int | None = None) -> None:
    """Train, and write the loss of each step to a file. One rank is killed at step `killed_at`, once the checkpoint
    before that step is there; it has no chance to end anything.
    """
    trainer, batches = parts(run)
    Path(run.output.folder).mkdir(parents=True, exist_ok=True)
    step = trainer.step

    def noted(number: int, micro_batches: list[Any]) -> Any:
        mesh = trainer.mesh
        if number == killed_at and all(axis.rank == axis.size - 1 for axis in mesh.axes):
            wait_for(Path(run.checkpoints_folder) / f"step-{killed_at // EVERY * EVERY:08}" / "manifest.json")
            os.kill(os.getpid(), signal.SIGKILL)
        result = step(number, micro_batches)
        loss = result.loss
        if mesh.is_first_rank:
            with losses.open("a") as file:
                file.write(json.dumps([number, loss]) + "\n")
        return result

    trainer.step = noted
    Loop(trainer, batches).train(latest_good_checkpoint(run.checkpoints_folder).folder if resume else None)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.is_file():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.01)


def losses_in(file: Path) -> dict[int, float]:
    return dict(json.loads(line) for line in file.read_text().splitlines())


CHAIN = [("pipeline=2 tensor=2", 5), ("context=2 data=2", 8), ("tensor=1", None)]
"""Layouts, and the step at which each is killed."""


@pytest.mark.slow  # four ranks are started three times
def test_a_killed_run_goes_on_at_other_layouts_with_the_same_losses(run_with, tmp_path: Path) -> None:
    """Pipeline 2 x tensor 2, then context 2 x data 2, then one rank."""
    settings = (*EXACT, *LLAMA, "model.dropout=0.0", f"training.steps={STEPS}", f"checkpoint.every={EVERY}")
    pool = RankPool()
    try:
        whole = tmp_path / "whole.jsonl"
        pool.run(1, train, run_with(*settings, f"output.folder={tmp_path / 'whole'}"), whole, False)
        expected = losses_in(whole)
        assert sorted(expected) == list(range(STEPS))
        found: dict[int, float] = {}
        for part, (layout, killed_at) in enumerate(CHAIN):
            run = run_with(*settings, *layout_of(layout), f"output.folder={tmp_path / 'chain'}")
            losses = tmp_path / f"{part}.jsonl"
            if killed_at is None:
                pool.run(run.layout.world_size, train, run, losses, part > 0)
            else:
                with pytest.raises(RankError):
                    pool.run(run.layout.world_size, train, run, losses, part > 0, killed_at)
            found |= losses_in(losses)
            own = sorted(losses_in(losses))
            assert own[0] == (0 if part == 0 else CHAIN[part - 1][1] // EVERY * EVERY)
            assert own[-1] == (STEPS if killed_at is None else killed_at) - 1
    finally:
        pool.close()
    assert found.keys() == expected.keys()
    for number, loss in expected.items():
        assert found[number] == pytest.approx(loss, rel=1e-10), number
