"""A pipeline trains the model that one rank trains: losses, norms and every gradient, in float64."""

import pytest
import torch

from tests.training.pipeline.jobs import EXACT, LLAMA, course

MODELS = {
    "gpt2-tied": (),
    "gpt2-untied": ("model.tied=false",),
    "llama-tied": LLAMA,
    "llama-untied": (*LLAMA, "model.tied=false"),
}
LAYOUTS = [
    "pipeline=2 data=2 sharding=zero3 schedule=zero_bubble",
    "pipeline=2",
    "pipeline=2 stages_per_rank=2",
    "pipeline=2 schedule=zero_bubble",
    "pipeline=4",
    "pipeline=4 schedule=zero_bubble",
    "pipeline=2 stages=[3,1]",
    "pipeline=2 tensor=2",
    "pipeline=2 tensor=2 sequence_parallel=true stages_per_rank=2",
    "pipeline=2 tensor=2 sequence_parallel=true schedule=zero_bubble",
    "pipeline=2 data=2",
    "pipeline=2 data=2 schedule=zero_bubble",
    "pipeline=2 data=2 sharding=zero2",
    "pipeline=2 data=2 sharding=zero3 stages_per_rank=2",
]
SCHEDULES = ("pipeline=2 schedule=zero_bubble", "pipeline=2 stages_per_rank=2")


FOUR = (*EXACT, "training.micro_batch_size=2")
"""Four micro-batches."""


def layout_of(text: str) -> list[str]:
    return [f"layout.{setting}" for setting in text.split()]


def assert_equal(found, expected, rel=1e-10):
    names = set()
    for of_rank in found:
        assert of_rank["losses"] == pytest.approx(expected["losses"], rel=rel)
        assert of_rank["norms"] == pytest.approx(expected["norms"], rel=rel)
        for name, gradient in of_rank["gradients"].items():
            names.add(name)
            whole = expected["gradients"][name]
            torch.testing.assert_close(gradient, whole, rtol=0.0, atol=rel * whole.abs().max().item())
    assert names == set(expected["gradients"])


@pytest.mark.one_in(56)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_pipeline_trains_as_one_rank(ranks, run_with, once, layout, model):
    settings = (*FOUR, *MODELS[model], "model.dropout=0.0", "training.steps=3")
    expected = once(model, lambda: ranks.run(1, course, run_with(*settings), 3)[0])
    run = run_with(*settings, *layout_of(layout))
    assert_equal(ranks.run(run.layout.world_size, course, run, 3), expected)


@pytest.mark.slow  # those that recompute drop out, too
@pytest.mark.parametrize("more", ["", "tensor=2", "data=2"])
def test_dropout_does_not_depend_on_the_schedule(ranks, run_with, more):
    settings = (*FOUR, "model.dropout=0.1", *layout_of(more))
    run = run_with(*settings)
    expected = ranks.run(run.layout.world_size, course, run, 2)[0]
    for stages in SCHEDULES:
        run = run_with(*settings, *layout_of(stages))
        assert_equal(ranks.run(run.layout.world_size, course, run, 2), expected)


RECOMPUTED = [
    ("training.recompute=full", "training.offload=activations"),
    ("training.recompute=full",),
    ("training.recompute=operators",),
    ("training.recompute=selective",),
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("options", RECOMPUTED, ids=" ".join)
@pytest.mark.parametrize("layout", SCHEDULES)
def test_recomputation_and_offload_work_inside_stages(ranks, run_with, layout, options):
    settings = (*FOUR, "model.dropout=0.1", *options)
    expected = ranks.run(1, course, run_with(*settings), 2)[0]
    assert_equal(ranks.run(2, course, run_with(*settings, *layout_of(layout)), 2), expected)


OTHERS = {
    "z-loss, documents": ("training.z_loss=1e-3", "training.document_mask=true"),
    "muon": ("optimizer.matrices=muon", "optimizer.matrix_learning_rate=0.02"),
    "average": ("optimizer.ema_decay=0.9",),
    "lora": ("model.lora_rank=4",),
    "mixed-mlps": ('model.layers=["attention gelu", "attention swiglu"]',),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_other_options_work_with_stages(ranks, run_with, options):
    settings = (*FOUR, "model.dropout=0.1", *options)
    expected = ranks.run(1, course, run_with(*settings), 2)[0]
    rel = 1e-7 if "optimizer.matrices=muon" in options else 1e-10  # Muon enlarges rounding, by up to 485 in each step
    assert_equal(ranks.run(2, course, run_with(*settings, "layout.pipeline=2"), 2), expected, rel=rel)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("number", [2, 1, 3])
@pytest.mark.parametrize("schedule", ["zero_bubble", "1f1b"])
def test_fewer_micro_batches_than_ranks_give_the_same_numbers(ranks, run_with, number, schedule):
    settings = (*EXACT, "model.dropout=0.0", f"training.batch_size={2 * number}", "training.micro_batch_size=2")
    expected = ranks.run(1, course, run_with(*settings), 2)[0]
    run = run_with(*settings, "layout.pipeline=4", f"layout.schedule={schedule}")
    assert_equal(ranks.run(4, course, run, 2), expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("precision", "rel"), [("float16", 1e-3), ("float32", 1e-5)])
def test_losses_in_a_narrow_type_are_near_one_rank(ranks, run_with, precision, rel):
    """In float16, all stages share one loss scale."""
    settings = (*FOUR, f"training.precision={precision}", "model.dropout=0.0")
    expected = ranks.run(1, course, run_with(*settings), 2)[0]
    for found in ranks.run(2, course, run_with(*settings, "layout.pipeline=2"), 2):
        assert found["losses"] == pytest.approx(expected["losses"], rel=rel)
