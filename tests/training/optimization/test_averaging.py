"""Moving average of the weights: its values on every layout, its use in scores, and its way through checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.checkpoint import AVERAGE, MODEL, latest_good_checkpoint, load_model
from crosscut.config import RunConfig, TrainingError
from crosscut.evaluation import evaluate_loss
from crosscut.parallel.state.parameters import local_part
from crosscut.training.loop import Loop
from crosscut.training.optimization.averaging import decay_after
from crosscut.training.resuming import describe_changes
from crosscut.training.watching.diagnosis import require_equal_replicas
from tests.training.jobs import loop, parts, whole_run
from tests.training.optimization.test_muon import MUON
from tests.training.test_resume import HERE, LAYOUTS, checkpoint_of, train, whole_weights

EMA = ("optimizer.ema_decay=0.3",)
"""Reached at step 4, so the decay of the first steps is lower."""
EXACT = ("model.dropout=0.0", "training.precision=float64")


def stepped(run: RunConfig) -> dict[str, Any]:
    """Four steps; the average, and what a plain program computes from the whole weights after each step."""
    trainer, batches = parts(run)
    named = dict(trainer.model.named_parameters())
    expected = whole_weights(run, named)
    for step, decay in enumerate((1 / 10, 2 / 11, 3 / 12, 0.3)):
        trainer.step(step, batches.micro_batches(step))
        for name, weight in whole_weights(run, named).items():
            expected[name] = decay * expected[name] + (1 - decay) * weight
    assert trainer.average is not None
    average = whole_weights(run, trainer.average.tensors)
    apart = max((average[name] - expected[name]).abs().max().item() for name in average)
    alike = all(
        local_part(average).shape == local_part(parameter.detach()).shape
        for average, parameter in zip(trainer.average.tensors.values(), trainer.parameters, strict=True)
    )
    return {"apart": apart, "average": average, "cut like the weights": alike}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("optimizer", [MUON, ()], ids=["Muon", "AdamW"])
@pytest.mark.parametrize("layout", ["zero3", "2x2 split zero2", "tensor 2"])
def test_the_average_is_that_of_whole_weights_on_every_layout(ranks, run_with, once, layout, optimizer):
    run = run_with(*EXACT, *EMA, *optimizer, *LAYOUTS[layout])
    told = ranks.run(run.layout.world_size, stepped, run)
    uncut = once(optimizer, lambda: ranks.run(1, stepped, run_with(*EXACT, *EMA, *optimizer))[0]["average"])
    for rank in told:
        assert rank["cut like the weights"]
        assert rank["apart"] < 1e-12
        for name, average in uncut.items():
            assert (average - rank["average"][name]).abs().max() < 1e-10, name


def test_the_decay_warms_up_so_that_a_short_run_forgets_its_initial_weights():
    decays = [decay_after(step, 0.999) for step in range(1000)]
    assert decays[:2] == [1 / 10, 2 / 11]
    assert decays == sorted(decays)
    share = torch.tensor(decays, dtype=torch.float64).prod().item()
    assert share < 1e-20 < 0.3 < 0.999**1000
    assert decay_after(10**6, 0.999) == 0.999


def exchanged(run: RunConfig) -> list[bool]:
    """Whether the model has the average inside the context, and all its old bits after it."""
    trainer, batches = parts(run)
    average = trainer.average
    assert average is not None
    trainer.step(0, batches.micro_batches(0))
    named = dict(trainer.model.named_parameters())
    weights, averages = whole_weights(run, named), whole_weights(run, average.tensors)
    with average.in_use():
        score = evaluate_loss(trainer.model, batches.validation_batches())
        inside = whole_weights(run, dict(trainer.model.named_parameters()))
    with average.in_use():
        again = evaluate_loss(trainer.model, batches.validation_batches())
    plain = evaluate_loss(trainer.model, batches.validation_batches())
    after, kept = whole_weights(run, dict(trainer.model.named_parameters())), whole_weights(run, average.tensors)
    return [
        *(torch.equal(averages[name], inside[name]) and not torch.equal(weights[name], inside[name]) for name in named),
        *(torch.equal(weights[name], after[name]) and torch.equal(averages[name], kept[name]) for name in named),
        score.loss == again.loss != plain.loss,
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", ["zero3", "2x2 split zero2", "tensor 2"])
def test_weights_and_average_change_places_to_the_last_bit(ranks, run_with, layout):
    run = run_with(*EMA, *LAYOUTS[layout])
    for told in ranks.run(run.layout.world_size, exchanged, run):
        assert all(told)


def scores_of_checkpoint(run: RunConfig, checkpoint: Path) -> dict[str, float]:
    """Validation loss of the average and of the last weights in a checkpoint."""
    losses = {}
    for group in (AVERAGE, MODEL):
        trainer, batches = parts(run)
        load_model(checkpoint, model=trainer.model, padded=trainer.model.padded_rows, group=group)
        losses[group] = evaluate_loss(trainer.model, batches.validation_batches()).loss
    return losses


@pytest.mark.parametrize("layout", ["1x1", pytest.param("2x2", marks=pytest.mark.slow)])
def test_validation_is_of_the_average_in_the_checkpoint(ranks, run_with, layout):
    run = run_with(*EMA, *LAYOUTS[layout])
    outcome = ranks.run(run.layout.world_size, loop, run)[0]
    scores = ranks.run(run.layout.world_size, scores_of_checkpoint, run, checkpoint_of(run, 6))[0]
    assert outcome["after"] == scores[AVERAGE] != scores[MODEL]
    other = run_with(f"output.folder={run.output.folder}-plain", *LAYOUTS[layout])
    plain = ranks.run(run.layout.world_size, loop, other)[0]
    assert outcome["before"] == plain["before"]
    for name, weight in plain["weights"].items():
        assert torch.equal(weight, outcome["weights"][name]), "the average must not change the training"


@pytest.mark.slow  # test_resume_faults.py resumes an average, and test_resume.py another layout
def test_the_average_goes_on_on_another_layout(ranks, run_with):
    whole = train(ranks, run_with(*HERE, *EXACT, *EMA))[0]
    other = run_with(*HERE, *EXACT, *EMA, "layout.data=2", "layout.sharding=zero3")
    resumed = train(ranks, other, checkpoint_of(other, 3))[0]
    for name, average in whole["averages"].items():
        assert (average - resumed["averages"][name]).abs().max() < 1e-10, name


def test_an_average_that_a_resume_adds_begins_with_the_weights_of_the_checkpoint(ranks, run_with):
    run = run_with(*HERE, "training.steps=3")
    train(ranks, run)
    added = run_with(*HERE, *EMA)
    assert "holds no moving average of the weights. With `optimizer.ema_decay`, the average begins with" in note(added)
    assert note(run) == ""
    told = train(ranks, run_with(*HERE, *EMA, "training.steps=4"), checkpoint_of(run, 3))[0]  # the decay is 0.3 by now
    start = ranks.run(1, weights_of, run, checkpoint_of(run, 3))[0]
    for name, average in told["averages"].items():
        expected = 0.3 * start[name] + 0.7 * told["weights"][name]
        assert torch.allclose(average, expected, rtol=0, atol=1e-6), name


def test_an_average_that_a_resume_drops_is_told(ranks, run_with):
    run = run_with(*HERE, *EMA, "training.steps=3")
    train(ranks, run)
    dropped = run_with(*HERE, "training.steps=4")
    assert "holds a moving average of the weights, but `optimizer.ema_decay` is 0. The run drops" in note(dropped)
    assert note(run) == note(run_with("optimizer.ema_decay=0.5")) == ""
    told = train(ranks, dropped, checkpoint_of(run, 3))[0]
    assert sorted(told["losses"]) == [3]
    assert told["averages"] == {}


def note(run: RunConfig) -> str:
    """Message of a run about its average when the run resumes from its newest checkpoint."""
    told = describe_changes(run, latest_good_checkpoint(run.checkpoints_folder).manifest, {})
    return "".join(text for text in told if "moving average" in text)


def weights_of(run: RunConfig, checkpoint: Path) -> dict[str, Tensor]:
    trainer, batches = parts(run)
    Loop(trainer, batches).checkpoints.load(checkpoint)
    return whole_weights(run, dict(trainer.model.named_parameters()))


def test_steps_that_a_loss_scale_holds_leave_the_average_finite(ranks, run_with):
    """The scale begins too high: the first steps overflow."""
    run = run_with(*HERE, *EMA, "training.precision=float16")
    whole = train(ranks, run)[0]
    assert whole["scales"][0] > whole["scales"][5]
    assert all(average.isfinite().all() for average in whole["averages"].values())
    resumed = train(ranks, run, checkpoint_of(run, 3))[0]
    assert all(torch.equal(average, resumed["averages"][name]) for name, average in whole["averages"].items())


def with_a_changed_average(run: RunConfig) -> str:
    trainer, batches = parts(run)
    assert trainer.average is not None
    trainer.step(0, batches.micro_batches(0))
    if trainer.mesh.data.rank == 1:
        local_part(trainer.average.tensors["blocks.0.mlp.expand.weight"]).view(-1)[3] += 1
    try:
        require_equal_replicas(trainer, 1)
    except TrainingError as error:
        return str(error)
    return ""


def test_copies_of_the_average_that_differ_stop_the_run(ranks, run_with):
    for told in ranks.run(2, with_a_changed_average, run_with(*EMA, "layout.data=2")):
        assert "`average of blocks.0.mlp.expand.weight` must have identical values in all its replicas" in told


def test_the_output_says_that_scores_and_samples_are_of_the_average(ranks, run_with):
    short = ("training.steps=3", "training.validate_every=2")
    run = run_with(*EMA, *short)
    printed = ranks.run(1, whole_run, run)[0]
    assert printed.count("(of the averaged weights)") == 3  # at steps 0, 2 and 3
    assert printed.count("scores and samples are of the averaged weights (decay 0.3)") == 2  # banner and summary
    plain = run_with(*short, f"output.folder={run.output.folder}-plain")
    assert "averaged" not in ranks.run(1, whole_run, plain)[0]
