"""A run that resumes is the run that never stopped: exactly on the same layout, up to rounding on another one."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from crosscut.checkpoint import read_manifest
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import CheckpointError, RankFailure, RunConfig
from crosscut.training.loop import Loop
from crosscut.training.resuming import naming_newest_checkpoint
from tests.checkpoint.forged import fit_hashes
from tests.training.jobs import parts

HERE = ("checkpoint.keep=100", "training.validate_every=0")


def record(run: RunConfig, resume_from: Path | None = None) -> dict:
    """Train; every step's loss, the tokens of every batch, and the whole weights and their averages at the end.

    A loss scale begins so high that the first steps overflow.
    """
    trainer, batches = parts(run)
    if trainer.loss_scale is not None:
        trainer.loss_scale.scale.fill_(2.0**20)
    seen: dict[int, list] = {}
    losses: dict[int, float] = {}
    scales: dict[int, float | None] = {}
    take, step = batches.micro_batches, trainer.step

    def noted_batches(number: int) -> list:
        micro_batches = take(number)
        seen[number] = [tokens.tolist() for batch in micro_batches for tokens in batch.tensors()]
        return micro_batches

    def noted_step(number: int, micro_batches: list) -> object:
        result = step(number, micro_batches)
        losses[number], scales[number] = result.loss, result.loss_scale
        return result

    batches.micro_batches, trainer.step = noted_batches, noted_step
    loop = Loop(trainer, batches)
    with loop.checkpoints.completed():
        loop.train(resume_from)
    weights = whole_weights(run, dict(trainer.model.named_parameters()))
    averages = whole_weights(run, trainer.average.tensors) if trainer.average else {}
    scale = trainer.loss_scale and [value.item() for value in trainer.loss_scale.state().values()]
    rank = trainer.mesh.data.rank
    told = {"losses": losses, "seen": seen, "weights": weights, "rank": rank, "scales": scales, "scale": scale}
    return {**told, "averages": averages}


def whole_weights(run: RunConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of whole parameters, or of tensors that are cut like parameters, without padding."""
    padded, real = ("tokens.weight", "output.weight"), run.model.vocab_size
    return {name: t.detach().full_tensor()[: real if name in padded else None].clone() for name, t in tensors.items()}


def checkpoint_of(run: RunConfig, step: int) -> Path:
    return Path(run.checkpoints_folder) / f"step-{step:08d}"


def train(ranks, run: RunConfig, resume_from: Path | None = None) -> list[dict]:
    return ranks.run(run.layout.world_size, record, run, resume_from, time_limit=240)


def require_same_run(whole: list[dict], resumed: list[dict], *, done: int) -> None:
    """Require that a run that resumed after `done` steps went on like the whole run, to the last bit."""
    for ours, theirs in zip(whole, resumed, strict=True):
        assert theirs["losses"] == {step: loss for step, loss in ours["losses"].items() if step >= done}
        assert all(theirs["seen"][step] == ours["seen"][step] for step in theirs["losses"])
        for name, weight in ours["weights"].items():
            assert torch.equal(weight, theirs["weights"][name]), name


def require_same_run_here_and_elsewhere(ranks, run: RunConfig, other: RunConfig) -> None:
    """Resume a run after step 3 on its own layout, and on another one with the same batches."""
    whole, resumed = train(ranks, run), train(ranks, run, checkpoint_of(run, 3))
    require_same_run(whole, resumed, done=3)
    elsewhere = train(ranks, other, checkpoint_of(run, 3))
    for step, loss in elsewhere[0]["losses"].items():
        assert batches_of(elsewhere, step) == batches_of(whole, step)
        assert loss == pytest.approx(whole[0]["losses"][step], rel=1e-5)


def batches_of(results: list[dict], step: int) -> list[list]:
    """All sequences of a step, over the data ranks in their order."""
    by_rank = {result["rank"]: result["seen"][step] for result in results}
    return [row for rank in sorted(by_rank) for row in by_rank[rank][0]]


LAYOUTS = {
    "1x1": (),
    "tensor 2": ("layout.tensor=2",),
    "data 2": ("layout.data=2",),
    "2x2": ("layout.tensor=2", "layout.data=2"),
    "2x2 split": ("layout.tensor=2", "layout.data=2", "layout.sequence_parallel=true"),
    "4x1": ("layout.tensor=4",),
    "4x1 split": ("layout.tensor=4", "layout.sequence_parallel=true"),
    "zero3": ("layout.data=2", "layout.sharding=zero3"),
    "2x2 split zero2": ("layout.tensor=2", "layout.data=2", "layout.sequence_parallel=true", "layout.sharding=zero2"),
    "groups": ("layout.data=4", "layout.sharding=zero2", "layout.shard_group=2"),
}


# What is slow here and below repeats a quick case on another layout.
@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", ["zero3", "2x2", "4x1 split"])
def test_same_layout_goes_on_to_the_last_bit(ranks, run_with, layout):
    """With dropout on: the random streams are functions of the step, so nothing of them needs storing."""
    run = run_with(*HERE, "model.dropout=0.1", *LAYOUTS[layout])
    whole, resumed = train(ranks, run), train(ranks, run, checkpoint_of(run, 3))
    assert sorted(resumed[0]["losses"]) == [3, 4, 5]
    require_same_run(whole, resumed, done=3)


@pytest.mark.slow  # what float32 does, and one number more
def test_float16_goes_on_to_the_last_bit(ranks, run_with):
    run = run_with(*HERE, "training.precision=float16", "checkpoint.every=1", *LAYOUTS["2x2"])
    whole = train(ranks, run)
    scales = whole[0]["scales"]
    num_skipped = sum(scales[step + 1] < scales[step] for step in range(5))
    assert 1 <= num_skipped <= 3
    for at in (1, num_skipped + 1):  # among the overflows, and after a good step
        resumed = train(ranks, run, checkpoint_of(run, at))
        for ours, theirs in zip(whole, resumed, strict=True):
            assert theirs["scale"] == ours["scale"] == [scales[5], 6 - num_skipped]
            assert theirs["scales"] == {step: scale for step, scale in ours["scales"].items() if step >= at}
        require_same_run(whole, resumed, done=at)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pair", [("data 2", "1x1"), ("1x1", "4x1 split")], ids=" to ".join)
def test_loss_scale_is_the_same_on_any_layout(ranks, run_with, pair):
    saved_by, resumed_by = pair
    base = (*HERE, "training.precision=float16", "model.dropout=0.0", "training.steps=7", "checkpoint.every=6")
    whole = train(ranks, run_with(*base, *LAYOUTS[saved_by]))
    other = run_with(*base, *LAYOUTS[resumed_by])
    for told in train(ranks, other, checkpoint_of(other, 6)):
        assert told["scales"] == {6: whole[0]["scales"][6]}
        assert told["scale"] == whole[0]["scale"]


def test_run_takes_up_a_loss_scale_where_the_checkpoint_has_none(ranks, run_with):
    short = (*HERE, "training.steps=3", "checkpoint.every=2")
    run = run_with(*short)
    assert train(ranks, run)[0]["scale"] is None
    half = train(ranks, run_with(*short, "training.precision=float16"), checkpoint_of(run, 2))
    assert half[0]["scales"] == {2: 2.0**20}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "content"),
    [("scale", struct.pack("<f", value)) for value in (math.nan, math.inf, 0.0, -65536.0)]
    + [("good_steps", struct.pack("<i", -1))],
    ids=["nan", "inf", "0", "-65536", "good steps"],
)
def test_loss_scale_that_no_run_can_use_is_refused(ranks, run_with, name, content):
    run = run_with(*HERE, "training.precision=float16", "training.steps=3")
    train(ranks, run)
    checkpoint = checkpoint_of(run, 3)
    (part,) = json.loads((checkpoint / "tensors.json").read_text())["tensors"][f"loss_scale.{name}"]["parts"]
    with (checkpoint / part["file"]).open("r+b") as file:
        file.seek(part["start"])
        file.write(content)
    fit_hashes(checkpoint)
    with pytest.raises(CheckpointError, match=r"must hold a loss scale that is a positive number, and .* but holds "):
        train(ranks, run_with(*HERE, "training.precision=float16"), checkpoint)


def compare_over_layouts(ranks, run_with, pair, base, *, at: int, tolerance: float) -> None:
    """Losses and batches of every step after the change of layout, and all parameters at the end as one vector.

    Not each parameter alone: the gradient of a key's bias is zero in exact arithmetic (a constant added to all scores
    of a query changes no probability), so that AdamW makes steps of full size out of rounding errors there.
    """
    saved_by, resumed_by = pair
    run = run_with(*base, *LAYOUTS[saved_by])
    other = run_with(*base, *LAYOUTS[resumed_by])
    whole = train(ranks, run)
    resumed = train(ranks, other, checkpoint_of(run, at))
    assert sorted(resumed[0]["losses"]) == list(range(at, run.training.steps))
    for step, loss in resumed[0]["losses"].items():
        assert loss == pytest.approx(whole[0]["losses"][step], rel=tolerance), step
        assert batches_of(resumed, step) == batches_of(whole, step), step
    ours, theirs = (torch.cat([w.flatten() for w in r[0]["weights"].values()]) for r in (whole, resumed))
    assert (ours - theirs).norm() / ours.norm() < tolerance


PAIRS = [
    ("zero3", "tensor 2"),
    ("2x2", "4x1"),
    ("4x1 split", "data 2"),
    ("1x1", "2x2 split"),
    ("2x2 split zero2", "1x1"),
    ("1x1", "groups"),
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("pair", PAIRS, ids=" to ".join)
def test_other_layout_goes_on_up_to_rounding(ranks, run_with, pair):
    base = (*HERE, "model.dropout=0.0", "training.precision=float64")
    compare_over_layouts(ranks, run_with, pair, base, at=3, tolerance=1e-10)


GROWING = ("training.batch_size=8", "training.initial_batch_size=4", "training.ramp_steps=4")


@pytest.mark.slow  # one of the options of test_resume_faults.py
def test_a_growing_batch_goes_on_to_the_last_bit(ranks, run_with):
    run = run_with(*HERE, *GROWING, *LAYOUTS["data 2"])
    whole, resumed = train(ranks, run), train(ranks, run, checkpoint_of(run, 3))
    assert read_manifest(LocalFolder(checkpoint_of(run, 6))).progress.samples == 4 * 4 + 2 * 8
    require_same_run(whole, resumed, done=3)


WSD = (
    "optimizer.schedule=wsd",
    "optimizer.warmup_steps=1",
    "checkpoint.keep=1",
    "checkpoint.every=3",
    "training.validate_every=0",
)


def test_a_run_is_extended_from_its_stable_phase(ranks, run_with):
    """The checkpoint before the decay is written and kept. From there, a longer run is the run that was long from the
    start: to the last bit.
    """
    short = run_with(*WSD, "training.steps=4", "optimizer.decay_steps=2")
    train(ranks, short)
    stable = checkpoint_of(short, 2)
    assert sorted(folder.name for folder in stable.parent.glob("step-*")) == ["step-00000002", "step-00000004"]
    long = (*WSD, "training.steps=5", "optimizer.decay_steps=3")
    extended = train(ranks, run_with(*long), stable)
    whole = train(ranks, run_with(*long, f"output.folder={short.output.folder}-whole"))
    require_same_run(whole, extended, done=2)


def test_checkpoint_tells_its_run_and_a_failed_rank_names_the_newest(ranks, run_with, tmp_path):
    run = run_with("training.validate_every=0")
    train(ranks, run)
    progress = read_manifest(LocalFolder(checkpoint_of(run, 6))).progress
    assert (progress.step, progress.samples, progress.seed) == (6, 24, 1)
    assert progress.config["training"]["steps"] == 6
    assert progress.config["model"]["vocab_size"] == 500
    folder = Path(run.checkpoints_folder)
    with pytest.raises(RankFailure) as told, naming_newest_checkpoint([tmp_path / "none", folder], "crosscut again"):
        raise RankFailure("Rank 1 was ended by SIGKILL; the other ranks were stopped.")
    assert str(told.value).splitlines() == [
        "Rank 1 was ended by SIGKILL; the other ranks were stopped.",
        f"The newest checkpoint is that of step 6, `{folder}/step-00000006`. Continue from it with `crosscut again`.",
    ]
    with pytest.raises(RankFailure, match=r"^early$"), naming_newest_checkpoint([tmp_path / "none"], "crosscut again"):
        raise RankFailure("early")
    with pytest.raises(CheckpointError, match=r"^mistake$"), naming_newest_checkpoint([folder], "crosscut again"):
        raise CheckpointError("mistake")


def test_failed_checkpoint_stops_the_run_or_does_not(ranks, run_with, capfd):
    """A file stands where the folder must be: a place that cannot be written, also for root."""
    place = Path(run_with().output.folder).parent / "taken"
    place.write_text("not a folder")
    settings = (
        f"checkpoint.folder={place}/checkpoints",
        "checkpoint.every=2",
        "training.steps=3",
        "training.validate_every=0",
    )
    with pytest.raises(CheckpointError, match=r"must be writable, but is not: Not a directory"):
        ranks.run(2, record, run_with(*settings, "layout.tensor=2"))
    results = ranks.run(2, record, run_with(*settings, "layout.tensor=2", "checkpoint.on_failure=continue"))
    assert all(sorted(result["losses"]) == [0, 1, 2] for result in results)
