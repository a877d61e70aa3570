"""A value of one rank that is NaN after the gradients were summed: all ranks refuse the step and name this rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from crosscut.config import RunConfig
from crosscut.training.step import Trainer
from tests.training.jobs import are_equal, error_of, parts, weights_of

LOSS = "the loss"
STEP = 2
"""Step of the fault, counted from 0."""


def spoil(trainer: Trainer, at: int, rank: int, name: str) -> None:
    """Make the gradient of a parameter, or the part of the loss, NaN on one rank in step `at`, after the sum of the
    gradients over the ranks. If the step is done again, its values stay.
    """
    update, left = trainer.update, [(at, rank)]

    def spoiled(step: int, loss: torch.Tensor) -> Any:
        if (step, dist.get_rank()) in left:
            left.clear()
            gradient = dict(trainer.model.named_parameters()).get(name)
            values = loss if gradient is None else gradient.grad.to_local()
            values.view(-1)[0] = float("nan")
        return update(step, loss)

    trainer.update = spoiled  # type: ignore[method-assign]


def refused(run: RunConfig, rank: int, name: str) -> dict[str, Any]:
    """Train with a fault on one rank. Returns the message, and whether the weights are those from before the step."""
    trainer, batches = parts(run)
    spoil(trainer, STEP, rank, name)
    step, before = trainer.step, []

    def noted(number: int, micro_batches: Any) -> Any:
        if number == STEP:
            before.extend(weights_of(trainer))
        return step(number, micro_batches)

    trainer.step = noted  # type: ignore[method-assign]
    message = error_of(trainer, batches)
    return {"message": message, "unchanged": are_equal(before, weights_of(trainer))}


CUT, BIAS, TIED = "blocks.1.mlp.expand.weight", "final_norm.bias", "tokens.weight"
TENSOR, DATA, CONTEXT = ("layout.tensor=2",), ("layout.data=2",), ("layout.context=2", "model.dropout=0.0")
STAGES = ("layout.pipeline=2", "training.micro_batch_size=2")
ON_DATA, ON_TENSOR, ON_STAGE = (f"position 1 on the axis `{axis}`" for axis in ("data", "tensor", "pipeline"))
QUICK = {
    "data": (DATA, 1, CUT, ON_DATA),
    "tensor, replicated": (TENSOR, 1, BIAS, ON_TENSOR),
    "context": (CONTEXT, 1, CUT, "position 1 on the axis `context`"),
    "copy of a tied embedding": (STAGES, 1, TIED, ON_STAGE),
}
SLOW = {  # the same verdict over other groups of ranks
    "loss of a tensor rank": (TENSOR, 1, LOSS, ON_TENSOR),
    "loss of a data rank": (DATA, 1, LOSS, ON_DATA),
    "tensor, cut": (TENSOR, 1, CUT, ON_TENSOR),
    "zero3": ((*DATA, "layout.sharding=zero3"), 1, CUT, ON_DATA),
    "copies of shards": (("layout.data=4", "layout.sharding=zero3", "layout.shard_group=2"), 1, CUT, ON_DATA),
    "stages and data": ((*STAGES, *DATA), 3, TIED, f"{ON_STAGE}, {ON_DATA}"),
    "Muon": ((*DATA, "optimizer.matrices=muon", "optimizer.matrix_learning_rate=0.02"), 1, CUT, ON_DATA),
}


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_a_fault_of_one_rank_after_the_sum_is_refused_and_named_on_all_ranks(ranks, run_with, case):
    layout, rank, name, place = {**QUICK, **SLOW}[case]
    run = run_with(*layout)
    told = ranks.run(run.layout.world_size, refused, run, rank, name)
    assert all(each["unchanged"] for each in told)
    (message,) = {each["message"] for each in told}
    assert message == (
        f"The loss and its gradient must be finite, but at step {STEP + 1} they were not on rank {rank} ({place}). The "
        "same step, repeated, is finite, so neither the documents nor the learning rate are the cause. Probably a "
        "value has changed in the memory of a device. The weights and checkpoints are those from before the step. "
        f"Check the machine of rank {rank} for failing memory or a failing device, and run again with --resume auto."
    )


def scales_and_weights(run: RunConfig) -> tuple[list[tuple[float | None, bool]], bool]:
    """Loss scale of each step, and whether the step was skipped; and whether the step of the fault kept the weights."""
    trainer, batches = parts(run)
    spoil(trainer, STEP, 1, CUT)
    told, kept = [], False
    for step in range(STEP + 2):
        before = weights_of(trainer)
        result = trainer.step(step, batches.micro_batches(step)).wait()
        told.append((result.loss_scale, result.skipped))
        if step == STEP:
            kept = are_equal(before, weights_of(trainer))
    return told, kept


def test_all_ranks_skip_the_step_and_halve_the_loss_scale(ranks, run_with):
    run = run_with(*DATA, "training.precision=float16")
    (ours, kept), others = ranks.run(2, scales_and_weights, run)
    assert others == (ours, True) and kept
    scales = [scale for scale, _ in ours]
    assert [skipped for _, skipped in ours] == [False, False, True, False]
    assert scales[:3] == [scales[0]] * 3 and scales[3] == scales[0] / 2
