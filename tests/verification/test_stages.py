"""Pipelines are verified like every other layout: without a fault, nothing differs."""

import pytest

from crosscut.config import Layout
from crosscut.parallel import make_mesh
from crosscut.verification import LayoutReport, for_verification, verify_on_mesh, with_scope
from tests.verification.runs import CPU, LLAMA, MODERN, tiny_run
from tests.verification.test_scope import REPORT

LAYOUTS = [
    Layout(pipeline=2),
    Layout(pipeline=2, schedule="zero_bubble"),
    Layout(pipeline=2, stages_per_rank=2),
    Layout(pipeline=4),
    Layout(pipeline=2, tensor=2, sequence_parallel=True),
    Layout(pipeline=2, data=2),
    Layout(pipeline=2, data=2, sharding="zero3", schedule="zero_bubble"),
]
MODELS = {"gpt2": {}, "untied": {"tied": False}, "llama": {**LLAMA, "num_kv_heads": 2}, "modern": MODERN}


def verify(layout: Layout, model: dict, precision: str = "float64", **more) -> LayoutReport:
    run = for_verification(tiny_run(**{"num_layers": 4, **model, **more}), layout, precision)
    return verify_on_mesh(run, make_mesh(layout, CPU))


@pytest.mark.one_in(43)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_pipeline_is_the_uncut_model(ranks, layout, model):
    report = ranks.run(layout.world_size, verify, layout, model)[0]
    assert report.same, report.first
    assert any(check.name == "collectives" and "as planned" in check.told for check in report.checks)
    assert [row.module for row in report.rows if row.module.endswith("mlp")] == [f"blocks.{i}.mlp" for i in range(4)]
    assert all(row.forward is not None or row.gradient is not None for row in report.rows)


SHARED = {"dropout": 0.0, "max_sequence_length": 32}
ON_FOUR = [
    Layout(pipeline=2, context=2, context_attention="ring", schedule="zero_bubble"),
    Layout(pipeline=2, context=2, context_attention="all_to_all", stages_per_rank=2),
    Layout(pipeline=2, context=2, context_attention="gather", sharding="zero3"),
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("layout", ON_FOUR, ids=str)
def test_a_pipeline_over_shared_sequences_is_the_uncut_model(ranks, layout, model):
    report = ranks.run(4, verify, layout, {**MODELS[model], **SHARED})[0]
    assert report.same, report.first
    assert [row.module for row in report.rows if row.module.endswith("mlp")] == [f"blocks.{i}.mlp" for i in range(4)]


OPTIONS = {
    "recompute": {"training": {"recompute": "full"}},
    "documents": {"training": {"document_mask": True}},
    "average": {"optimizer": {"ema_decay": 0.9}},
    "muon": {"optimizer": {"matrices": "muon", "matrix_learning_rate": 0.02}},
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", [Layout(pipeline=2), Layout(pipeline=2, schedule="zero_bubble")], ids=str)
def test_a_pipeline_is_verified_with_other_options(ranks, layout, options):
    report = ranks.run(2, verify_with_options, layout, options)[0]
    assert report.same, report.first


def verify_with_options(layout: Layout, options: dict) -> LayoutReport:
    return verify(layout, {}, **options)


@pytest.mark.slow  # tolerances do not depend on stages, and `test_run_proof` verifies bfloat16
def test_a_pipeline_is_verified_in_bfloat16(ranks):
    report = ranks.run(2, verify, Layout(pipeline=2), {}, "bfloat16")[0]
    assert report.same, report.first


def test_the_report_says_what_the_step_had_and_had_not():
    run = tiny_run(num_layers=4)
    verified = for_verification(run, Layout(pipeline=2, stages_per_rank=2), "float64")
    assert verified.num_micro_batches == 4
    told = with_scope(REPORT, asked=run, verified=verified)
    assert "4 pipeline stages with the schedule 1f1b" in told.included
    assert not any("messages" in option for option in told.left_out)
