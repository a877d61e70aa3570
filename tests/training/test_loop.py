import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from crosscut.checkpoint import list_checkpoints
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import CheckpointError
from crosscut.launch.stopping import REQUESTS
from crosscut.model import Batch
from crosscut.training.loop import Loop
from tests.nursery import handlers_kept
from tests.training.conftest import tiny_run
from tests.training.jobs import are_equal, error_of, loop, parts, rows_of
from tests.training.test_resume import checkpoint_of

ONE_STEP = ("training.steps=1", "optimizer.warmup_steps=0")


@pytest.fixture(scope="module")
def finished_once(ranks, tokens_folder, tmp_path_factory) -> tuple[Path, dict]:
    """The folder of a run of 6 steps with checkpoints after 3 and 6, and how the run ends."""
    run = tiny_run(tokens_folder, tmp_path_factory.mktemp("finished") / "run", "optimizer.learning_rate=5e-3")
    return Path(run.output.folder), ranks.run(1, loop, run)[0]


@pytest.fixture
def finished(finished_once, run_with):
    """That run, in a copy of its folder, and how it ends."""
    run = run_with("optimizer.learning_rate=5e-3")
    shutil.copytree(finished_once[0], run.output.folder)
    return run, finished_once[1]


def test_loss_falls_and_every_step_is_noted(finished):
    run, outcome = finished
    assert outcome["after"] < outcome["before"] - 0.05
    rows = rows_of(run)
    trained = [row for row in rows if "loss" in row]
    assert [row["step"] for row in trained] == list(range(1, 7))
    assert not any("loss_scale" in row or "skipped" in row for row in rows)
    assert set(trained[0]) >= {
        "loss", "gradient_norm", "learning_rate", "seconds", "tokens_per_second", "model_flops_per_second",
        "utilisation", "samples",
    }  # fmt: skip
    assert trained[-1]["samples"] == 24
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 3, 6]


def bits_by_hand(run) -> tuple[float, int]:
    """Bits per byte of the first model and bytes, from whole logits of each target and the text of the targets."""
    trainer, batches = parts(run)
    tokens, tokenizer = batches._tokens, batches._tokens.tokenizer()
    length, count = run.training.sequence_length, run.training.validation_sequences
    ids = torch.from_numpy(tokens.validation.tokens[:].astype("int64"))
    every = (len(ids) - 2) // length + 1
    bits, num_bytes = 0.0, 0
    model = trainer.model.eval()
    with torch.no_grad():
        for number in range(count):
            start = int((number + 0.5) / count * every) * length  # the middle of each part of the held-out text
            logits = model.logits_of(model.hidden_states(Batch(tokens=ids[start : start + length].unsqueeze(0)))[0])
            targets = ids[start + 1 : start + length + 1]
            bits -= logits.double().log_softmax(1).gather(1, targets.unsqueeze(1)).sum().item() / math.log(2)
            num_bytes += len(tokenizer.decode(targets.tolist()).encode())
    return bits / num_bytes, num_bytes


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", ["layout.data=2", "layout.tensor=2", "layout.tensor=1"])
def test_validation_has_the_bits_per_byte_of_what_is_scored_on_every_layout(ranks, run_with, layout):
    options = ("training.precision=float64", "training.micro_batch_size=2", *ONE_STEP)
    expected, num_bytes = ranks.run(1, bits_by_hand, run_with(*options))[0]
    run = run_with(*options, layout)
    ranks.run(run.layout.world_size, loop, run)
    first = next(row for row in rows_of(run) if "validation_loss" in row)
    assert first["validation_bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    assert first["validation_loss"] * 8 * 32 / math.log(2) / num_bytes == pytest.approx(expected, rel=1e-12)


def test_tensorboard_holds_the_same_loss(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = finished
    events = EventAccumulator(str(Path(run.output.folder) / "tensorboard"))
    events.Reload()
    noted = [row["loss"] for row in rows_of(run) if "loss" in row]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(noted)
    bits = [row["validation_bits_per_byte"] for row in rows_of(run) if "validation_bits_per_byte" in row]
    assert [event.value for event in events.Scalars("validation_bits_per_byte")] == pytest.approx(bits)


def test_resumed_run_is_the_run_that_never_stopped_and_notes_nothing_twice(ranks, finished):
    run, whole = finished
    resumed = ranks.run(1, loop, run, checkpoint_of(run, 3))[0]
    for name, weight in whole["weights"].items():
        assert torch.equal(weight, resumed["weights"][name]), name
    assert [row["step"] for row in rows_of(run) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows_of(run) if "validation_loss" in row] == [0, 3, 6]


def settings_after_resuming(run, checkpoint: Path) -> list[tuple]:
    trainer, batches = parts(run)
    Loop(trainer, batches).checkpoints.load(checkpoint)
    return [(g["weight_decay"], g["betas"], g["eps"]) for g in trainer.optimizer.param_groups]


def test_optimizer_settings_of_the_run_hold_after_resuming(ranks, run_with, finished):
    run, _ = finished
    other = run_with("optimizer.weight_decay=0.5", "optimizer.beta2=0.5", "optimizer.epsilon=1e-3")
    settings = ranks.run(1, settings_after_resuming, other, checkpoint_of(run, 3))[0]
    assert settings == [(0.5, (0.9, 0.5), 1e-3), (0.0, (0.9, 0.5), 1e-3)]


def test_only_the_newest_checkpoints_are_kept(ranks, run_with):
    run = run_with("training.steps=3", "checkpoint.every=1", "checkpoint.keep=2", "training.validate_every=0")
    ranks.run(1, loop, run)
    assert [row["step"] for row in rows_of(run) if "validation_loss" in row] == [0, 3]
    folder = Path(run.output.folder) / "checkpoints"
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000002", "step-00000003"]
    assert len(list(folder.glob("step-*"))) == 2


def failure_of(run, resume_from: Path) -> str:
    return error_of(*parts(run), resume_from)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", ["layout.data=2", "layout.tensor=2", "layout.tensor=1"])
def test_validation_loss_that_is_no_number_ends_the_run_on_all_ranks(ranks, run_with, layout):
    """The step's own loss is finite, since it is of the weights before the step; the weights after it are not saved."""
    run = run_with(layout, *ONE_STEP)
    ranks.run(run.layout.world_size, loop, run)
    options = (layout, "training.steps=3", "training.validate_every=2", "checkpoint.every=2")
    diverging = run_with(*options, "optimizer.learning_rate=2e9")
    told = ranks.run(run.layout.world_size, failure_of, diverging, checkpoint_of(run, 1))
    assert len(set(told)) == 1
    assert told[0].startswith("The validation loss must be finite, but after step 2 it is nan. ")
    assert "Lower `optimizer.learning_rate` and run again with --resume auto, or" in told[0]
    assert [path.name for path in list_checkpoints(checkpoint_of(run, 1).parent)] == ["step-00000001"]
    assert rows_of(run)[-1] == {
        "step": 2,
        **dict.fromkeys(("validation_loss", "validation_perplexity", "validation_bits_per_byte")),
    }


def failing_at(run, at: int) -> dict:
    """Train while the gradient of one step is no number on the last rank; what is said and what is left."""
    trainer, batches = parts(run)
    step, mesh = trainer.step, trainer.mesh
    launched: list[int] = []
    states: dict[int, list] = {}

    def state() -> list:
        moments = [trainer.optimizer.state[p] for p in trainer.parameters]
        values = [*trainer.parameters, *(v for state in moments for v in state.values())]
        return [(v.to_local() if hasattr(v, "to_local") else v).detach().clone() for v in values]

    def poison(_, __, output) -> None:
        is_last = (mesh.data.rank, mesh.tensor.rank) == (mesh.data.size - 1, mesh.tensor.size - 1)
        if is_last and launched and launched[-1] == at and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))

    trainer.model.blocks[1].mlp.expand.register_forward_hook(poison)

    def noted_step(number: int, micro_batches):
        launched.append(number)
        states[number] = state()
        return step(number, micro_batches)

    trainer.step = noted_step
    told = error_of(trainer, batches)
    return {"told": told, "launched": launched, "unchanged": are_equal(states[at], state())}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "layout",
    [("layout.data=2", 'layout.sharding="zero3"'), ("layout.tensor=2",), ("layout.data=2",)],
    ids=["zero3", "tensor 2", "data 2"],
)
def test_nothing_is_made_of_a_step_that_failed_nor_of_later_ones(ranks, run_with, layout):
    """A step is launched before the one before is known to have failed: it must leave everything as it was."""
    run = run_with(*layout, "training.steps=9", "checkpoint.every=2", "checkpoint.keep=9", "training.validate_every=2")
    results = ranks.run(run.layout.world_size, failing_at, run, 4)
    for result in results:
        assert result["launched"] == [0, 1, 2, 3, 4, 5], "one step further, as a GPU would need it"
        assert result["unchanged"]
        assert "finite, but at step 5 they were not. The same step, repeated, is finite" in result["told"]
    assert len({result["told"] for result in results}) == 1
    assert [path.name for path in list_checkpoints(checkpoint_of(run, 1).parent)] == ["step-00000002", "step-00000004"]
    rows = rows_of(run)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 2, 4]


def test_checkpoint_waits_for_the_step_to_be_known_good(ranks, run_with):
    run = run_with("training.steps=9", "checkpoint.every=5", "training.validate_every=0")
    result = ranks.run(1, failing_at, run, 4)[0]
    assert result["launched"] == [0, 1, 2, 3, 4]
    assert result["unchanged"]
    assert list_checkpoints(checkpoint_of(run, 1).parent) == []


def test_metrics_tell_of_the_loss_scale_where_there_is_one(ranks, run_with):
    half = run_with("training.steps=3", "training.precision=float16", "training.validate_every=0")
    ranks.run(1, loop, half)
    told = [(row["loss_scale"], row["skipped"]) for row in rows_of(half) if "loss" in row]
    assert told == [(65536.0, 0)] * 3


DRIFTING = ("training.steps=4", "training.validate_every=0", "checkpoint.every=0", "training.compare_replicas_every=2")


def flipped_bit(run, name: str, after_step: int, bit: int = 0) -> str:
    """Train while one bit of a parameter flips on rank 1 after a step; what the run says."""
    trainer, batches = parts(run)
    step = trainer.step

    def faulty_step(number: int, micro_batches):
        result = step(number, micro_batches)
        if number + 1 == after_step and 1 in (trainer.mesh.data.rank, trainer.mesh.tensor.rank):
            dict(trainer.model.named_parameters())[name].data.to_local().view(torch.int32).view(-1)[5] ^= 1 << bit
        return result

    trainer.step = faulty_step
    return error_of(trainer, batches)


@pytest.mark.parametrize(
    ("layout", "name"),
    [("layout.data=2", "blocks.1.mlp.expand.weight"), ("layout.tensor=2", "blocks.0.mlp.contract.bias")],
)
def test_replica_that_drifts_stops_the_run_by_name_on_all_ranks(ranks, run_with, layout, name):
    run = run_with(layout, *DRIFTING)
    told = ranks.run(2, flipped_bit, run, name, 4)
    assert told[0] == told[1]
    assert told[0].startswith(f"`{name}` must have identical values in all its replicas, but after step 4 it ")
    assert " it differs between ranks 0, 1, by up to " in told[0]
    assert " of its largest element. These weights are not saved" in told[0]
    assert told[0].endswith("run again with --resume auto.")
    assert not list_checkpoints(checkpoint_of(run, 1).parent)


def test_drift_between_tensor_ranks_that_has_spread_is_counted(ranks, run_with):
    run = run_with("layout.tensor=2", *DRIFTING)
    told = ranks.run(2, flipped_bit, run, "blocks.0.mlp.contract.bias", 3, 22)[0]
    assert re.search(r" its largest element \(other parameters that differ: \d+\)\. These weights are not saved", told)


def test_checkpoint_is_not_written_of_replicas_that_differ(ranks, run_with):
    run = run_with("layout.data=2", "checkpoint.every=3", "training.validate_every=0")
    assert "but after step 6 " in ranks.run(2, flipped_bit, run, "tokens.weight", 5)[0]
    assert [path.name for path in list_checkpoints(checkpoint_of(run, 1).parent)] == ["step-00000003"]


def test_replicas_are_not_compared_when_that_is_off(ranks, run_with):
    run = run_with("layout.data=2", *DRIFTING, "training.compare_replicas_every=0")
    assert ranks.run(2, flipped_bit, run, "tokens.weight", 1) == ["", ""]


def test_one_rank_of_four_is_named(ranks, run_with):
    run = run_with("layout.tensor=2", "layout.data=2", *DRIFTING, "training.compare_replicas_every=1")
    told = ranks.run(4, flipped_bit_on_one, run, 2)
    assert all("`final_norm.bias` must have identical values" in text for text in told)
    assert all("after step 1 it differs from the majority (ranks: 2), by up to " in text for text in told)


def flipped_bit_on_one(run, rank: int) -> str:
    trainer, batches = parts(run)
    if trainer.mesh.data.rank * 2 + trainer.mesh.tensor.rank == rank:
        dict(trainer.model.named_parameters())["final_norm.bias"].data.to_local()[0] = 0.5
    return error_of(trainer, batches)


def train_on_a_disk_that_fails(run, failing: list[int], asked_at: int) -> tuple[str, bool]:
    """The steps whose checkpoints cannot be written, and the one at which the run is asked to stop: what it says."""
    trainer, batches = parts(run)
    step, begin = trainer.step, LocalFolder.begin

    def asked_step(number: int, micro_batches):
        if number + 1 == asked_at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # a thread takes it
        return step(number, micro_batches)

    def begin_or_not(folder: LocalFolder, last: str) -> None:
        if any(f"step-{number:08d}" in folder.name for number in failing):
            raise OSError("the disk is full")
        begin(folder, last)

    trainer.step = asked_step
    with handlers_kept(*REQUESTS), pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFolder, "begin", begin_or_not)
        try:
            return "", Loop(trainer, batches).train().stopped
        except CheckpointError as error:
            return str(error), False


@pytest.mark.parametrize(
    ("asked_at", "failing", "left"),
    [(0, [3], [6]), (5, [3], [5]), (0, [3, 6], []), (5, [3, 5], []), (0, [2], [])],
    ids=["last step", "stopped", "last step fails", "stopped, fails", "neither"],
)
def test_last_checkpoint_is_tried_whatever_became_of_the_one_before(ranks, run_with, asked_at, failing, left):
    run = run_with("training.steps=6", f"checkpoint.every={failing[0]}", "training.validate_every=0")
    told, stopped = ranks.run(1, train_on_a_disk_that_fails, run, failing, asked_at)[0]
    assert [path.name for path in list_checkpoints(checkpoint_of(run, 1).parent)] == [f"step-{n:08d}" for n in left]
    assert stopped == (bool(asked_at) and bool(left))
    if left:
        assert told == ""
    else:
        assert f"step-{failing[-1]:08d}` must be writable, but is not: the disk is full. Any earlier" in told
