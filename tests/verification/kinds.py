"""Table of the kinds of mixers, of norms and of attention, and of the layouts on which each of them is verified."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from crosscut.config import Layout
from tests.verification.runs import BERT, LLAMA, MASKED

Options = dict[str, Any]
Cases = Mapping[str, tuple[Layout, Options]]

DOCUMENTS = {"document_mask": True}
SPLIT = {"sequence_parallel": True}
LONG: Options = {"max_sequence_length": 32, "dropout": 0.0}


def again(mode: str, **others: Any) -> Options:
    return {"training": {"recompute": mode, **others}}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Models of a kind, and cases that only this kind has. The first case is quick."""

    hybrid: Options
    """Model with this kind beside another one."""
    alone: Options = field(default_factory=dict)
    """Model with this kind only; empty for `hybrid`, as below."""
    modern: Options = field(default_factory=dict)
    """Model with few key heads and without biases."""
    few: Options = field(default_factory=dict)
    """Model with fewer groups or key heads than ranks."""
    own: Cases
    compiled: Cases = field(default_factory=dict)
    """Own cases with compiled layers."""
    needs_whole_sequences: bool = False
    """Whether the kind refuses packed documents and context ranks that do not exchange heads."""

    def of(self, model: str) -> Options:
        """Return a model by the name of its field."""
        found: Options = getattr(self, model) or self.hybrid
        return found

    def run_of(self, layout: Layout, model: str, more: Options) -> tuple[Layout, Options]:
        """Return a layout that the kind allows, and the run of a model by the name of its field."""
        options = {**self.of(model), **more}
        if self.needs_whole_sequences:
            layout = replace(layout, context_attention="auto")
            options["training"] = {**options.get("training", {}), "document_mask": False}
        return layout, options


_MAMBA = {"state_size": 6, "step_rank": 3, "chunk_size": 8}
"""64 channels for a hidden size of 32."""
_MAMBA_NORMED = {**_MAMBA, "vector_norms": True}
_MAMBA_HYBRID: Options = {"layers": ("mamba gelu", "attention gelu"), "mamba": _MAMBA_NORMED}
_MAMBA2 = {"head_size": 8, "state_size": 6, "num_groups": 2, "chunk_size": 8}
"""Eight heads of eight elements for a hidden size of 32."""
_MAMBA2_HYBRID: Options = {"layers": ("mamba2 gelu", "attention gelu"), "mamba2": _MAMBA2}
_ONE_GROUP: Options = {**_MAMBA2_HYBRID, "mamba2": {**_MAMBA2, "num_groups": 1}}
_DELTA = {"num_key_heads": 2, "num_value_heads": 8, "key_head_size": 6, "value_head_size": 8, "chunk_size": 8}
_DELTA_HYBRID: Options = {"layers": ("gated_delta gelu", "attention gelu"), "gated_delta": _DELTA}
_ONE_KEY: Options = {**_DELTA_HYBRID, "gated_delta": {**_DELTA, "num_key_heads": 1}}
_DELTA_SWIGLU: Options = {**LLAMA, "layers": ("gated_delta swiglu", "attention swiglu"), "num_kv_heads": 2}
_QWEN3_NEXT: Options = {
    **_DELTA_SWIGLU, "norm_offset": True, "qk_norm": True, "attention_gate": True, "rotary_fraction": 0.5,
    "tied": False, "gated_delta": _DELTA,
}  # fmt: skip
_OLMO_HYBRID: Options = {
    **_DELTA_SWIGLU, "norm_places": ("before", "output"), "qk_norm": True, "qk_norm_over": "all_heads",
    "gated_delta": {**_DELTA, "negative_eigenvalues": True, "norm_epsilon": 0.01},
}  # fmt: skip

_LATENT = {"query_rank": 12, "key_value_rank": 10, "nope_size": 6, "rope_size": 4, "value_size": 5}
_LATENT_ALONE: Options = {**LLAMA, "layers": ("latent_attention swiglu",), "latent_attention": _LATENT}
_PLAIN: Options = {**_LATENT_ALONE, "latent_attention": {**_LATENT, "query_rank": 0}}
_WIDE_VALUES: Options = {"layers": ("latent_attention gelu",), "latent_attention": {**_LATENT, "value_size": 14}}
"""With learned positions and biases, and with values that are wider than queries and keys."""
_YARN: Options = {
    **_LATENT_ALONE, "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_length": 8,
    "rotary_attention_factor": 1.0, "latent_attention": {**_LATENT, "mscale_all_dim": 0.7},
}  # fmt: skip

_OUTPUT: Options = {"norm_place": "output"}
_OLMO2: Options = {**LLAMA, **_OUTPUT, "qk_norm": True, "qk_norm_over": "all_heads", "tied": False}
_SHARED_KEYS: Options = {**_OLMO2, "num_kv_heads": 2}

_GATED: Options = {**LLAMA, "attention_gate": True, "rotary_fraction": 0.5, "qk_norm": True, "num_kv_heads": 2}
_WINDOWS: Options = {
    **LLAMA, "layers": ("sliding_attention swiglu", "attention swiglu"), "num_kv_heads": 2,
    "sliding_attention": {"window": 5, "rotary_base": 100.0},
}  # fmt: skip
_NOPE: Options = {
    **LLAMA, "layers": ("sliding_attention swiglu", "nope_attention swiglu"), "sliding_attention": {"window": 3},
}  # fmt: skip
_BOTH: Options = {**_GATED, **_WINDOWS}
_BLOCKS: Options = {
    **LLAMA, "layers": ("sparse_attention swiglu", "attention swiglu"), "num_kv_heads": 2,
    "sparse_attention": {"block_size": 2, "window": 1, "stride": 3},
}  # fmt: skip


def _context(way: str, **others: Any) -> Layout:
    return Layout(context=2, context_attention=way, **others)


KINDS = {
    "mamba": Kind(
        hybrid=_MAMBA_HYBRID,
        alone={"layers": ("mamba",), "mamba": _MAMBA},
        modern={**LLAMA, "layers": ("mamba swiglu", "attention"), "mamba": _MAMBA, "num_kv_heads": 2},
        own={
            "context, documents, with norms": (
                Layout(context=2), {"layers": ("mamba",), "mamba": _MAMBA_NORMED, **LONG, "training": DOCUMENTS}
            ),
            "norms without weights": (
                Layout(tensor=2, **SPLIT), {**_MAMBA_HYBRID, "norm": "rms", "norm_affine": False}
            ),
        },
    ),
    "mamba2": Kind(
        hybrid=_MAMBA2_HYBRID,
        alone={"layers": ("mamba2",), "mamba2": _MAMBA2},
        modern={**LLAMA, "layers": ("mamba2 swiglu", "attention"), "mamba2": _MAMBA2, "num_kv_heads": 2},
        few=_ONE_GROUP,
        own={
            "one group on two ranks, split": (Layout(tensor=2, **SPLIT), _ONE_GROUP),
            "two groups on four ranks, split": (Layout(tensor=4, **SPLIT), _MAMBA2_HYBRID),
            "one group on four ranks": (Layout(tensor=4), _ONE_GROUP),
            "a norm over all groups": (Layout(tensor=2), {**_MAMBA2_HYBRID, "mamba2": {**_MAMBA2, "norm_groups": 1}}),
            "limits of the step size": (
                Layout(tensor=2),
                {**_MAMBA2_HYBRID, "mamba2": {**_MAMBA2, "least_time_step": 0.01, "most_time_step": 0.05}},
            ),
        },
        compiled={"one group": (Layout(tensor=4, **SPLIT), _ONE_GROUP)},
    ),
    "gated_delta": Kind(
        hybrid=_DELTA_HYBRID,
        alone={"layers": ("gated_delta",), "gated_delta": _DELTA},
        modern={
            **LLAMA, "layers": ("gated_delta swiglu", "mamba2", "attention"), "num_kv_heads": 2, "gated_delta": _DELTA,
            "mamba2": _MAMBA2, "num_layers": 3,
        },
        few=_ONE_KEY,
        own={
            "more ranks than key heads, split, documents": (
                Layout(tensor=4, **SPLIT), {**_DELTA_HYBRID, "training": DOCUMENTS}
            ),
            "one key head on four ranks": (Layout(tensor=4), _ONE_KEY),
            "a key head for each value head": (
                Layout(tensor=2), {**_DELTA_HYBRID, "gated_delta": {**_DELTA, "num_key_heads": 8}}
            ),
            "Qwen3-Next": (Layout(tensor=2), _QWEN3_NEXT),
            "Qwen3-Next, split": (Layout(tensor=4, **SPLIT), {**_QWEN3_NEXT, "training": DOCUMENTS}),
            "Qwen3-Next, ZeRO-3": (Layout(tensor=2, data=2, sharding="zero3"), _QWEN3_NEXT),
            "Qwen3-Next, pipeline, recomputed layers": (
                Layout(pipeline=2, tensor=2), {**_QWEN3_NEXT, **again("full")}
            ),
            "Qwen3-Next, recomputed operators": (Layout(tensor=2, **SPLIT), {**_QWEN3_NEXT, **again("operators")}),
            "Qwen3-Next, context": (Layout(context=2, tensor=2), {**_QWEN3_NEXT, **LONG}),
            "Qwen3-Next, adapters": (Layout(tensor=2), {**_QWEN3_NEXT, "lora_rank": 2}),
            "OLMo hybrid": (Layout(tensor=2), _OLMO_HYBRID),
            "OLMo hybrid, split": (Layout(tensor=4, **SPLIT), {**_OLMO_HYBRID, "training": DOCUMENTS}),
            "OLMo hybrid, ZeRO-2": (Layout(tensor=2, data=2, sharding="zero2"), _OLMO_HYBRID),
            "OLMo hybrid, pipeline": (Layout(pipeline=3), {**_OLMO_HYBRID, "num_layers": 5}),
            "OLMo hybrid, recomputed operators": (Layout(tensor=2), {**_OLMO_HYBRID, **again("operators")}),
            "OLMo hybrid, context": (Layout(context=2), {**_OLMO_HYBRID, **LONG, "training": DOCUMENTS}),
        },
        compiled={
            "one key head": (Layout(tensor=4, **SPLIT), {**_ONE_KEY, "training": DOCUMENTS}),
            "Qwen3-Next": (Layout(tensor=2), _QWEN3_NEXT),
            "OLMo hybrid, recomputed operators": (Layout(tensor=2), {**_OLMO_HYBRID, **again("operators")}),
        },
    ),
    "latent_attention": Kind(
        hybrid={**_LATENT_ALONE, "layers": ("latent_attention swiglu", "attention swiglu"), "head_size": 4},
        alone=_LATENT_ALONE,
        modern=_LATENT_ALONE,
        few=_PLAIN,
        own={
            "split, documents": (Layout(tensor=2, **SPLIT), {**_LATENT_ALONE, "training": DOCUMENTS}),
            "one rank, YaRN, undropped": (Layout(), {**_YARN, "dropout": 0.0}),
            "tensor 4, YaRN": (Layout(tensor=4), {**_YARN, "dropout": 0.0}),
            "tensor 4, wide values": (Layout(tensor=4), {**_WIDE_VALUES, "dropout": 0.0}),
            "tensor 2, wide values, dropout": (Layout(tensor=2), _WIDE_VALUES),
            "queries without a latent": (Layout(tensor=2), {**_PLAIN, "training": DOCUMENTS}),
            "queries without a latent, split": (Layout(tensor=4, **SPLIT), _PLAIN),
            "bidirectional": (
                Layout(tensor=2), {**_WIDE_VALUES, "attention": "bidirectional", "head": "masked_tokens"}
            ),
            "recomputed attention, split": (
                Layout(tensor=2, **SPLIT), {**_LATENT_ALONE, **again("selective", **DOCUMENTS)}
            ),
            "recomputed layers, queries without a latent": (Layout(tensor=4), {**_PLAIN, **again("full")}),
            "gathered latents": (_context("gather"), {**_LATENT_ALONE, **LONG, "training": DOCUMENTS}),
            "gathered latents, tensor, split": (_context("gather", tensor=2, **SPLIT), {**_PLAIN, **LONG}),
            "heads exchanged": (_context("all_to_all", tensor=2), {**_YARN, **LONG}),
            "heads exchanged, wide values": (_context("all_to_all"), {**_WIDE_VALUES, **LONG, **again("selective")}),
            "ring": (_context("ring"), {**_YARN, **LONG, "training": DOCUMENTS}),
            "ring, wide values": (_context("ring", tensor=2), {**_WIDE_VALUES, **LONG, **again("full")}),
            "adapters, split": (Layout(tensor=2, **SPLIT), {**_PLAIN, "lora_rank": 2}),
        },
        compiled={"gathered latents": (_context("gather"), {**_LATENT_ALONE, **LONG, **again("full")})},
    ),
    "norms on outputs and over all heads": Kind(
        hybrid=_SHARED_KEYS,
        alone=_OLMO2,
        few={**_OLMO2, "num_kv_heads": 1},
        own={
            "key heads on several ranks, split": (Layout(tensor=4, **SPLIT), _SHARED_KEYS),
            "one key head": (Layout(tensor=4), {**_OLMO2, "num_kv_heads": 1}),
            "norms on outputs": (Layout(tensor=2, **SPLIT), _OUTPUT),
            "norms without weights": (Layout(tensor=2), {**_SHARED_KEYS, "norm_affine": False}),
            "norms of all heads before parts": (Layout(tensor=4), {"qk_norm": True, "qk_norm_over": "all_heads"}),
            "recomputed layers, split": (Layout(tensor=2, **SPLIT), {**_OUTPUT, **again("full")}),
            "recomputed operators, split": (Layout(tensor=4, **SPLIT), {**_SHARED_KEYS, **again("operators")}),
            "recomputed operators, dropout": (Layout(tensor=2), {**_OUTPUT, **again("operators")}),
            "states": (
                Layout(tensor=2), {**_OUTPUT, "layers": ("mamba2", "attention gelu"), "mamba2": {"head_size": 8}}
            ),
        },
        compiled={
            "key heads on several ranks, split": (Layout(tensor=4, **SPLIT), _SHARED_KEYS),
            "recomputed operators": (Layout(tensor=2), {**_SHARED_KEYS, **again("operators")}),
        },
    ),
    "windows, gates, partly rotated heads and no positions": Kind(
        hybrid=_BOTH,
        alone=_GATED,
        modern=_WINDOWS,
        own={
            "both, split": (Layout(tensor=4, **SPLIT), _BOTH),
            "gates without rotation": (Layout(tensor=2), {"attention_gate": True}),
            "windows, documents": (Layout(tensor=2), {**_WINDOWS, "training": DOCUMENTS}),
            "windows, no positions": (Layout(tensor=2, **SPLIT), _NOPE),
            "windows longer than sequences": (Layout(tensor=2), {**_WINDOWS, "sliding_attention": {"window": 16}}),
            "scaled in some layers": (
                Layout(tensor=2),
                {**_WINDOWS, "rotary_factor": 4.0, "sliding_attention": {"window": 5, "rotary_scaled": False}},
            ),
            "recomputed operators, split": (Layout(tensor=4, **SPLIT), {**_BOTH, **again("operators")}),
            "heads exchanged": (_context("all_to_all"), {**_BOTH, **LONG, **again("full")}),
            "ring, windows": (_context("ring"), {**_WINDOWS, **LONG}),
            "ring, documents": (
                Layout(context=4, context_attention="ring"), {**_NOPE, **LONG, "training": DOCUMENTS}
            ),
            "states": (
                Layout(tensor=2, **SPLIT),
                {**_GATED, "layers": ("mamba2 swiglu", "nope_attention swiglu"), "mamba2": {"head_size": 8}},
            ),
        },
        compiled={"recomputed operators": (Layout(tensor=2, **SPLIT), {**_BOTH, **again("operators")})},
    ),
    "blocks": Kind(
        hybrid=_BLOCKS,
        alone={"layers": ("sparse_attention gelu",), "sparse_attention": {"block_size": 2, "window": 2}},
        own={
            "both directions, padding": (
                Layout(tensor=2), {**_BLOCKS, **BERT, **MASKED, "layers": ("sparse_attention gelu",)}
            ),
            "blocks that do not divide sequences, gates, split": (
                Layout(tensor=4, **SPLIT),
                {**_GATED, "layers": ("sparse_attention swiglu",), "sparse_attention": {"block_size": 3, "window": 1}},
            ),
            "one block": (Layout(tensor=2), {**_BLOCKS, "sparse_attention": {"block_size": 16}}),
            "scaled scores, operators again": (
                Layout(tensor=2), {**_BLOCKS, "attention_multiplier": 0.3, **again("operators")}
            ),
            "states": (
                Layout(tensor=2, **SPLIT),
                {**_BLOCKS, "layers": ("mamba2 swiglu", "sparse_attention swiglu"), "mamba2": {"head_size": 8}},
            ),
        },
        needs_whole_sequences=True,
    ),
}  # fmt: skip

LAYOUTS: dict[str, tuple[Layout, str, Options]] = {
    "one rank, documents": (Layout(), "hybrid", {"training": DOCUMENTS}),
    "tensor 2": (Layout(tensor=2), "hybrid", {}),
    "tensor 2, split": (Layout(tensor=2, **SPLIT), "alone", {}),
    "tensor 2, documents": (Layout(tensor=2), "alone", {"training": DOCUMENTS}),
    "tensor 4": (Layout(tensor=4), "modern", {}),
    "tensor 4, split, documents": (Layout(tensor=4, **SPLIT), "few", {"training": DOCUMENTS}),
    "ZeRO-3": (Layout(tensor=2, data=2, sharding="zero3"), "hybrid", {}),
    "ZeRO-2, split": (Layout(tensor=2, data=2, sharding="zero2", **SPLIT), "few", {}),
    "pipeline": (Layout(pipeline=3), "hybrid", {"num_layers": 4}),
    "pipeline, ZeRO-3": (Layout(pipeline=2, data=2, sharding="zero3"), "hybrid", {"num_layers": 4}),
    "pipeline, zero bubble": (Layout(pipeline=2, tensor=2, schedule="zero_bubble"), "hybrid", {}),
    "recomputed layers": (Layout(tensor=4), "hybrid", again("full")),
    "recomputed core": (Layout(tensor=2), "hybrid", again("selective", **DOCUMENTS)),
    "recomputed operators": (Layout(tensor=2, **SPLIT), "hybrid", again("operators", **DOCUMENTS)),
    "context": (Layout(context=2), "hybrid", {**LONG, "training": DOCUMENTS}),
    "context, split, documents": (Layout(context=2, tensor=2, **SPLIT), "hybrid", {**LONG, "training": DOCUMENTS}),
    "context, ring": (Layout(context=2, tensor=2, context_attention="ring"), "few", LONG),
    "four context ranks, ZeRO-2, recomputed core": (
        Layout(context=4, sharding="zero2"), "hybrid", {**LONG, **again("selective")}
    ),
    "context, split, recomputed layers": (
        Layout(context=2, tensor=2, **SPLIT), "hybrid", {**LONG, **again("full")}
    ),
    "context, recomputed operators": (Layout(context=2), "alone", {**LONG, **again("operators")}),
    "context, adapters": (Layout(context=2, tensor=2), "hybrid", {**LONG, "lora_rank": 2}),
    "adapters": (Layout(tensor=4), "modern", {"lora_rank": 2}),
    "Muon": (Layout(tensor=2), "hybrid", {"optimizer": {"matrices": "muon", "matrix_learning_rate": 0.02}}),
}  # fmt: skip
"""Layouts of each kind: the ranks, the field of the kind with the model, and changes of the model and the run."""

_COMPILED: dict[str, tuple[Layout, str, Options]] = {
    "documents, split": (Layout(tensor=2, **SPLIT), "hybrid", {"training": DOCUMENTS}),
    "context, recomputed layers": (Layout(context=2), "hybrid", {**LONG, **again("full")}),
}


def cases(kind: Kind) -> Iterator[tuple[str, Layout, Options]]:
    """Yield the name, the layout and the run of each case of a kind, its own cases first."""
    yield from ((name, *case) for name, case in kind.own.items())
    yield from ((name, *kind.run_of(*case)) for name, case in LAYOUTS.items())


def compiled_cases(kind: Kind) -> Iterator[tuple[str, Layout, Options]]:
    """Yield the cases of a kind whose layers are compiled."""
    yield from ((name, *case) for name, case in kind.compiled.items())
    yield from ((name, *kind.run_of(*case)) for name, case in _COMPILED.items())
