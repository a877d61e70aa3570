import json
from pathlib import Path

import pytest
import torch

from crosscut.checkpoint import list_checkpoints
from crosscut.training.loop import Loop
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


def test_tensorboard_holds_the_same_loss(ranks, run_with):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_with("training.steps=3")
    ranks.run(1, loop, run)
    events = EventAccumulator(str(Path(run.output.folder) / "tensorboard"))
    events.Reload()
    noted = [row["loss"] for row in rows_of(run) if "loss" in row]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(noted)


def test_resumed_run_is_the_run_that_never_stopped(ranks, run_with):
    run = run_with("checkpoint.keep=5")
    whole = ranks.run(2, loop, run_with("checkpoint.keep=5", "layout.tensor=2"))[0]
    resumed = ranks.run(2, loop, run_with("layout.tensor=2"), checkpoint_of(run, 3))[0]
    for name, weight in whole["weights"].items():
        assert torch.equal(weight, resumed["weights"][name]), name
    assert [row["step"] for row in rows_of(run) if "loss" in row] == [1, 2, 3, 4, 5, 6]


def settings_after_resuming(run, checkpoint: Path) -> list[tuple]:
    trainer, batches = parts(run)
    Loop(run, trainer, batches).load(checkpoint)
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
}


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_run_resumes_on_another_layout(ranks, run_with, options):
    """The vocabulary of 500 is padded to 512 or 1,024 entries, as the tensor size has it."""
    base = ("model.dropout=0.0", "training.precision=float64", "checkpoint.keep=5")
    run = run_with(*base)
    whole = ranks.run(1, loop, run)[0]
    other = run_with(*base, *options)
    resumed = ranks.run(other.layout.world_size, loop, other, checkpoint_of(run, 3))[0]
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(weight, resumed["weights"][name], rtol=1e-9, atol=1e-12, msg=name)


def test_only_the_newest_checkpoints_are_kept(ranks, run_with):
    run = run_with("checkpoint.every=1", "checkpoint.keep=2")
    ranks.run(1, loop, run)
    folder = Path(run.output.folder) / "checkpoints"
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000005", "step-00000006"]
    assert len(list(folder.iterdir())) == 2
