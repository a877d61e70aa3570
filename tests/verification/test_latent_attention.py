"""Latent attention on every kind of layout: without a fault, nothing differs."""

from typing import Any

import pytest

from crosscut.config import Layout
from tests.ranks import RankPool
from tests.verification.runs import LLAMA, proven

SIZES = {"query_rank": 12, "key_value_rank": 10, "nope_size": 6, "rope_size": 4, "value_size": 5}
LATENT: dict[str, Any] = {**LLAMA, "layers": ("latent_attention swiglu",), "latent_attention": SIZES}
PLAIN: dict[str, Any] = {**LATENT, "latent_attention": {**SIZES, "query_rank": 0}}
WIDE_VALUES: dict[str, Any] = {
    "layers": ("latent_attention gelu",), "latent_attention": {**SIZES, "value_size": 14},
}  # fmt: skip
"""With learned positions and biases, and with values that are wider than queries and keys."""
HYBRID: dict[str, Any] = {**LATENT, "layers": ("latent_attention swiglu", "attention swiglu"), "head_size": 4}
YARN: dict[str, Any] = {
    **LATENT, "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_length": 8,
    "rotary_attention_factor": 1.0, "latent_attention": {**SIZES, "mscale_all_dim": 0.7},
}  # fmt: skip
LONG: dict[str, Any] = {"max_sequence_length": 32, "dropout": 0.0}
DOCUMENTS = {"document_mask": True}
SPLIT = {"sequence_parallel": True}


def again(mode: str, **others: Any) -> dict[str, Any]:
    return {"training": {"recompute": mode, **others}}


def context(way: str, **others: Any) -> Layout:
    return Layout(context=2, context_attention=way, **others)


CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tensor 2, split, documents": (Layout(tensor=2, **SPLIT), {**LATENT, "training": DOCUMENTS}),
    "one rank": (Layout(), LATENT),
    "one rank, YaRN, undropped": (Layout(), {**YARN, "dropout": 0.0}),
    "tensor 2": (Layout(tensor=2), LATENT),
    "tensor 4": (Layout(tensor=4), {**YARN, "dropout": 0.0}),
    "tensor 4, wide values": (Layout(tensor=4), {**WIDE_VALUES, "dropout": 0.0}),
    "tensor 2, wide values, dropout": (Layout(tensor=2), WIDE_VALUES),
    "queries without a latent": (Layout(tensor=2), {**PLAIN, "training": DOCUMENTS}),
    "queries without a latent, split": (Layout(tensor=4, **SPLIT), PLAIN),
    "bidirectional": (Layout(tensor=2), {**WIDE_VALUES, "attention": "bidirectional", "head": "masked_tokens"}),
    "ZeRO-3": (Layout(tensor=2, data=2, sharding="zero3"), HYBRID),
    "ZeRO-2, split": (Layout(tensor=2, data=2, sharding="zero2", **SPLIT), LATENT),
    "pipeline": (Layout(pipeline=3), {**LATENT, "num_layers": 4}),
    "pipeline, zero bubble": (Layout(pipeline=2, tensor=2, schedule="zero_bubble"), LATENT),
    "recomputed layers": (Layout(tensor=4), {**PLAIN, **again("full")}),
    "recomputed attention": (Layout(tensor=2, **SPLIT), {**LATENT, **again("selective", document_mask=True)}),
    "recomputed operators": (Layout(tensor=2, **SPLIT), {**LATENT, **again("operators")}),
    "context, gathered latents": (context("gather"), {**LATENT, **LONG, "training": DOCUMENTS}),
    "context, gathered latents, tensor, split": (context("gather", tensor=2, **SPLIT), {**PLAIN, **LONG}),
    "context, heads exchanged": (context("all_to_all", tensor=2), {**YARN, **LONG}),
    "context, heads exchanged, wide values": (context("all_to_all"), {**WIDE_VALUES, **LONG, **again("selective")}),
    "context, ring": (context("ring"), {**YARN, **LONG, "training": DOCUMENTS}),
    "context, ring, wide values": (context("ring", tensor=2), {**WIDE_VALUES, **LONG, **again("full")}),
    "adapters": (Layout(tensor=4), {**LATENT, "lora_rank": 2}),
    "adapters, split": (Layout(tensor=2, **SPLIT), {**PLAIN, "lora_rank": 2}),
    "Muon": (Layout(tensor=2), {**LATENT, "optimizer": {"matrices": "muon", "matrix_learning_rate": 0.02}}),
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
    "context, recomputed layers": (context("gather"), {**LONG, **again("full")}),
}


@pytest.mark.slow  # it compiles every layer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_are_the_uncut_model(ranks: RankPool, name: str) -> None:
    layout, options = COMPILED[name]
    training = {**options.get("training", {}), "compile": "on"}
    report = proven(ranks, layout, **{**LATENT, "dropout": 0.0, **options, "training": training})
    assert any(check.name == "compiled layers" for check in report.checks)
