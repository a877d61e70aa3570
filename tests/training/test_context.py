"""Runs whose sequences context ranks share: the losses of one rank, from the same tokens, on any layout in turn."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from crosscut.config import IGNORED, Layout, RunConfig
from crosscut.model import Batch
from crosscut.parallel import make_mesh
from crosscut.training.precision import resolve_on
from crosscut.training.step import Trainer
from tests.training.jobs import CPU, loop, losses_of, parts, whole_run

Make = Callable[..., RunConfig]

EXACT = ("training.precision=float64", "model.dropout=0", "training.steps=6")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "layout",
    [
        ("layout.context=2", "layout.context_attention=ring", "layout.data=2", "training.document_mask=true"),
        ("layout.context=2", "layout.context_attention=gather", "layout.tensor=2", "layout.sequence_parallel=true"),
        ("layout.context=4", "layout.context_attention=all_to_all", "layout.sharding=zero3"),
    ],
    ids=["ring", "gather", "all-to-all"],
)
def test_all_steps_have_the_losses_of_one_rank(ranks, run_with, layout):
    masks = [option for option in layout if option.startswith("training.")]
    (expected,) = ranks.run(1, losses_of, run_with(*EXACT, *masks), 3)
    run = run_with(*EXACT, *layout)
    for losses in ranks.run(run.layout.world_size, losses_of, run, 3):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-10, atol=0.0)


DYNAMIC = (
    "model.positions=rotary",
    "model.rotary_scaling=dynamic",
    "model.rotary_factor=4",
    "model.rotary_original_length=16",
)


def test_dynamic_rotations_follow_the_length_of_the_whole_sequence(ranks, run_with):
    """Each rank has 16 of the 32 tokens. For a sequence of 16 tokens, the frequencies would not be scaled."""
    (expected,) = ranks.run(1, losses_of, run_with(*EXACT, *DYNAMIC), 2)
    (unscaled,) = ranks.run(1, losses_of, run_with(*EXACT, DYNAMIC[0]), 2)
    assert expected != pytest.approx(unscaled, rel=1e-6)
    for losses in ranks.run(2, losses_of, run_with(*EXACT, *DYNAMIC, "layout.context=2"), 2):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-10, atol=0.0)


def _tokens_of(run: RunConfig) -> tuple[list[list[int]], list[int]]:
    trainer, batches = parts(run)
    (batch,) = batches.micro_batches(1)
    assert batch.places is not None or trainer.mesh.context.size == 1
    return batch.tokens.tolist(), [] if batch.places is None else batch.places.tolist()


def test_each_rank_gets_its_own_tokens_of_the_same_batch(ranks, run_with):
    ((whole, _),) = ranks.run(1, _tokens_of, run_with())
    for tokens, places in ranks.run(2, _tokens_of, run_with("layout.context=2")):
        assert len(places) == 16
        assert tokens == [[row[place] for place in places] for row in whole]


@pytest.mark.slow  # context ranks have no state of their own, and test_resume.py resumes at another layout
def test_a_run_goes_on_at_another_layout(ranks, run_with, tmp_path):
    options = ("training.precision=float64", "model.dropout=0", "training.steps=4", "training.validate_every=0")
    (expected,) = ranks.run(1, loop, run_with(*options))
    first = run_with(*options, "layout.context=2", "layout.context_attention=ring", "layout.sharding=zero2")
    first = dataclasses.replace(first, output=dataclasses.replace(first.output, folder=str(tmp_path / "other")))
    ranks.run(2, loop, first)
    saved = Path(first.checkpoints_folder) / "step-00000003"
    other = dataclasses.replace(first, layout=Layout(context=2, tensor=2, sequence_parallel=True))
    for found in ranks.run(4, loop, other, saved):
        assert found["after"] == pytest.approx(expected["after"], rel=1e-10)


def _loss_and_norm(run: RunConfig, batch: Batch) -> tuple[float, float]:
    mesh = make_mesh(run.layout, CPU)
    trainer = Trainer(resolve_on(run, CPU), mesh)
    result = trainer.step(0, [batch.part_of_rank(mesh.context)])
    return result.loss, result.gradient_norm


def test_a_rank_without_targets_adds_nothing(ranks, run_with):
    """Trap: the mean of no losses is not a number."""
    batch = Batch.from_ids(torch.randint(0, 500, (4, 33), generator=torch.Generator().manual_seed(1)))
    targets = torch.full_like(batch.targets, IGNORED)
    targets[:, 9:12] = batch.targets[:, 9:12]  # of the second of two ranks; the first has none
    batch = dataclasses.replace(batch, targets=targets)
    run = run_with(*EXACT)
    (expected,) = ranks.run(1, _loss_and_norm, run, batch)
    for found in ranks.run(2, _loss_and_norm, dataclasses.replace(run, layout=Layout(context=2)), batch):
        assert found == pytest.approx(expected, rel=1e-10)


def test_a_whole_run_says_how_the_ranks_share_the_sequences(ranks, run_with):
    run = run_with("layout.context=2", "training.steps=3", "training.validate_every=0")
    printed = "".join(ranks.run(2, whole_run, run)[0].replace("│", "").split())
    assert "16tokensofeachsequenceperrank;all-to-all,because2contextranksdividethe" in printed
