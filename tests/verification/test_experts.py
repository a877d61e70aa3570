"""Mixtures of experts on every kind of layout: without a fault, nothing differs."""

from typing import Any

import pytest
import torch

from crosscut.config import Layout
from crosscut.config.parts.experts import ExpertsConfig
from crosscut.verification.routing import Forced, compare_loads, force, offset_of
from tests.model.mixers import model_of
from tests.ranks import RankPool
from tests.verification.kinds import LONG, SPLIT, again
from tests.verification.runs import LLAMA, proven

SIZES: dict[str, Any] = {"number": 8, "per_token": 2, "size": 24}
MIXTRAL: dict[str, Any] = {**LLAMA, "layers": ("attention experts",), "num_kv_heads": 2, "experts": SIZES}
DEEPSEEK: dict[str, Any] = {
    **LLAMA, "layers": ("attention swiglu", "attention experts"), "experts": {
        **SIZES, "number": 12, "per_token": 3, "scores": "sigmoid", "balance_bias": True, "balance_loss": 0.001,
        "groups": 4, "groups_per_token": 2, "scaling": 2.5, "shared_size": 16, "router_z_loss": 0.001,
    },
}  # fmt: skip
QWEN: dict[str, Any] = {
    "layers": ("experts attention", "attention experts gelu"),
    "experts": {**SIZES, "number": 6, "shared_size": 20, "shared_gate": True, "renormalise": False, "mlp": "gelu"},
}
V3: dict[str, Any] = {
    **DEEPSEEK, "num_kv_heads": 0, "layers": ("latent_attention swiglu", "latent_attention experts"),
    "latent_attention": {"query_rank": 12, "key_value_rank": 10, "nope_size": 6, "rope_size": 4, "value_size": 5},
}  # fmt: skip
HYBRID: dict[str, Any] = {
    **LLAMA, "positions": "none", "layers": ("mamba2", "experts", "attention", "relu2"), "num_layers": 4,
    "mamba2": {"num_heads": 4, "head_size": 8, "state_size": 8, "num_groups": 2, "chunk_size": 4},
    "experts": {**DEEPSEEK["experts"], "mlp": "relu2"},
}  # fmt: skip
NEXT: dict[str, Any] = {
    **LLAMA, "layers": ("gated_delta experts", "attention experts"), "norm_offset": True, "attention_gate": True,
    "gated_delta": {"num_key_heads": 2, "num_value_heads": 4, "key_head_size": 8, "value_head_size": 6},
    "experts": {**QWEN["experts"], "mlp": "swiglu"},
}  # fmt: skip
MUON = {"optimizer": {"matrices": "muon", "matrix_learning_rate": 0.02}}
AGAIN, PACKED = again("full"), again("none", document_mask=True)
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tensor 2, split": (Layout(tensor=2, **SPLIT), DEEPSEEK),
    "context": (Layout(context=2), {**DEEPSEEK, **LONG}),
    "pipeline": (Layout(pipeline=3), {**DEEPSEEK, "num_layers": 4}),
    "one rank, recomputed layers": (Layout(), {**MIXTRAL, **again("full")}),
    "tensor 2": (Layout(tensor=2), MIXTRAL),
    "tensor 4": (Layout(tensor=4), QWEN),
    "tensor 4, split": (Layout(tensor=4, **SPLIT), MIXTRAL),
    "ZeRO-3": (Layout(data=2, sharding="zero3"), DEEPSEEK),
    "tensor 2, ZeRO-3": (Layout(tensor=2, data=2, sharding="zero3"), QWEN),
    "four data ranks, ZeRO-2": (Layout(data=4, sharding="zero2"), MIXTRAL),
    "data 2, micro-batches": (Layout(data=2), {**DEEPSEEK, "training": {"micro_batch_size": 1, "batch_size": 8}}),
    "context, split, documents": (Layout(context=2, tensor=2, **SPLIT), {**QWEN, **LONG, **PACKED}),
    "context, ZeRO-2, recomputed layers": (Layout(context=2, data=2, sharding="zero2"), {**DEEPSEEK, **LONG, **AGAIN}),
    "pipeline, tensor 2, zero bubble": (Layout(pipeline=2, tensor=2, schedule="zero_bubble"), MIXTRAL),
    "pipeline, data 2, ZeRO-2": (Layout(pipeline=2, data=2, sharding="zero2"), DEEPSEEK),
    "interleaved": (Layout(pipeline=2, stages_per_rank=2), {**QWEN, "num_layers": 4}),
    "recomputed layers": (Layout(tensor=2, **SPLIT), {**DEEPSEEK, **again("full")}),
    "recomputed operators": (Layout(tensor=2, **SPLIT), {**QWEN, **again("operators")}),
    "recomputed attention": (Layout(tensor=2), {**MIXTRAL, **again("selective")}),
    "adapters": (Layout(tensor=2), {**DEEPSEEK, "lora_rank": 2}),
    "Muon": (Layout(tensor=2), {**MIXTRAL, **MUON}),
    "Muon, ZeRO-3": (Layout(tensor=2, data=2, sharding="zero3"), {**DEEPSEEK, **MUON}),
    "expert 2": (Layout(data=2, expert=2), MIXTRAL),
    "expert 4": (Layout(data=4, expert=4), {**DEEPSEEK, **PACKED}),
    "expert 2, copies": (Layout(data=4, expert=2), DEEPSEEK),
    "expert 2, ZeRO-3": (Layout(data=4, expert=2, sharding="zero3"), DEEPSEEK),
    "expert 2, ZeRO-2, shard group": (Layout(data=4, expert=2, sharding="zero2", shard_group=2), MIXTRAL),
    "expert 2, tensor 2, split": (Layout(data=2, tensor=2, expert=2, **SPLIT), QWEN),
    "expert 2, context": (Layout(context=2, expert=2), {**MIXTRAL, **LONG}),
    "expert 4, context": (Layout(context=2, data=2, expert=4), {**DEEPSEEK, **LONG, **PACKED}),
    "expert 2, pipeline": (Layout(pipeline=2, data=2, expert=2), {**DEEPSEEK, "num_layers": 4}),
    "expert 2, zero bubble": (Layout(pipeline=2, data=2, expert=2, schedule="zero_bubble"), MIXTRAL),
    "expert 2, recomputed layers": (Layout(data=2, expert=2), {**DEEPSEEK, **again("full")}),
    "expert 2, recomputed operators": (Layout(data=2, tensor=2, expert=2), {**MIXTRAL, **again("operators")}),
    "expert 2, Muon": (Layout(data=2, expert=2), {**MIXTRAL, **MUON}),
    "expert 2, adapters": (Layout(data=2, expert=2), {**DEEPSEEK, "lora_rank": 2}),
    "DeepSeek-V3, tensor 2, expert 2": (Layout(data=2, tensor=2, expert=2, **SPLIT), V3),
    "DeepSeek-V3, expert 2, ZeRO-3": (Layout(data=4, expert=2, sharding="zero3"), V3),
    "Nemotron 3, tensor 2, expert 2": (Layout(data=2, tensor=2, expert=2, **SPLIT), HYBRID),
    "Nemotron 3, pipeline, expert 2": (Layout(pipeline=2, data=2, expert=2), HYBRID),
    "Qwen3-Next, tensor 2, expert 2": (Layout(data=2, tensor=2, expert=2), NEXT),
    "Qwen3-Next, expert 4": (Layout(data=4, expert=4), {**NEXT, "experts": {**NEXT["experts"], "number": 8}}),
    "an average of the weights": (Layout(data=2), {**DEEPSEEK, "optimizer": {"ema_decay": 0.9}}),
}  # fmt: skip


@pytest.mark.one_in(len(CASES))
@pytest.mark.parametrize("name", CASES)
def test_every_layout_is_the_uncut_model(ranks: RankPool, name: str) -> None:
    layout, options = CASES[name]
    report = proven(ranks, layout, **options)
    assert report.largest_tolerance <= 1e-10
    told = {check.name: check.told for check in report.checks}
    assert told["collectives"].endswith("as planned")
    assert told["routings"] == f"loads of experts {'; '.join(Forced)}"
    assert "rows in each of" in told["loads of experts"]


COMPILE: dict[str, Any] = {"dropout": 0.0, "training": {"compile": "on"}}
COMPILED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "split": (Layout(tensor=2, **SPLIT), {**DEEPSEEK, **COMPILE}),
    "context, recomputed layers": (Layout(context=2), {**MIXTRAL, **LONG, **again("full", compile="on")}),
    "expert 2": (Layout(data=2, expert=2), {**DEEPSEEK, **COMPILE}),
    "expert 2, tensor 2, split": (Layout(data=2, tensor=2, expert=2, **SPLIT), {**QWEN, **COMPILE}),
    "expert 2, ZeRO-2": (Layout(data=4, expert=2, sharding="zero2"), {**MIXTRAL, **COMPILE}),
    "expert 2, ZeRO-3": (Layout(data=4, expert=2, sharding="zero3"), {**DEEPSEEK, **COMPILE}),
    "expert 2, recomputed layers": (Layout(data=2, expert=2), {**MIXTRAL, **LONG, **again("full", compile="on")}),
}


@pytest.mark.slow  # it compiles every layer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_are_the_uncut_model(ranks: RankPool, name: str) -> None:
    layout, options = COMPILED[name]
    report = proven(ranks, layout, **options)
    assert any(check.name == "compiled layers" for check in report.checks)


@pytest.mark.parametrize("sizes", [SIZES, DEEPSEEK["experts"], {"number": 4, "per_token": 3}])
def test_forced_loads_leave_experts_without_tokens(sizes: dict[str, Any]) -> None:
    sizes = ExpertsConfig(**{**sizes, "groups": 1, "groups_per_token": 1})
    scores = torch.rand(50, sizes.number, generator=torch.Generator().manual_seed(0))
    loads = {}
    for forced in Forced:
        offset = offset_of(sizes, forced)
        chosen = (scores if offset is None else scores + offset).topk(sizes.per_token).indices
        loads[forced] = chosen.flatten().bincount(minlength=sizes.number)
    assert loads[Forced.AS_CHOSEN].min() > 0
    assert loads[Forced.COLLAPSED].tolist() == [50] * sizes.per_token + [0] * (sizes.number - sizes.per_token)
    uneven = loads[Forced.UNEVEN]
    assert uneven[0] == 50
    assert uneven[-1] == 0
    assert uneven.sum() == 50 * sizes.per_token


def _forced() -> list[str]:
    """On one rank: names of the modules that a forced model has changed."""
    sizes = {"number": 1, "per_token": 1, "size": 8, "shared_size": 8, "shared_gate": True}
    model = model_of({"hidden_size": 8, "layers": ("attention experts",), "experts": sizes}, torch.float64)
    force(model, Forced.COLLAPSED)
    return [name for name, module in model.named_modules() if getattr(module, "offset", None) is not None]


def test_forced_loads_leave_the_gate_of_a_shared_expert_alone(ranks: RankPool) -> None:
    assert ranks.run(1, _forced) == [["blocks.0.mlp.router"]]


@pytest.mark.parametrize(("loads", "same"), [([[3, 1], [0, 4]], True), ([[3, 1], [0, 5]], False), ([], False)])
def test_loads_of_every_layer_add_up_and_some_layer_counts(loads: list[list[int]], same: bool) -> None:
    (check,) = compare_loads(map(torch.tensor, loads), 4)
    assert check.same is same
