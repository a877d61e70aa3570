"""Pipelines are verified like every other layout: without a fault, nothing differs."""

import pytest

from crosscut.config import Layout
from crosscut.verification import for_verification, with_scope
from tests.verification.runs import LLAMA, MODERN, proven, tiny_run
from tests.verification.test_scope import REPORT

LAYOUTS = [
    Layout(pipeline=2, tensor=2, sequence_parallel=True, schedule="zero_bubble"),
    Layout(pipeline=2),
    Layout(pipeline=2, schedule="zero_bubble"),
    Layout(pipeline=2, stages_per_rank=2),
    Layout(pipeline=4),
    Layout(pipeline=2, tensor=2, sequence_parallel=True),
    Layout(pipeline=2, data=2),
    Layout(pipeline=2, data=2, sharding="zero3", schedule="zero_bubble"),
]
MLPS = [f"blocks.{i}.mlp" for i in range(5)]
MODELS = {"gpt2": {}, "untied": {"tied": False}, "llama": {**LLAMA, "num_kv_heads": 2}, "modern": MODERN}


def num_layers(layout: Layout) -> int:
    """The least number of layers with which stages are uneven. Several stages per rank must be even."""
    return layout.num_stages + (layout.stages_per_rank == 1)


@pytest.mark.one_in(len(LAYOUTS) * len(MODELS))
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_pipeline_is_the_uncut_model(ranks, layout, model):
    report = proven(ranks, layout, **model, num_layers=num_layers(layout))
    assert any(check.name == "collectives" and "as planned" in check.told for check in report.checks)
    assert [row.module for row in report.rows if row.module.endswith("mlp")] == MLPS[: num_layers(layout)]
    assert all(row.forward is not None or row.gradient is not None for row in report.rows)


SHARED = {"dropout": 0.0, "max_sequence_length": 32}
ON_FOUR = [
    Layout(pipeline=2, context=2, context_attention="ring", schedule="zero_bubble"),
    Layout(pipeline=2, context=2, context_attention="all_to_all", stages_per_rank=2),
    Layout(pipeline=2, context=2, context_attention="gather", sharding="zero3"),
]


@pytest.mark.slow  # four ranks; one axis each is verified by the quick tests here and in `test_context`
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("layout", ON_FOUR, ids=str)
def test_a_pipeline_over_shared_sequences_is_the_uncut_model(ranks, layout, model):
    report = proven(ranks, layout, **MODELS[model], **SHARED, num_layers=num_layers(layout))
    assert [row.module for row in report.rows if row.module.endswith("mlp")] == MLPS[: num_layers(layout)]


OPTIONS = {
    "recompute": {"training": {"recompute": "full"}},
    "documents": {"training": {"document_mask": True}},
    "average": {"optimizer": {"ema_decay": 0.9}},
    "muon": {"optimizer": {"matrices": "muon", "matrix_learning_rate": 0.02}},
}


@pytest.mark.slow  # the options are verified without stages
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", [Layout(pipeline=2), Layout(pipeline=2, schedule="zero_bubble")], ids=str)
def test_a_pipeline_is_verified_with_other_options(ranks, layout, options):
    proven(ranks, layout, **options)


@pytest.mark.slow  # tolerances do not depend on stages, and `test_run_proof` verifies bfloat16
def test_a_pipeline_is_verified_in_bfloat16(ranks):
    proven(ranks, Layout(pipeline=2), "bfloat16")


def test_the_report_says_what_the_step_had_and_had_not():
    run = tiny_run(num_layers=4)
    verified = for_verification(run, Layout(pipeline=2, stages_per_rank=2), "float64")
    assert verified.num_micro_batches == 4
    told = with_scope(REPORT, asked=run, verified=verified)
    assert "4 pipeline stages with the schedule 1f1b" in told.included
    assert not any("messages" in option for option in told.left_out)
