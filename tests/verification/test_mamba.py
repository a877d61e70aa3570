"""Mamba-1 mixers on every kind of layout: without a fault, nothing differs."""

from typing import Any

import pytest

from crosscut.config import Layout
from tests.ranks import RankPool
from tests.verification.runs import LLAMA, proven

SIZES = {"state_size": 6, "step_rank": 3, "chunk_size": 8}
"""64 channels for a hidden size of 32."""
NORMED = {**SIZES, "vector_norms": True}
ALONE: dict[str, Any] = {"layers": ("mamba",), "mamba": SIZES}
HYBRID: dict[str, Any] = {"layers": ("mamba gelu", "attention gelu"), "mamba": NORMED}
MODERN: dict[str, Any] = {**LLAMA, "layers": ("mamba swiglu", "attention"), "mamba": SIZES, "num_kv_heads": 2}
LONG_ONES: dict[str, Any] = {"max_sequence_length": 32, "dropout": 0.0}
LONG: dict[str, Any] = {**HYBRID, **LONG_ONES}
DOCUMENTS = {"document_mask": True}
SPLIT = {"sequence_parallel": True}


def again(mode: str, **others: Any) -> dict[str, Any]:
    return {"training": {"recompute": mode, **others}}


CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "context": (Layout(context=2), {**LONG, "training": DOCUMENTS}),
    "context, split, documents": (Layout(context=2, tensor=2, **SPLIT), {**LONG, "training": DOCUMENTS}),
    "one rank, documents": (Layout(), {**HYBRID, "training": DOCUMENTS}),
    "tensor 2": (Layout(tensor=2), HYBRID),
    "tensor 2, split": (Layout(tensor=2, **SPLIT), ALONE),
    "tensor 2, documents": (Layout(tensor=2), {**ALONE, "training": DOCUMENTS}),
    "tensor 4": (Layout(tensor=4), MODERN),
    "tensor 4, split, documents": (Layout(tensor=4, **SPLIT), {**HYBRID, "training": DOCUMENTS}),
    "norms without weights": (Layout(tensor=2, **SPLIT), {**HYBRID, "norm": "rms", "norm_affine": False}),
    "ZeRO-3": (Layout(tensor=2, data=2, sharding="zero3"), HYBRID),
    "ZeRO-2, split": (Layout(tensor=2, data=2, sharding="zero2", **SPLIT), HYBRID),
    "pipeline": (Layout(pipeline=3), {**HYBRID, "num_layers": 4}),
    "pipeline, zero bubble": (Layout(pipeline=2, tensor=2, schedule="zero_bubble"), HYBRID),
    "recomputed layers": (Layout(tensor=4), {**HYBRID, **again("full")}),
    "recomputed scans": (Layout(tensor=2), {**HYBRID, **again("selective", document_mask=True)}),
    "recomputed operators": (Layout(tensor=2, **SPLIT), {**HYBRID, **again("operators", document_mask=True)}),
    "four context ranks, ZeRO-2, recomputed scans": (
        Layout(context=4, sharding="zero2"), {**LONG, **again("selective")}
    ),
    "context, split, recomputed layers": (Layout(context=2, tensor=2, **SPLIT), {**LONG, **again("full")}),
    "context, recomputed operators": (Layout(context=2), {**ALONE, **LONG_ONES, **again("operators")}),
    "context, adapters": (Layout(context=2, tensor=2), {**LONG, "lora_rank": 2}),
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
