"""Stages whose sequences context ranks share: losses, norms and every gradient are those of one rank, in float64."""

from typing import Any, NamedTuple

import pytest

from tests.ranks import RankPool
from tests.training.pipeline.jobs import EXACT, LLAMA, course
from tests.training.pipeline.test_equality import FOUR, assert_equal, layout_of
from tests.training.pipeline.test_runs import validation_loss

MODELS = {
    "gpt2": (),
    "gpt2-untied": ("model.tied=false",),
    "llama": (*LLAMA, "model.tied=false"),
    "llama-tied": LLAMA,
    "llama-3-kv": (*LLAMA[:-1], "model.hidden_size=96", "model.num_heads=6", "model.num_kv_heads=3"),
}


class Case(NamedTuple):
    model: str
    layout: str
    options: tuple[str, ...] = ()


DOCUMENTS = ("training.document_mask=true",)

ON_FOUR = {
    "ring, separate weight gradients": Case(
        "llama", "pipeline=2 context=2 context_attention=ring schedule=zero_bubble"
    ),
    "all-to-all, interleaved, documents": Case(
        "gpt2", "pipeline=2 context=2 context_attention=all_to_all stages_per_rank=2", DOCUMENTS
    ),
    "gather, zero3, recomputed layers": Case(
        "gpt2-untied", "pipeline=2 context=2 context_attention=gather sharding=zero3", ("training.recompute=full",)
    ),
    "ring over documents, zero2, recomputed core": Case(
        "llama-3-kv",
        "pipeline=2 context=2 context_attention=ring sharding=zero2 schedule=zero_bubble",
        (*DOCUMENTS, "training.recompute=selective"),
    ),
    "gather, unequal stages": Case(
        "llama-3-kv", "pipeline=2 context=2 context_attention=gather stages=[1,3]", ("training.recompute=operators",)
    ),
}
ON_EIGHT_OR_SIXTEEN = {
    "tensor, split sequence": Case(
        "llama-tied", "pipeline=2 context=2 tensor=2 sequence_parallel=true context_attention=ring stages_per_rank=2"
    ),
    "four stages": Case(
        "llama", "pipeline=4 context=2 context_attention=all_to_all schedule=zero_bubble", DOCUMENTS
    ),
    "all axes, split sequence, zero3, recomputed layers": Case(
        "llama-tied",
        "pipeline=2 data=2 context=2 tensor=2 sequence_parallel=true sharding=zero3 context_attention=ring",
        (*DOCUMENTS, "training.recompute=full"),
    ),
    "all axes, split sequence, zero2, separate weight gradients": Case(
        "gpt2-untied",
        "pipeline=2 data=2 context=2 tensor=2 sequence_parallel=true sharding=zero2 context_attention=gather "
        "schedule=zero_bubble",
        ("training.recompute=operators",),
    ),
}  # fmt: skip


def check(ranks: RankPool, run_with: Any, case: Case) -> None:
    num_steps = 2
    settings = (*FOUR, *MODELS[case.model], *case.options, "model.dropout=0.0")
    (expected,) = ranks.run(1, course, run_with(*settings), num_steps, time_limit=300.0)
    run = run_with(*settings, *layout_of(case.layout))
    assert run.num_micro_batches > 1
    assert_equal(ranks.run(run.layout.world_size, course, run, num_steps, time_limit=300.0), expected)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ON_FOUR)
def test_a_pipeline_over_shared_sequences_trains_as_one_rank(ranks, run_with, name):
    check(ranks, run_with, ON_FOUR[name])


@pytest.fixture(scope="module")
def sixteen_ranks():
    pool = RankPool(16)
    yield pool
    pool.close()


@pytest.mark.slow  # up to sixteen processes on two cores; the cases on four ranks run the same code
@pytest.mark.parametrize("name", ON_EIGHT_OR_SIXTEEN)
def test_four_axes_at_once_train_as_one_rank(sixteen_ranks, run_with, name):
    check(sixteen_ranks, run_with, ON_EIGHT_OR_SIXTEEN[name])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ways", ["context_attention=gather stages_per_rank=2", "context_attention=ring"])
def test_validation_passes_through_all_stages_with_a_part_of_each_sequence(ranks, run_with, ways):
    settings = (*EXACT, "model.dropout=0.0")
    (expected,) = ranks.run(1, validation_loss, run_with(*settings))
    run = run_with(*settings, *layout_of(f"pipeline=2 context=2 {ways}"))
    assert ranks.run(4, validation_loss, run) == pytest.approx([expected] * 4)
