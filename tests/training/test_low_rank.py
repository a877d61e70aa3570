"""Runs with gradients in low rank train the same model on every layout, also after a resume."""

from typing import Any

import pytest
import torch
from click.testing import CliRunner

from crosscut.checkpoint import list_checkpoints
from crosscut.cli.main import commands
from crosscut.config import ConfigError, RunConfig, write_toml
from crosscut.planner import step_traffic
from crosscut.training.precision import resolve_on
from crosscut.training.requirements import require_capabilities
from tests.refusals import refusal
from tests.rehearsal.cases import planned_messages
from tests.training.jobs import CPU, are_equal, loop, losses_of, parts, record_step

LOW_RANK = ("optimizer.gradient_rank=2", "training.precision=float64", "model.dropout=0.0")


def test_every_layout_has_the_losses_of_one_rank(ranks, run_with):
    layouts = ("", "layout.data=2 training.micro_batch_size=2", "layout.tensor=2 layout.data=2", "layout.pipeline=2")
    runs = {layout: run_with(*LOW_RANK, "training.batch_size=8", *layout.split()) for layout in layouts}
    losses = {layout: ranks.run(run.layout.world_size, losses_of, run, 5) for layout, run in runs.items()}
    alone = losses[""][0]
    whole = ranks.run(1, losses_of, run_with(*LOW_RANK[1:], "training.batch_size=8"), 5)[0]
    assert abs(alone[-1] - whole[-1]) > 1e-4, "the option changes the model"
    for layout, of_ranks in losses.items():
        for each in of_ranks:
            assert each == pytest.approx(alone, abs=1e-10), layout


@pytest.mark.parametrize(
    "after",
    [
        "layout.data=1 layout.tensor=2",
        # a part of what the first shows
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("", "layout.data=1", "layout.data=4")),
    ],
)
def test_a_resumed_run_has_its_errors_on_any_layout(ranks, run_with, tmp_path, after):
    settings = (*LOW_RANK, "training.steps=6", "checkpoint.every=3", "checkpoint.keep=9", "training.batch_size=8")
    run = run_with(*settings, "layout.data=2")
    first = ranks.run(2, loop, run)[0]
    resumed = run_with(*settings, "layout.data=2", *after.split(), f"output.folder={tmp_path / 'resumed'}")
    (checkpoint,) = (each for each in list_checkpoints(run.checkpoints_folder) if each.name.endswith("3"))
    again = ranks.run(resumed.layout.world_size, loop, resumed, checkpoint)[0]
    for name, weight in first["weights"].items():
        if after:
            torch.testing.assert_close(again["weights"][name], weight, rtol=0, atol=1e-9)
        else:
            assert torch.equal(again["weights"][name], weight), name


@pytest.mark.parametrize("layout", ["layout.data=2", "layout.data=2 layout.tensor=2 layout.sequence_parallel=true"])
def test_messages_are_the_planned_ones_and_far_smaller(ranks, run_with, layout):
    small = ("optimizer.gradient_rank=1", "training.batch_size=8", *layout.split())
    run = run_with(*small)
    recorded = ranks.run(run.layout.world_size, record_step, run)[0]
    sent: dict[Any, int] = {}
    for message in recorded:
        sent[message] = sent.get(message, 0) + 1
    assert sent == dict(planned_messages(run))

    def to_data_ranks(run: RunConfig) -> float:
        return sum(each.wire_bytes for each in step_traffic(run) if each.axis == "data")

    assert 5 * to_data_ranks(run) < to_data_ranks(run_with(*small[1:]))


def overflow(run: RunConfig) -> tuple[bool, bool]:
    """Whether a step in float16 whose gradients overflow is skipped and changes no memory."""
    trainer, batches = parts(run)
    trainer.step(0, batches.micro_batches(0)).wait()
    before = [tensor.to_local().clone() for tensor in trainer.low_rank.state().values()]
    trainer.loss_scale.scale.fill_(2.0**100)
    skipped = bool(trainer.step(1, batches.micro_batches(1)).wait().skipped)
    after = [tensor.to_local() for tensor in trainer.low_rank.state().values()]
    return skipped, are_equal(before, after)


def test_a_step_that_overflows_in_float16_leaves_the_errors_as_they_were(ranks, run_with):
    run = run_with("optimizer.gradient_rank=2", "training.precision=float16", "layout.data=2")
    assert ranks.run(2, overflow, run) == [(True, True)] * 2


def test_gradients_that_cannot_be_in_low_rank_are_refused(run_with, tmp_path):
    shared = ("optimizer.gradient_rank=2", "layout.data=2", "layout.sharding=zero3")
    assert refusal(ConfigError, run_with, *shared) == (
        '`optimizer.gradient_rank` must be 0 with layout.sharding="zero3", but is 2. Data ranks that share one copy '
        "scatter the gradients, so no rank has one to approximate. Remove `optimizer.gradient_rank`, or set "
        'layout.sharding="none".'
    )
    large = run_with("optimizer.gradient_rank=29")
    told = (
        "`optimizer.gradient_rank` must be at most 28 for this model, but is 29. A gradient is only summed in low rank "
        "if it is at least 2 times as large as its factors. Set optimizer.gradient_rank=14."
    )
    assert refusal(ConfigError, require_capabilities, resolve_on(large, CPU)) == told
    require_capabilities(resolve_on(run_with("optimizer.gradient_rank=28"), CPU))
    write_toml(large, tmp_path / "run.toml")
    for options in (("--gpu", "h100-sxm"), ("--dry-run",)):
        words = ["plan", str(tmp_path / "run.toml"), *options]
        assert refusal(ConfigError, CliRunner().invoke, commands, words, catch_exceptions=False).endswith(told)
    muon = ("optimizer.gradient_rank=2", "optimizer.matrices=muon", "optimizer.matrix_learning_rate=0.02")
    assert refusal(ConfigError, run_with, *muon) == (
        "`optimizer.matrices` must be 'adamw' with `optimizer.gradient_rank`, but is 'muon'. Muon gives all directions "
        "of an update the same size, and few are left. Remove one of the two."
    )
