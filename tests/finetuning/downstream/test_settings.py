"""Settings of a fine-tuning, from defaults, files and overrides."""

from pathlib import Path

import pytest

from crosscut.config import ModelConfig, load_run
from crosscut.finetuning.downstream.settings import TaskOrder, settings_of
from crosscut.finetuning.downstream.task import TASKS, TunedTask

EXAMPLES = Path(__file__).parents[3] / "examples" / "finetuning"
MODEL = ModelConfig(
    num_layers=1, hidden_size=8, num_heads=1, vocab_size=100, max_sequence_length=512, attention="bidirectional",
)  # fmt: skip

PAPER = {
    "mnli": (("mnli", 128, 1e-5),) * 3 + (10,),
    "qqp": (("qqp-336m", 128, 5e-5), ("qqp-1.3b", 128, 3e-5), ("qqp-3.9b", 256, 4e-5), 12),
    "squad-1.1": (("squad-1.1-336m", 64, 3e-5), ("squad-1.1-1.3b", 48, 3e-5), ("squad-1.1-3.9b", 48, 1e-5), 2),
    "squad-2.0": (("squad-2.0-336m", 48, 3e-5), ("squad-2.0-1.3b", 64, 3e-5), ("squad-2.0-3.9b", 48, 1e-5), 2),
    "race": (("race-336m", 32, 2e-5), ("race-1.3b", 16, 1e-5), ("race-3.9b", 32, 2e-5), 3),
}
"""Files of the paper's settings: name, batch and learning rate for each size, and the epochs."""


def settings(name: str = "sst-2", *, steps_per_epoch: int = 100, **order: object):
    task = TunedTask(name=name, labels=("0", "1"))
    model = MODEL.with_head(task.head, num_classes=task.num_classes)
    return settings_of(TaskOrder(task=task, output="runs/x", **order), model, steps_per_epoch)


@pytest.mark.parametrize("task", PAPER)
def test_the_papers_settings_are_files(task):
    *sizes, epochs = PAPER[task]
    for name, batch, rate in sizes:
        run = settings(task.partition("-")[0], settings=str(EXAMPLES / f"{name}.toml"))
        assert (run.training.batch_size, run.optimizer.learning_rate) == (batch, rate), name
        assert run.training.steps == 100 * epochs
    named = {name for *sizes, _ in PAPER.values() for name, *_ in sizes}
    assert {path.stem for path in EXAMPLES.iterdir()} == named


def test_the_defaults_are_those_of_usual_recipes():
    run = settings()
    training, optimizer = run.training, run.optimizer
    assert (training.batch_size, training.sequence_length, training.steps, training.validate_every) == (
        32,
        128,
        300,
        100,
    )
    assert (run.checkpoint.every, run.checkpoint.keep) == (100, 1)
    assert (optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_steps) == (2e-5, 0.0, 18)
    assert (optimizer.schedule, optimizer.weight_decay, optimizer.clip_norm) == ("linear", 0.01, 1.0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.999, 1e-8)
    assert {name: settings(name).training.sequence_length for name in TASKS} == {
        **dict.fromkeys(TASKS, 128), "squad": 384, "race": 512,
    }  # fmt: skip


def test_options_replace_the_file_and_overrides_replace_both(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text("[finetuning]\nepochs = 2\nwarmup = 0.5\n[optimizer]\nlearning_rate = 1e-3\n")
    run = settings(settings=str(path))
    assert (run.training.steps, run.optimizer.warmup_steps, run.optimizer.learning_rate) == (200, 100, 1e-3)
    run = settings(settings=str(path), epochs=0.5, overrides=("optimizer.learning_rate=1e-4", "model.dropout=0.3"))
    assert (run.training.steps, run.optimizer.warmup_steps, run.optimizer.learning_rate) == (50, 25, 1e-4)
    assert (run.training.validate_every, run.model.dropout) == (50, 0.3)
    run = settings(overrides=("training.steps=7", "training.validate_every=3"))
    assert (run.training.steps, run.training.validate_every, run.checkpoint.every) == (7, 3, 3)
    assert load_run({"model": {"num_layers": 1, "hidden_size": 8, "num_heads": 1}}).optimizer.beta2 == 0.95
