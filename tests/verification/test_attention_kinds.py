"""Windows, gates, partly rotated heads and layers without positions, on every kind of layout: nothing differs."""

from typing import Any

import pytest

from crosscut.config import Layout
from tests.ranks import RankPool
from tests.verification.runs import LLAMA, proven

GATED: dict[str, Any] = {
    **LLAMA, "attention_gate": True, "rotary_fraction": 0.5, "qk_norm": True, "num_kv_heads": 2,
}  # fmt: skip
WINDOWS: dict[str, Any] = {
    **LLAMA,
    "layers": ("sliding_attention swiglu", "attention swiglu"),
    "sliding_attention": {"window": 5, "rotary_base": 100.0},
    "num_kv_heads": 2,
}
NOPE: dict[str, Any] = {
    **LLAMA,
    "layers": ("sliding_attention swiglu", "nope_attention swiglu"),
    "sliding_attention": {"window": 3},
}
BOTH: dict[str, Any] = {**WINDOWS, **{name: GATED[name] for name in ("attention_gate", "rotary_fraction", "qk_norm")}}
LONG: dict[str, Any] = {"max_sequence_length": 32, "dropout": 0.0}
SPLIT = {"sequence_parallel": True}
DOCUMENTS = {"document_mask": True}


def again(mode: str, **others: Any) -> dict[str, Any]:
    return {"training": {"recompute": mode, **others}}


CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "both, split": (Layout(tensor=4, **SPLIT), BOTH),
    "gates": (Layout(tensor=2), GATED),
    "gates without rotation": (Layout(tensor=2), {"attention_gate": True}),
    "windows": (Layout(tensor=4), WINDOWS),
    "windows, documents": (Layout(tensor=2), {**WINDOWS, "training": DOCUMENTS}),
    "windows, no positions": (Layout(tensor=2, **SPLIT), NOPE),
    "windows longer than sequences": (Layout(tensor=2), {**WINDOWS, "sliding_attention": {"window": 16}}),
    "scaled in some layers": (
        Layout(tensor=2),
        {**WINDOWS, "rotary_factor": 4.0, "sliding_attention": {"window": 5, "rotary_scaled": False}},
    ),
    "ZeRO-3": (Layout(tensor=2, data=2, sharding="zero3"), BOTH),
    "pipeline": (Layout(pipeline=3), {**BOTH, "num_layers": 4}),
    "recomputed layers": (Layout(tensor=4), {**BOTH, **again("full")}),
    "recomputed attention": (Layout(tensor=2), {**BOTH, **again("selective", document_mask=True)}),
    "recomputed operators": (Layout(tensor=4, **SPLIT), {**BOTH, **again("operators")}),
    "context": (Layout(context=2, tensor=2), {**BOTH, **LONG, "training": DOCUMENTS}),
    "context, heads exchanged": (
        Layout(context=2, context_attention="all_to_all"), {**BOTH, **LONG, **again("full")}
    ),
    "context, ring": (Layout(context=2, context_attention="ring"), {**WINDOWS, **LONG}),
    "context, ring, documents": (Layout(context=4, context_attention="ring"), {**NOPE, **LONG, "training": DOCUMENTS}),
    "adapters": (Layout(tensor=4), {**BOTH, "lora_rank": 2}),
    "Muon": (Layout(tensor=2), {**GATED, "optimizer": {"matrices": "muon", "matrix_learning_rate": 0.02}}),
    "states": (
        Layout(tensor=2, **SPLIT),
        {**GATED, "layers": ("mamba2 swiglu", "nope_attention swiglu"), "mamba2": {"head_size": 8}},
    ),
}  # fmt: skip


@pytest.mark.one_in(len(CASES))
@pytest.mark.parametrize("name", CASES)
def test_every_layout_is_the_uncut_model(ranks: RankPool, name: str) -> None:
    layout, options = CASES[name]
    report = proven(ranks, layout, **options)
    assert report.largest_tolerance <= 1e-10
    assert any(check.name == "collectives" and "as planned" in check.told for check in report.checks)


@pytest.mark.slow  # it compiles every layer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("recompute", ["none", "operators"])
def test_compiled_layers_are_the_uncut_model(ranks: RankPool, recompute: str) -> None:
    training = {"recompute": recompute, "compile": "on"}
    report = proven(ranks, Layout(tensor=2, **SPLIT), **BOTH, dropout=0.0, training=training)
    assert any(check.name == "compiled layers" for check in report.checks)
