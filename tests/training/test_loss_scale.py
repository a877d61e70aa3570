"""float16: steps that overflow are skipped by all ranks alike, the scale follows, and the losses are float32's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from crosscut.checkpoint import list_checkpoints
from crosscut.training.loss_scale import FIRST, GROWTH_INTERVAL, LossScale
from tests.training.jobs import CPU, are_equal, error_of, losses_of, parts, weights_of

FP16 = ("training.precision=float16", "model.dropout=0.0")
LAYOUTS = {
    "zero3": ("layout.data=2", 'layout.sharding="zero3"'),
    "tensor 2": ("layout.tensor=2",),
    "data 2": ("layout.data=2",),
    "split": ("layout.tensor=2", "layout.sequence_parallel=true"),
}


def overflow_once(trainer: Any, name: str, rank: int) -> None:
    """In the next backward pass a parameter's gradient is no number, on one rank of all.

    Where data ranks share a copy, what is passed back to its module is none, since parameters are gathered there.
    """
    mesh = trainer.mesh
    if mesh.data.rank * mesh.tensor.size + mesh.tensor.rank != rank:
        return
    if mesh.sharding is None:
        handle = dict(trainer.model.named_parameters())[name].register_hook(
            lambda gradient: (handle.remove(), gradient * float("inf"))[1]
        )
    else:
        handle = trainer.model.get_submodule(name.rpartition(".")[0]).register_forward_hook(
            lambda _, __, output: (handle.remove(), output.register_hook(lambda g: g * float("inf")), None)[2]
        )


def steps_of(run: Any, num_steps: int, first: float, overflows: dict[int, str]) -> list[tuple[float, bool, bool]]:
    """For each step: the scale, whether the step was skipped, and whether a weight changed."""
    trainer, batches = parts(run)
    trainer.loss_scale.scale.fill_(first)
    told = []
    for step in range(num_steps):
        if step in overflows:
            overflow_once(trainer, overflows[step], rank=run.layout.world_size - 1)
        before = weights_of(trainer)
        result = trainer.step(step, batches.micro_batches(step)).wait()
        told.append((result.loss_scale, result.skipped, not are_equal(before, weights_of(trainer))))
    return told


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_scale_that_is_far_too_high_comes_down_and_then_weights_change(ranks, run_with, options):
    run = run_with(*FP16, *options)
    told = ranks.run(run.layout.world_size, steps_of, run, 10, 2.0**24, {})
    assert all(steps == told[0] for steps in told)
    assert [skipped for _, skipped, _ in told[0]][:4] == [True] * 4
    assert not told[0][-1][1]
    expected = 2.0**24
    for scale, skipped, changed in told[0]:
        assert scale == expected
        assert changed != skipped
        expected = scale / 2 if skipped else scale


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", list(LAYOUTS.values())[::-1], ids=list(LAYOUTS)[::-1])
def test_overflow_on_one_rank_skips_the_step_on_all(ranks, run_with, options):
    """Also of a gradient that all ranks hold whole and nobody sums."""
    planted = {1: "blocks.0.mlp.expand.weight", 3: "final_norm.bias", 5: "blocks.1.mlp.contract.bias"}
    told = ranks.run(2, steps_of, run_with(*FP16, *options, "training.steps=7"), 7, FIRST, planted)
    assert told[0] == told[1]
    assert [skipped for _, skipped, _ in told[0]] == [False, True, False, True, False, True, False]
    assert [changed for _, _, changed in told[0]] == [True, False, True, False, True, False, True]
    assert [FIRST / scale for scale, _, _ in told[0]] == [1, 1, 2, 2, 4, 4, 8]


def forced_losses(run: Any, num_steps: int) -> list[float]:
    """The losses of steps that were not skipped. Two overflows are planted on one rank; the first scale is too high."""
    trainer, batches = parts(run)
    trainer.loss_scale.scale.fill_(2.0**24)
    losses: list[float] = []
    planted = {num_steps // 5, 3 * num_steps // 5}
    while len(losses) < num_steps:
        step = len(losses)
        if step in planted:
            planted.remove(step)
            overflow_once(trainer, "final_norm.weight", rank=0)
        result = trainer.step(step, batches.micro_batches(step)).wait()  # a skipped step is done again
        if not result.skipped:
            losses.append(result.loss)
    assert not planted
    assert trainer.loss_scale.scale.item() < 2.0**20
    return losses


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_losses_of_every_layout_stay_near_float32_through_overflows(ranks, run_with, options):
    base = ("model.dropout=0.0", "training.steps=5")
    exact = ranks.run(1, losses_of, run_with(*base), 5)[0]
    told = ranks.run(2, forced_losses, run_with(*base, *options, "training.precision=float16"), 5)
    assert told[0] == told[1] == pytest.approx(exact, rel=5e-4)
    assert told[0] != exact


def test_scale_doubles_after_enough_good_steps():
    scale = LossScale(CPU, first=4.0)
    good, overflow = torch.zeros(()), torch.ones(())
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(good)
    assert scale.scale == 4.0
    scale.update(overflow)
    assert (scale.scale, scale.good_steps) == (2.0, 0)
    for _ in range(GROWTH_INTERVAL):
        scale.update(good)
    assert (scale.scale, scale.good_steps) == (4.0, 0)


def test_unscaled_gradients_are_those_of_no_scale(ranks, run_with):
    """Bit for bit where nothing is rounded to zero or to infinity: a scale is a power of two."""
    run = run_with(*FP16)
    one, other = (ranks.run(1, gradients_at, run, scale)[0] for scale in (2.0**12, 2.0**14))
    same = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    assert sum(same) >= 0.8 * len(same)
    for a, b in zip(one, other, strict=True):
        assert (a - b).norm() <= 1e-3 * a.norm()


def gradients_at(run: Any, scale: float) -> list[torch.Tensor]:
    trainer, batches = parts(run)
    trainer.loss_scale.scale.fill_(scale)
    trainer.accumulate(0, batches.micro_batches(0))
    return [p.grad.to_local() for p in trainer.parameters]


def overflow_always(run: Any, forward: bool = False) -> tuple[str, bool]:
    """Error of a run whose gradients or forward passes overflow from the second step on, and whether the weights stayed
    the same.
    """
    trainer, batches = parts(run)
    trainer.loss_scale.scale.fill_(8.0)
    step, weights = trainer.step, {}

    def overflowing_step(number: int, micro_batches: Any) -> Any:
        if number == 1 and forward:
            trainer.model.blocks[1].mlp.expand.bias.detach().to_local().fill_(1e6)
        weights[number] = weights_of(trainer)
        if number >= 1 and not forward:
            overflow_once(trainer, "positions.weight", rank=0)
        return step(number, micro_batches)

    trainer.step = overflowing_step
    return error_of(trainer, batches), are_equal(weights[1], weights_of(trainer))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [LAYOUTS["tensor 2"], LAYOUTS["data 2"]], ids=str)
def test_overflows_without_end_end_the_run(ranks, run_with, options):
    run = run_with(*FP16, *options, "training.steps=40", "checkpoint.every=5", "training.validate_every=0")
    told = ranks.run(2, overflow_always, run)
    assert told[0] == told[1]
    message, unchanged = told[0]
    assert unchanged
    assert message.startswith(
        "The loss scale must stay at or above 1, but the gradients of step 5 overflowed at scale 1, so the scale would "
        "fall to 0.5. The weights are those from before the overflow. Lower `optimizer.learning_rate`, or set training."
    )
    assert message.endswith("and run again with --resume auto.")
    assert list_checkpoints(Path(run.output.folder) / "checkpoints") == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [LAYOUTS["data 2"], LAYOUTS["tensor 2"]], ids=str)
def test_a_forward_pass_that_overflows_is_named_when_no_scale_helps(ranks, run_with, options):
    run = run_with(*FP16, *options, "training.steps=40", "checkpoint.every=0", "training.validate_every=0")
    told = ranks.run(2, overflow_always, run, True)
    assert told[0] == told[1]
    message, unchanged = told[0]
    assert unchanged
    assert message.startswith(
        "The loss and its gradient must be finite, but at step 5 they are not. The first non-finite value appeared in "
        "the output of `blocks.1.mlp.expand`, on a batch made of "
    )
    assert message.endswith(
        ". The weights and checkpoints are those from before the step. Check these documents, or lower "
        '`optimizer.learning_rate`, or set training.precision="bfloat16", and run again with --resume auto.'
    )
