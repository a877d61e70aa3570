"""State-space mixers on every kind of layout: without a fault, nothing differs."""

from typing import Any

import pytest

from crosscut.config import Layout
from tests.ranks import RankPool
from tests.verification.runs import LLAMA, proven

SIZES = {"head_size": 8, "state_size": 6, "num_groups": 2, "chunk_size": 8}
"""Eight heads of eight elements for a hidden size of 32."""
ALONE: dict[str, Any] = {"layers": ("mamba2",), "mamba2": SIZES}
HYBRID: dict[str, Any] = {"layers": ("mamba2 gelu", "attention gelu"), "mamba2": SIZES}
ONE_GROUP: dict[str, Any] = {**HYBRID, "mamba2": {**SIZES, "num_groups": 1}}
MODERN: dict[str, Any] = {**LLAMA, "layers": ("mamba2 swiglu", "attention"), "mamba2": SIZES, "num_kv_heads": 2}
LONG_ONES: dict[str, Any] = {"max_sequence_length": 32, "dropout": 0.0}
LONG: dict[str, Any] = {**HYBRID, **LONG_ONES}
DOCUMENTS = {"document_mask": True}
SPLIT = {"sequence_parallel": True}


def again(mode: str, **others: Any) -> dict[str, Any]:
    return {"training": {"recompute": mode, **others}}


CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one group on two ranks, split": (Layout(tensor=2, **SPLIT), ONE_GROUP),
    "two groups on four ranks, split": (Layout(tensor=4, **SPLIT), HYBRID),
    "one rank": (Layout(), HYBRID),
    "one rank, documents": (Layout(), {**HYBRID, "training": DOCUMENTS}),
    "tensor 2": (Layout(tensor=2), HYBRID),
    "tensor 2, split": (Layout(tensor=2, **SPLIT), ALONE),
    "tensor 2, documents": (Layout(tensor=2), {**ALONE, "training": DOCUMENTS}),
    "tensor 4": (Layout(tensor=4), MODERN),
    "one group on four ranks": (Layout(tensor=4), ONE_GROUP),
    "one group on four ranks, split, documents": (Layout(tensor=4, **SPLIT), {**ONE_GROUP, "training": DOCUMENTS}),
    "a norm over all groups": (Layout(tensor=2), {**HYBRID, "mamba2": {**SIZES, "norm_groups": 1}}),
    "limits of the step size": (
        Layout(tensor=2), {**HYBRID, "mamba2": {**SIZES, "least_time_step": 0.01, "most_time_step": 0.05}}
    ),
    "ZeRO-3": (Layout(tensor=2, data=2, sharding="zero3"), HYBRID),
    "ZeRO-2, split": (Layout(tensor=2, data=2, sharding="zero2", **SPLIT), ONE_GROUP),
    "pipeline": (Layout(pipeline=3), {**HYBRID, "num_layers": 4}),
    "pipeline, zero bubble": (Layout(pipeline=2, tensor=2, schedule="zero_bubble"), HYBRID),
    "recomputed layers": (Layout(tensor=4), {**HYBRID, **again("full")}),
    "recomputed scans": (Layout(tensor=2), {**HYBRID, **again("selective", document_mask=True)}),
    "recomputed operators": (Layout(tensor=2, **SPLIT), {**HYBRID, **again("operators", document_mask=True)}),
    "context": (Layout(context=2), {**LONG, "training": DOCUMENTS}),
    "context, tensor, one group": (
        Layout(context=2, tensor=2, context_attention="ring"), {**LONG, "mamba2": {**SIZES, "num_groups": 1}}
    ),
    "four context ranks, ZeRO-2, recomputed scans": (
        Layout(context=4, sharding="zero2"), {**LONG, **again("selective")}
    ),
    "context, split, recomputed layers": (Layout(context=2, tensor=2, **SPLIT), {**LONG, **again("full")}),
    "context, recomputed operators": (Layout(context=2), {**ALONE, **LONG_ONES, **again("operators")}),
    "adapters": (Layout(tensor=4), {**MODERN, "lora_rank": 2}),
    "Muon": (Layout(tensor=2), {**HYBRID, "optimizer": {"matrices": "muon", "matrix_learning_rate": 0.02}}),
}  # fmt: skip


@pytest.mark.one_in(len(CASES))
@pytest.mark.parametrize("name", CASES)
def test_every_layout_is_the_uncut_model(ranks: RankPool, name: str) -> None:
    layout, options = CASES[name]
    report = proven(ranks, layout, **options)
    assert report.largest_tolerance <= 1e-10
    assert any(check.name == "collectives" and "as planned" in check.told for check in report.checks)


COMPILED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "documents, split": (Layout(tensor=2, **SPLIT), {"training": DOCUMENTS}),
    "one group": (Layout(tensor=4, **SPLIT), {"mamba2": {**SIZES, "num_groups": 1}}),
    "context, recomputed layers": (Layout(context=2), {**LONG_ONES, **again("full")}),
}


@pytest.mark.slow  # it compiles every layer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_are_the_uncut_model(ranks: RankPool, name: str) -> None:
    layout, options = COMPILED[name]
    training = {**options.get("training", {}), "compile": "on"}
    report = proven(ranks, layout, **{**HYBRID, "dropout": 0.0, **options, "training": training})
    assert any(check.name == "compiled layers" for check in report.checks)
