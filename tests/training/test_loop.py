import json
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
from crosscut.config import CheckpointError, TrainingError
from crosscut.training.loop import Loop
from crosscut.training.watching.run_report import plot_losses
from tests.training.conftest import tiny_run
from tests.training.jobs import loop, parts


def rows_of(run) -> list[dict]:
    return [json.loads(line) for line in (Path(run.output.folder) / "metrics.jsonl").read_text().splitlines()]


def checkpoint_of(run, step: int) -> Path:
    return Path(run.output.folder) / "checkpoints" / f"step-{step:08d}"


def test_loss_falls_and_every_step_is_noted(ranks, run_with):
    run = run_with("training.steps=12")
    outcome = ranks.run(1, loop, run)[0]
    assert outcome["after"] < outcome["before"] - 0.05
    rows = rows_of(run)
    trained = [row for row in rows if "loss" in row]
    assert [row["step"] for row in trained] == list(range(1, 13))
    assert set(trained[0]) >= {
        "loss", "gradient_norm", "learning_rate", "seconds", "tokens_per_second", "model_flops_per_second",
        "utilisation", "samples",
    }  # fmt: skip
    assert trained[-1]["samples"] == 48
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 3, 6, 9, 12]


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
            logits = model.logits_of(model.hidden_states(ids[start : start + length].unsqueeze(0))[0])
            targets = ids[start + 1 : start + length + 1]
            bits -= logits.double().log_softmax(1).gather(1, targets.unsqueeze(1)).sum().item() / math.log(2)
            num_bytes += len(tokenizer.decode(targets.tolist()).encode())
    return bits / num_bytes, num_bytes


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["layout.tensor=1", "layout.tensor=2", "layout.data=2"])
def test_validation_has_the_bits_per_byte_of_what_is_scored_on_every_layout(ranks, run_with, layout):
    options = ("training.precision=float64", "training.steps=3", "training.micro_batch_size=2")
    expected, num_bytes = ranks.run(1, bits_by_hand, run_with(*options))[0]
    run = run_with(*options, layout)
    ranks.run(run.layout.world_size, loop, run)
    first = next(row for row in rows_of(run) if "validation_loss" in row)
    assert first["validation_bits_per_byte"] == pytest.approx(expected, rel=1e-12)
    assert first["validation_loss"] * 8 * 32 / math.log(2) / num_bytes == pytest.approx(expected, rel=1e-12)


def test_a_run_from_before_the_bits_per_byte_resumes(ranks, run_with):
    run = run_with("training.steps=3")
    ranks.run(1, loop, run)
    rows = [{name: v for name, v in row.items() if name != "validation_bits_per_byte"} for row in rows_of(run)]
    (Path(run.output.folder) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_losses(Path(run.output.folder))
    ranks.run(1, loop, run_with(), checkpoint_of(run, 3))
    validated = [row for row in rows_of(run) if "validation_loss" in row]
    assert [(row["step"], "validation_bits_per_byte" in row) for row in validated] == [
        (0, False),
        (3, False),
        (6, True),
    ]
    plot_losses(Path(run.output.folder))


def test_tensorboard_holds_the_same_loss(ranks, run_with):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_with("training.steps=3")
    ranks.run(1, loop, run)
    events = EventAccumulator(str(Path(run.output.folder) / "tensorboard"))
    events.Reload()
    noted = [row["loss"] for row in rows_of(run) if "loss" in row]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(noted)
    bits = [row["validation_bits_per_byte"] for row in rows_of(run) if "validation_bits_per_byte" in row]
    assert [event.value for event in events.Scalars("validation_bits_per_byte")] == pytest.approx(bits)


def test_resumed_run_is_the_run_that_never_stopped(ranks, run_with):
    run = run_with("checkpoint.keep=5")
    whole = ranks.run(1, loop, run)[0]
    resumed = ranks.run(1, loop, run_with(), checkpoint_of(run, 3))[0]
    for name, weight in whole["weights"].items():
        assert torch.equal(weight, resumed["weights"][name]), name
    assert [row["step"] for row in rows_of(run) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def settings_after_resuming(run, checkpoint: Path) -> list[tuple]:
    trainer, batches = parts(run)
    Loop(trainer, batches).load(checkpoint)
    return [(g["weight_decay"], g["betas"], g["eps"]) for g in trainer.optimizer.param_groups]


def test_optimizer_settings_of_the_run_hold_after_resuming(ranks, run_with):
    run = run_with()
    ranks.run(1, loop, run)
    other = run_with("optimizer.weight_decay=0.5", "optimizer.beta2=0.5", "optimizer.epsilon=1e-3")
    settings = ranks.run(1, settings_after_resuming, other, checkpoint_of(run, 3))[0]
    assert settings == [(0.5, (0.9, 0.5), 1e-3), (0.0, (0.9, 0.5), 1e-3)]


LAYOUTS = {
    "tensor=2": ("layout.tensor=2",),
    "tensor=4 sequence parallel": ("layout.tensor=4", "layout.sequence_parallel=true"),
    "data=2": ("layout.data=2",),
    "tensor=2 data=2": ("layout.tensor=2", "layout.data=2"),
    "tensor=2 data=2 zero3": ("layout.tensor=2", "layout.data=2", "layout.sharding=zero3"),
    "data=4 zero2 in groups of 2": ("layout.data=4", "layout.sharding=zero2", "layout.shard_group=2"),
}
AS_IN_TEST_RESUME = ("tensor=4 sequence parallel", "data=2", "tensor=2 data=2")
"""Layouts like those that runs go on with in `test_resume.py`, where every step is compared."""
EXACT = ("model.dropout=0.0", "training.precision=float64", "checkpoint.keep=5")


@pytest.fixture(scope="module")
def whole(ranks, tokens_folder, tmp_path_factory) -> tuple[Path, dict]:
    """A run of one rank to go on from: its checkpoint after step 3, and how it ends."""
    run = tiny_run(tokens_folder, tmp_path_factory.mktemp("whole"), *EXACT)
    outcome = ranks.run(1, loop, run)[0]
    return checkpoint_of(run, 3), outcome


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [pytest.param(LAYOUTS[name], marks=pytest.mark.slow if name in AS_IN_TEST_RESUME else ()) for name in LAYOUTS],
    ids=LAYOUTS,
)
def test_run_resumes_on_another_layout(ranks, run_with, whole, options):
    """The vocabulary of 500 is padded to 512 or 1,024 entries, as the tensor size has it."""
    checkpoint, outcome = whole
    other = run_with(*EXACT, *options)
    resumed = ranks.run(other.layout.world_size, loop, other, checkpoint)[0]
    for name, weight in outcome["weights"].items():
        torch.testing.assert_close(weight, resumed["weights"][name], rtol=1e-9, atol=1e-12, msg=name)


def test_only_the_newest_checkpoints_are_kept(ranks, run_with):
    run = run_with("checkpoint.every=1", "checkpoint.keep=2")
    ranks.run(1, loop, run)
    folder = Path(run.output.folder) / "checkpoints"
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000005", "step-00000006"]
    assert len(list(folder.glob("step-*"))) == 2


def failure_of(run, resume_from: Path | None = None) -> str:
    try:
        loop(run, resume_from)
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["layout.tensor=1", "layout.tensor=2", "layout.data=2"])
def test_validation_loss_that_is_no_number_ends_the_run_on_all_ranks(ranks, run_with, layout):
    """The step's own loss is finite, since it is of the weights before the step; the weights after it are not saved."""
    options = (layout, "training.steps=3", "training.validate_every=2", "checkpoint.every=2")
    run = run_with(*options, "checkpoint.every=1", "checkpoint.keep=3")
    ranks.run(run.layout.world_size, loop, run)
    for step in (2, 3):
        shutil.rmtree(checkpoint_of(run, step))
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


def test_resuming_notes_no_validation_twice(ranks, run_with):
    run = run_with()
    ranks.run(1, loop, run)
    ranks.run(1, loop, run, checkpoint_of(run, 3))
    assert [row["step"] for row in rows_of(run) if "validation_loss" in row] == [0, 3, 6]
    ranks.run(1, loop, run_with("training.validate_every=0"), checkpoint_of(run, 3))
    assert [row["step"] for row in rows_of(run) if "validation_loss" in row] == [0, 3, 6]


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
    Path(run.output.folder).mkdir(parents=True, exist_ok=True)
    told = ""
    loop = Loop(trainer, batches)
    try:
        with loop.saver:
            loop.train()
    except TrainingError as error:
        told = str(error)
    same = all(torch.equal(a, b) for a, b in zip(states[at], state(), strict=True))
    return {"told": told, "launched": launched, "unchanged": same}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "layout",
    [(), ("layout.tensor=2",), ("layout.data=2",), ("layout.data=2", 'layout.sharding="zero3"')],
    ids=["one rank", "tensor 2", "data 2", "zero3"],
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


def test_metrics_tell_of_the_loss_scale_only_where_there_is_one(ranks, run_with):
    ranks.run(1, loop, run_with("training.steps=3"))
    assert not any("loss_scale" in row or "skipped" in row for row in rows_of(run_with()))
    half = run_with("training.steps=3", "training.precision=float16", f"output.folder={run_with().output.folder}-half")
    ranks.run(1, loop, half)
    told = [(row["loss_scale"], row["skipped"]) for row in rows_of(half) if "loss" in row]
    assert told == [(65536.0, 0)] * 3


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
    Path(run.output.folder).mkdir(parents=True, exist_ok=True)
    loop = Loop(trainer, batches)
    try:
        with loop.saver:  # what was begun to be written is finished
            loop.train()
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "name"),
    [("layout.data=2", "blocks.1.mlp.expand.weight"), ("layout.tensor=2", "blocks.0.mlp.contract.bias")],
)
def test_replica_that_drifts_stops_the_run_by_name_on_all_ranks(ranks, run_with, layout, name):
    run = run_with(layout, "checkpoint.every=0", "training.compare_replicas_every=2")
    told = ranks.run(2, flipped_bit, run, name, 4)
    assert told[0] == told[1]
    assert told[0].startswith(f"`{name}` must have identical values in all its replicas, but after step 4 it ")
    assert " it differs between ranks 0, 1, by up to " in told[0]
    assert " of its largest element. These weights are not saved" in told[0]
    assert told[0].endswith("run again with --resume auto.")
    assert not list_checkpoints(checkpoint_of(run, 1).parent)


def test_drift_between_tensor_ranks_that_has_spread_is_counted(ranks, run_with):
    run = run_with("layout.tensor=2", "checkpoint.every=0", "training.compare_replicas_every=2")
    told = ranks.run(2, flipped_bit, run, "blocks.0.mlp.contract.bias", 3, 22)[0]
    assert re.search(r" its largest element \(other parameters that differ: \d+\)\. These weights are not saved", told)


def test_checkpoint_is_not_written_of_replicas_that_differ(ranks, run_with):
    run = run_with("layout.data=2", "checkpoint.every=3")
    assert "but after step 6 " in ranks.run(2, flipped_bit, run, "tokens.weight", 5)[0]
    assert [path.name for path in list_checkpoints(checkpoint_of(run, 1).parent)] == ["step-00000003"]


def test_replicas_are_not_compared_when_that_is_off(ranks, run_with):
    run = run_with("layout.data=2", "training.compare_replicas_every=0", "training.steps=3")
    assert ranks.run(2, flipped_bit, run, "tokens.weight", 1) == ["", ""]


def test_one_rank_of_four_is_named(ranks, run_with):
    run = run_with("layout.tensor=2", "layout.data=2", "training.compare_replicas_every=1")
    told = ranks.run(4, flipped_bit_on_one, run, 2)
    assert all("`final_norm.bias` must have identical values" in text for text in told)
    assert all("after step 1 it differs from the majority (ranks: 2), by up to " in text for text in told)


def flipped_bit_on_one(run, rank: int) -> str:
    trainer, batches = parts(run)
    if trainer.mesh.data.rank * 2 + trainer.mesh.tensor.rank == rank:
        dict(trainer.model.named_parameters())["final_norm.bias"].data.to_local()[0] = 0.5
    Path(run.output.folder).mkdir(parents=True, exist_ok=True)
    try:
        Loop(trainer, batches).train()
    except TrainingError as error:
        return str(error)
    return ""


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
    Path(run.output.folder).mkdir(parents=True, exist_ok=True)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalFolder, "begin", begin_or_not)
            return "", Loop(trainer, batches).train().stopped
    except CheckpointError as error:
        return str(error), False
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


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
