"""The whole training of a run: its tokens, its FLOPs and its checkpoints."""

from pathlib import Path

import pytest

from crosscut.config import load_run
from crosscut.planner.course import checkpoint_bytes, training_flops, training_tokens
from crosscut.planner.paper.runs import paper_run
from crosscut.training import run_training
from tests.cli.conftest import TINY


def test_the_papers_largest_model_takes_eleven_zettaflops_with_recomputation() -> None:
    """The introduction's 12 zettaFLOPs are those of 9.2 days at 15.1 PFLOP/s."""
    run = paper_run("megatron-8.3b-24-heads", 8, 64)
    assert training_tokens(run) == 300_000 * 512 * 1024
    assert 4 / 3 * training_flops(run, training_tokens(run)) == pytest.approx(11e21, rel=0.02)


def test_a_batch_that_grows_has_fewer_tokens() -> None:
    whole = load_run({}, [*TINY, "model.vocab_size=300"])
    grows = load_run({}, [*TINY, "model.vocab_size=300", "training.initial_batch_size=2", "training.ramp_steps=2"])
    assert training_tokens(whole) == 4 * 4 * 32
    assert training_tokens(grows) == grows.training.samples_before(4) * 32 < training_tokens(whole)
    assert training_flops(grows, 320) == training_flops(whole, 320) == 2 * training_flops(whole, 160)


@pytest.mark.parametrize("setting", ["optimizer.ema_decay=0.9", "training.precision=bfloat16", "recipe=modern"])
def test_a_checkpoint_has_the_forecast_bytes(setting: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Every line of this file is text.\n" * 3000, encoding="utf-8")
    settings = [f"data.text={tmp_path / 'book.txt'}", f"output.folder={tmp_path / 'run'}", "model.hidden_size=128"]
    run_training(load_run({}, [*TINY, *settings, "checkpoint.every=0", setting]))
    run = load_run(tmp_path / "run" / "config.toml")
    (newest,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert sum(file.stat().st_size for file in newest.iterdir()) == pytest.approx(checkpoint_bytes(run), rel=0.02)
