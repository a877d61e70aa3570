"""Training with a spoiled batch, for tests on ranks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscut.config import RunConfig
from crosscut.logbook.skips import SampleSkip
from crosscut.training.spikes.order import SampleOrder
from tests.training.jobs import error_of, parts
from tests.training.test_resume import whole_weights


def spoiled_run(
    run: RunConfig,
    spoiled: dict[int, float],
    skips: tuple[SampleSkip, ...] = (),
    resume_from: Path | None = None,
    fault: Any = None,
    share: float = 1.0,
) -> dict[str, Any]:
    """Train a run. `spoiled` maps the position of the first sequence of a batch to the factor by which the gradients of
    this batch are multiplied. `fault` plants a fault with a patch. `share` is the largest share of the run that may be
    left out: a short run would otherwise stop.
    """
    trainer, batches = parts(run)
    batches.order = SampleOrder(run.training, skips)
    update, step = trainer.update, trainer.step
    losses: dict[int, float] = {}
    bits: list[tuple[str, str]] = []
    positions: dict[int, int] = {}

    def spoil(number: int, loss: torch.Tensor) -> Any:
        positions[number] = batches.order.first_sample(number)
        factor = spoiled.get(positions[number])
        for parameter in trainer.parameters if factor else ():
            parameter.grad.mul_(factor)
        return update(number, loss)

    def noted(number: int, micro_batches: Any) -> Any:
        result = step(number, micro_batches)
        figures = result._arriving.tolist()
        losses[number] = figures[0]
        bits.append((figures[0].hex(), figures[1].hex()))
        return result

    trainer.update, trainer.step = spoil, noted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosscut.training.spikes.autopilot.MOST_SHARE", share)
        if fault is not None:
            fault(patch)
        error = error_of(trainer, batches, resume_from)
    averages = trainer.average.tensors if trainer.average else {}
    return {
        "losses": losses,
        "bits": bits,
        "positions": positions,
        "skips": batches.order.skips,
        "error": error,
        "weights": whole_weights(run, dict(trainer.model.named_parameters())),
        "averages": whole_weights(run, averages),
        "finite": all(math.isfinite(p.detach().to_local().sum().item()) for p in trainer.parameters),
    }


def same_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two runs end with the same losses, weights and averages."""
    tensors = [(ours[kind], theirs[kind]) for kind in ("weights", "averages")]
    same = all(torch.equal(mine[name], its[name]) for mine, its in tensors for name in mine)
    return same and ours["losses"] == theirs["losses"] and ours["positions"] == theirs["positions"]
