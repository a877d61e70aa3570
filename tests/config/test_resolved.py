"""Choices that a run leaves open, made for a device."""

from dataclasses import replace

import pytest

from crosscut.config import Layout, ModelConfig, ResolvedRun, RunConfig, TrainingConfig, resolve
from crosscut.config.precision import PRECISIONS

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=100, max_sequence_length=16)


def run_of(*, layout: Layout | None = None, **training: object) -> RunConfig:
    sizes = {"batch_size": 8, "sequence_length": 16, **training}
    return RunConfig(model=MODEL, layout=layout or Layout(), training=TrainingConfig(**sizes))


@pytest.mark.parametrize(("asked", "resolved"), [("auto", "float16"), ("bfloat16", "bfloat16"), ("float64", "float64")])
def test_a_precision_that_is_named_stays_and_auto_is_that_of_the_device(asked: str, resolved: str) -> None:
    run = resolve(run_of(precision=asked), device="cuda", precision="float16")
    assert (run.device, run.precision, run.config.training.precision) == ("cuda", resolved, resolved)
    assert run.training.numbers == PRECISIONS[resolved]


def test_a_resolved_run_records_the_device_as_it_was_asked_for() -> None:
    """So that its folder's config can go on on another machine."""
    assert resolve(run_of(), device="cuda", precision="bfloat16").config.training.device == "auto"


def test_sizes_are_those_of_the_run() -> None:
    asked = run_of(layout=Layout(data=2), micro_batch_size=2, precision="float32")
    run = resolve(asked, device="cpu", precision="float32")
    assert run == ResolvedRun(config=asked, device="cpu")
    assert (run.model, run.layout, run.training, run.optimizer) == (
        MODEL,
        asked.layout,
        asked.training,
        asked.optimizer,
    )
    assert (run.config.micro_batch_size, run.config.num_micro_batches) == (2, 2)


def test_another_run_is_resolved_alike() -> None:
    run = resolve(run_of(), device="cuda", precision="float16")
    other = run.with_config(replace(run_of(batch_size=4), layout=Layout(data=2)))
    assert (other.device, other.precision) == ("cuda", "float16")
    assert (other.layout, other.training.batch_size) == (Layout(data=2), 4)
