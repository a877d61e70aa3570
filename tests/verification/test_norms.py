"""Norms on the outputs of the parts, and norms of all heads together, on every kind of layout: nothing differs."""

from typing import Any

import pytest

from crosscut.config import Layout
from tests.ranks import RankPool
from tests.verification.runs import LLAMA, proven

OUTPUT: dict[str, Any] = {"norm_place": "output"}
ALL_HEADS: dict[str, Any] = {"qk_norm": True, "qk_norm_over": "all_heads"}
OLMO2: dict[str, Any] = {**LLAMA, **OUTPUT, **ALL_HEADS, "tied": False}
SHARED_KEYS: dict[str, Any] = {**OLMO2, "num_kv_heads": 2}
LONG: dict[str, Any] = {**SHARED_KEYS, "max_sequence_length": 32, "dropout": 0.0}
SPLIT = {"sequence_parallel": True}


def again(mode: str, **others: Any) -> dict[str, Any]:
    return {"training": {"recompute": mode, **others}}


CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "key heads on several ranks, split": (Layout(tensor=4, **SPLIT), SHARED_KEYS),
    "tensor 2": (Layout(tensor=2), OLMO2),
    "one key head": (Layout(tensor=4), {**OLMO2, "num_kv_heads": 1}),
    "norms on outputs": (Layout(tensor=2, **SPLIT), OUTPUT),
    "norms without weights": (Layout(tensor=2), {**SHARED_KEYS, "norm_affine": False}),
    "norms of all heads before parts": (Layout(tensor=4), ALL_HEADS),
    "ZeRO-3": (Layout(tensor=2, data=2, sharding="zero3"), SHARED_KEYS),
    "ZeRO-2, split": (Layout(tensor=2, data=2, sharding="zero2", **SPLIT), {**OLMO2, "num_kv_heads": 1}),
    "pipeline": (Layout(pipeline=3), {**SHARED_KEYS, "num_layers": 4}),
    "pipeline, zero bubble": (Layout(pipeline=2, tensor=2, schedule="zero_bubble"), SHARED_KEYS),
    "recomputed layers": (Layout(tensor=4), {**SHARED_KEYS, **again("full")}),
    "recomputed layers, split": (Layout(tensor=2, **SPLIT), {**OUTPUT, **again("full")}),
    "recomputed attention": (Layout(tensor=2), {**OLMO2, **again("selective", document_mask=True)}),
    "recomputed operators": (Layout(tensor=4, **SPLIT), {**SHARED_KEYS, **again("operators")}),
    "recomputed operators, dropout": (Layout(tensor=2), {**OUTPUT, **again("operators")}),
    "context": (Layout(context=2, tensor=2), {**LONG, "training": {"document_mask": True}}),
    "context, recomputed layers": (Layout(context=2, context_attention="ring"), {**LONG, **again("full")}),
    "states": (Layout(tensor=2), {**OUTPUT, "layers": ("mamba2", "attention gelu"), "mamba2": {"head_size": 8}}),
    "adapters": (Layout(tensor=4), {**SHARED_KEYS, "lora_rank": 2}),
    "Muon": (Layout(tensor=2), {**OLMO2, "optimizer": {"matrices": "muon", "matrix_learning_rate": 0.02}}),
}  # fmt: skip


@pytest.mark.one_in(len(CASES))
@pytest.mark.parametrize("name", CASES)
def test_every_layout_is_the_uncut_model(ranks: RankPool, name: str) -> None:
    layout, options = CASES[name]
    report = proven(ranks, layout, **options)
    assert report.largest_tolerance <= 1e-10
    assert any(check.name == "collectives" and "as planned" in check.told for check in report.checks)


COMPILED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "key heads on several ranks, split": (Layout(tensor=4, **SPLIT), {}),
    "recomputed operators": (Layout(tensor=2), {"recompute": "operators"}),
    "recomputed layers": (Layout(tensor=2), {"recompute": "full"}),
}


@pytest.mark.slow  # it compiles every layer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_are_the_uncut_model(ranks: RankPool, name: str) -> None:
    layout, training = COMPILED[name]
    report = proven(ranks, layout, **SHARED_KEYS, dropout=0.0, training={**training, "compile": "on"})
    assert any(check.name == "compiled layers" for check in report.checks)
