"""Context ranks, which share each sequence: the proof holds for each way of attention and with every other axis."""

from typing import Any

import pytest

from crosscut.config import Layout
from crosscut.training.speed import compilation
from crosscut.verification import for_verification
from tests.ranks import RankPool
from tests.verification.runs import LLAMA, proven, tiny_run, verify_run

PLAIN: dict[str, Any] = {"max_sequence_length": 32, "dropout": 0.0}
DROPPING: dict[str, Any] = {"max_sequence_length": 32, "dropout": 0.1}
GQA: dict[str, Any] = {**PLAIN, **LLAMA, "num_kv_heads": 2, "tied": False}
DOCUMENTS = {"document_mask": True}
THREE_HEADS = {"num_heads": 6, "num_kv_heads": 3, "hidden_size": 48}
MUON = {"matrices": "muon", "matrix_learning_rate": 0.02}


def on(way: str, **layout: Any) -> Layout:
    return Layout(**{"context": 2, "context_attention": way, **layout})


CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "all-to-all over documents with dropout": (on("all_to_all"), {**DROPPING, "training": DOCUMENTS}),
    "gather": (on("gather"), PLAIN),
    "all-to-all": (on("all_to_all"), PLAIN),
    "ring": (on("ring"), PLAIN),
    "gather with dropout": (on("gather"), DROPPING),
    "ring over four ranks, recomputed core": (
        on("ring", context=4), {**PLAIN, "training": {"recompute": "selective"}}
    ),
    "gather over four ranks, recomputed layers": (
        on("gather", context=4), {**PLAIN, "training": {"recompute": "full"}}
    ),
    "ring, key-value heads, tensor ranks that split the sequence": (on("ring", tensor=2, sequence_parallel=True), GQA),
    "gather, key-value heads, tensor ranks": (on("gather", tensor=2), GQA),
    "all-to-all, zero3 over data and context": (on("all_to_all", data=2, sharding="zero3"), GQA),
    "gather, zero2 over context": (on("gather", sharding="zero2"), {**GQA, "training": DOCUMENTS}),
    "ring over documents, data ranks": (on("ring", data=2), {**PLAIN, **THREE_HEADS, "training": DOCUMENTS}),
    "all-to-all over documents, recomputed core": (
        on("all_to_all"), {**PLAIN, "training": {**DOCUMENTS, "recompute": "selective"}}
    ),
    "all-to-all, recomputed layers": (on("all_to_all"), {**PLAIN, "training": {"recompute": "full"}}),
    "Muon, zero2 over context": (on("gather", sharding="zero2"), {**PLAIN, "optimizer": MUON}),
    "accumulation": (on("ring", data=2), {**PLAIN, "training": {"micro_batch_size": 1, "batch_size": 8}})
}  # fmt: skip


@pytest.mark.one_in(len(CASES))  # `tests/parallel/context` compares each way of attention
@pytest.mark.parametrize("name", CASES)
def test_context_ranks_compute_what_one_rank_computes(ranks: RankPool, name: str) -> None:
    layout, options = CASES[name]
    assert proven(ranks, layout, **options).largest_tolerance <= 1e-10


COMPILED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "ring": (on("ring"), {}),
    "all-to-all, recomputed operators": (on("all_to_all"), {"recompute": "operators"}),
    "gather over documents": (on("gather"), DOCUMENTS),
}


@pytest.mark.slow  # compilation takes long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_compute_the_same(ranks: RankPool, name: str) -> None:
    layout, training = COMPILED[name]
    run = for_verification(tiny_run(**PLAIN, training={"compile": "on", **training}), layout, "float64")
    report = ranks.run(layout.world_size, verify_run, run, compilation.BACKEND, time_limit=300.0)[0]
    assert report.same, report.first
