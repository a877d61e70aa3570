"""Gated delta nets on every kind of layout: without a fault, nothing differs."""

from typing import Any

import pytest

from crosscut.config import Layout
from tests.ranks import RankPool
from tests.verification.runs import LLAMA, proven

SIZES = {"num_key_heads": 2, "num_value_heads": 8, "key_head_size": 6, "value_head_size": 8, "chunk_size": 8}
ALONE: dict[str, Any] = {"layers": ("gated_delta",), "gated_delta": SIZES}
HYBRID: dict[str, Any] = {"layers": ("gated_delta gelu", "attention gelu"), "gated_delta": SIZES}
ONE_KEY: dict[str, Any] = {**HYBRID, "gated_delta": {**SIZES, "num_key_heads": 1}}
MODERN: dict[str, Any] = {
    **LLAMA, "layers": ("gated_delta swiglu", "mamba2", "attention"), "num_kv_heads": 2, "gated_delta": SIZES,
    "mamba2": {"head_size": 8, "state_size": 6, "num_groups": 2, "chunk_size": 8}, "num_layers": 3,
}  # fmt: skip
TOGETHER: dict[str, Any] = {**LLAMA, "layers": ("gated_delta swiglu", "attention swiglu"), "num_kv_heads": 2}
QWEN3_NEXT: dict[str, Any] = {
    **TOGETHER, "norm_offset": True, "qk_norm": True, "attention_gate": True, "rotary_fraction": 0.5, "tied": False,
    "gated_delta": SIZES,
}  # fmt: skip
OLMO_HYBRID: dict[str, Any] = {
    **TOGETHER, "norm_places": ("before", "output"), "qk_norm": True, "qk_norm_over": "all_heads",
    "gated_delta": {**SIZES, "negative_eigenvalues": True, "norm_epsilon": 0.01},
}  # fmt: skip
LONG_ONES: dict[str, Any] = {"max_sequence_length": 32, "dropout": 0.0}
LONG: dict[str, Any] = {**HYBRID, **LONG_ONES}
DOCUMENTS = {"document_mask": True}
SPLIT = {"sequence_parallel": True}


def again(mode: str, **others: Any) -> dict[str, Any]:
    return {"training": {"recompute": mode, **others}}


CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "more ranks than key heads, split, documents": (Layout(tensor=4, **SPLIT), {**HYBRID, "training": DOCUMENTS}),
    "one rank, documents": (Layout(), {**HYBRID, "training": DOCUMENTS}),
    "tensor 2": (Layout(tensor=2), HYBRID),
    "tensor 2, split": (Layout(tensor=2, **SPLIT), ALONE),
    "tensor 4, three kinds of mixers": (Layout(tensor=4), MODERN),
    "one key head on four ranks": (Layout(tensor=4), ONE_KEY),
    "a key head for each value head": (Layout(tensor=2), {**HYBRID, "gated_delta": {**SIZES, "num_key_heads": 8}}),
    "ZeRO-3": (Layout(tensor=2, data=2, sharding="zero3"), HYBRID),
    "ZeRO-2, split": (Layout(tensor=2, data=2, sharding="zero2", **SPLIT), ONE_KEY),
    "pipeline": (Layout(pipeline=3), {**HYBRID, "num_layers": 4}),
    "pipeline, zero bubble": (Layout(pipeline=2, tensor=2, schedule="zero_bubble"), HYBRID),
    "recomputed layers": (Layout(tensor=4), {**HYBRID, **again("full")}),
    "recomputed rules": (Layout(tensor=2), {**HYBRID, **again("selective", document_mask=True)}),
    "recomputed operators": (Layout(tensor=2, **SPLIT), {**HYBRID, **again("operators", document_mask=True)}),
    "context": (Layout(context=2), {**LONG, "training": DOCUMENTS}),
    "context, tensor, one key head": (
        Layout(context=2, tensor=2, context_attention="ring"), {**LONG, "gated_delta": {**SIZES, "num_key_heads": 1}}
    ),
    "four context ranks, ZeRO-2, recomputed rules": (
        Layout(context=4, sharding="zero2"), {**LONG, **again("selective")}
    ),
    "context, split, recomputed layers": (Layout(context=2, tensor=2, **SPLIT), {**LONG, **again("full")}),
    "context, recomputed operators": (Layout(context=2), {**ALONE, **LONG_ONES, **again("operators")}),
    "Qwen3-Next": (Layout(tensor=2), QWEN3_NEXT),
    "Qwen3-Next, split": (Layout(tensor=4, **SPLIT), {**QWEN3_NEXT, "training": DOCUMENTS}),
    "Qwen3-Next, ZeRO-3": (Layout(tensor=2, data=2, sharding="zero3"), QWEN3_NEXT),
    "Qwen3-Next, pipeline, recomputed layers": (Layout(pipeline=2, tensor=2), {**QWEN3_NEXT, **again("full")}),
    "Qwen3-Next, recomputed operators": (Layout(tensor=2, **SPLIT), {**QWEN3_NEXT, **again("operators")}),
    "Qwen3-Next, context": (Layout(context=2, tensor=2), {**QWEN3_NEXT, **LONG_ONES}),
    "OLMo hybrid": (Layout(tensor=2), OLMO_HYBRID),
    "OLMo hybrid, split": (Layout(tensor=4, **SPLIT), {**OLMO_HYBRID, "training": DOCUMENTS}),
    "OLMo hybrid, ZeRO-2": (Layout(tensor=2, data=2, sharding="zero2"), OLMO_HYBRID),
    "OLMo hybrid, pipeline": (Layout(pipeline=3), {**OLMO_HYBRID, "num_layers": 5}),
    "OLMo hybrid, recomputed operators": (Layout(tensor=2), {**OLMO_HYBRID, **again("operators")}),
    "OLMo hybrid, context": (Layout(context=2), {**OLMO_HYBRID, **LONG_ONES, "training": DOCUMENTS}),
    "adapters": (Layout(tensor=4), {**MODERN, "lora_rank": 2}),
    "Qwen3-Next, adapters": (Layout(tensor=2), {**QWEN3_NEXT, "lora_rank": 2}),
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
    "documents, split, one key head": (
        Layout(tensor=4, **SPLIT), {"training": DOCUMENTS, "gated_delta": {**SIZES, "num_key_heads": 1}}
    ),
    "context, recomputed layers": (Layout(context=2), {**LONG_ONES, **again("full")}),
    "Qwen3-Next": (Layout(tensor=2), QWEN3_NEXT),
    "OLMo hybrid, recomputed operators": (Layout(tensor=2), {**OLMO_HYBRID, **again("operators")}),
}  # fmt: skip


@pytest.mark.slow  # it compiles every layer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_are_the_uncut_model(ranks: RankPool, name: str) -> None:
    layout, options = COMPILED[name]
    training = {**options.get("training", {}), "compile": "on"}
    report = proven(ranks, layout, **{**HYBRID, "dropout": 0.0, **options, "training": training})
    assert any(check.name == "compiled layers" for check in report.checks)
