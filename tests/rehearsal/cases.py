"""Runs for which the planner's formulas are compared with dry runs: a small model with many options, and large models
on their usual layouts.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from crosscut.config import PRESETS, Layout, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from crosscut.config.parts.experts import ExpertsConfig
from crosscut.config.parts.gated_delta import GatedDeltaConfig
from crosscut.config.parts.latent_attention import LatentAttentionConfig
from crosscut.config.parts.mamba import MambaConfig
from crosscut.config.parts.mamba2 import Mamba2Config
from crosscut.config.parts.sliding_attention import SlidingAttentionConfig
from crosscut.config.parts.sparse_attention import SparseAttentionConfig
from crosscut.planner import Candidate, step_traffic
from crosscut.planner.messages.collective import Collective
from crosscut.rehearsal import ComparedFigure, Device, Rehearsal, compare

LLAMA = {
    "positions": "rotary",
    "norm": "rms",
    "layers": ("attention swiglu",),
    "biases": "none",
    "num_kv_heads": 2,
    "mlp_size": 352,
    "dropout": 0.0,
    "tied": False,
}
HYBRID = {
    "layers": ("mamba2 gelu", "attention gelu"),
    "mamba2": Mamba2Config(head_size=16, state_size=16, num_groups=2, chunk_size=32),
    "dropout": 0.0,
}
STATES = {
    **HYBRID, "layers": ("mamba2",), "hidden_size": 256, "num_layers": 6,
    "mamba2": Mamba2Config(head_size=64, state_size=64, chunk_size=48),
}  # fmt: skip
DELTA = {
    "layers": ("gated_delta gelu", "attention gelu"),
    "gated_delta": GatedDeltaConfig(
        num_key_heads=2, num_value_heads=8, key_head_size=16, value_head_size=32, chunk_size=32
    ),
    "dropout": 0.0,
}
DELTAS = {
    **DELTA, "layers": ("gated_delta",), "hidden_size": 256, "num_layers": 6,
    "gated_delta": GatedDeltaConfig(key_head_size=64, value_head_size=64, chunk_size=48),
}  # fmt: skip
OTHER_NORMS = {
    **LLAMA, **DELTA, "layers": ("gated_delta swiglu", "attention swiglu"), "norm_offset": True, "qk_norm": True,
    "norm_places": ("before", "output"), "gated_delta": replace(DELTA["gated_delta"], negative_eigenvalues=True),
}  # fmt: skip
CHANNELS = {
    "layers": ("mamba gelu", "attention gelu"), "mamba": MambaConfig(chunk_size=32, vector_norms=True), "dropout": 0.0,
}  # fmt: skip
LATENT = {
    **LLAMA, "layers": ("latent_attention swiglu",), "num_kv_heads": 8,
    "latent_attention": LatentAttentionConfig(
        query_rank=96, key_value_rank=64, nope_size=16, rope_size=8, value_size=16
    ),
}  # fmt: skip
LATENT_KEYS = {
    **LATENT, "layers": ("latent_attention gelu", "attention gelu"), "positions": "learned",
    "latent_attention": LatentAttentionConfig(key_value_rank=48, nope_size=16, rope_size=16, value_size=32),
}  # fmt: skip
"""Queries without a latent, and values as wide as queries and keys."""
EXPERTS = {
    **LLAMA, "layers": ("attention experts",),
    "experts": ExpertsConfig(number=8, per_token=2, size=96, shared_size=64),
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "layers": ("attention swiglu", "attention experts"),
    "experts": ExpertsConfig(
        number=16, per_token=4, size=64, shared_size=128, shared_gate=True, scores="sigmoid", groups=4,
        groups_per_token=2, balance_bias=True, router_z_loss=0.001,
    ),
}  # fmt: skip
PLAIN_EXPERTS = {
    "layers": ("experts", "attention"), "experts": ExpertsConfig(mlp="gelu", number=4, size=128), "dropout": 0.0,
}  # fmt: skip
BERT = {"attention": "bidirectional", "norm_place": "after", "token_types": 2, "layers": ("attention gelu_exact",)}
MASKED = {"head": "masked_tokens", "sentence_order": True}
SIX_LAYERS = {"num_layers": 6}
NORMS_AFTER = {"norm_place": "after", **SIX_LAYERS}
NORMS_ON_OUTPUTS = {"norm_place": "output", **SIX_LAYERS}
OLMO2 = {**LLAMA, **NORMS_ON_OUTPUTS, "qk_norm": True, "qk_norm_over": "all_heads"}
GATES = {**LLAMA, "attention_gate": True, "rotary_fraction": 0.5, "qk_norm": True, **SIX_LAYERS}
WINDOWS = {
    **LLAMA, **SIX_LAYERS, "layers": ("sliding_attention swiglu", "nope_attention swiglu", "attention swiglu"),
    "sliding_attention": SlidingAttentionConfig(window=48, rotary_base=100.0),
}  # fmt: skip
BLOCKS = {
    **LLAMA, **SIX_LAYERS, "layers": ("sparse_attention swiglu", "sparse_attention swiglu", "attention swiglu"),
    "sparse_attention": SparseAttentionConfig(block_size=16, window=2, stride=4),
}  # fmt: skip
MULTIPLIED = {
    **LLAMA, **SIX_LAYERS, "positions": "none", "embedding_multiplier": 3.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.2, "logit_divisor": 1.5,
}  # fmt: skip
AVERAGED = OptimizerConfig(ema_decay=0.999)
LOW_RANK = OptimizerConfig(gradient_rank=2)
MUON = OptimizerConfig(matrices="muon", matrix_learning_rate=0.02)
WIDE = {"num_layers": 1, "hidden_size": 512}
SIZES = {"num_layers": 3, "hidden_size": 128, "num_heads": 8, "vocab_size": 2048, "max_sequence_length": 128}


Messages = Counter[tuple[str, str, int, int]]
"""Number of messages by operation, axis, elements and bytes per element."""


def planned_messages(of: RunConfig | Candidate, *, compiled: bool | None = False) -> Messages:
    """Messages of a step according to the planner."""
    return counted(step_traffic(of, compiled=compiled))


def counted(messages: Iterable[Collective]) -> Messages:
    """Messages by kind and size."""
    found: Messages = Counter()
    for m in messages:
        found[(m.operation, m.axis, m.elements, m.element_bytes)] += m.count
    return found


def sent_messages(rehearsal: Rehearsal) -> Messages:
    """Messages of a dry run."""
    sizes = zip(rehearsal.sent, rehearsal.element_bytes, strict=True)
    return Counter((*sent, element_bytes) for sent, element_bytes in sizes)


def check_formulas(rehearsal: Rehearsal, *, memory: float = 0.05, flops: float = 0.05) -> list[ComparedFigure]:
    """Require that the formulas agree with a dry run, and return the compared figures of the messages."""
    held, computed, *sent = compare(rehearsal)
    assert abs(held.error) < memory, (rehearsal.rank, held)
    assert abs(computed.error) < flops, (rehearsal.rank, computed)
    assert all(figure.planned == figure.counted for figure in sent), (rehearsal.rank, sent)
    return sent


class Case(NamedTuple):
    """A run, and the device for which the dry run is made."""

    name: str
    run: RunConfig
    device: Device


def small(
    name: str,
    device: Device,
    layout: dict[str, Any],
    training: dict[str, Any],
    model: dict[str, Any] | None = None,
    optimizer: OptimizerConfig | None = None,
) -> Case:
    chosen = Layout(**layout)
    options = {"sequence_length": 128, "batch_size": 4 * chosen.data, "compile": "off", **training}
    config = ModelConfig(**{**SIZES, **(model or {})})
    parts = {"optimizer": optimizer} if optimizer else {}
    return Case(name, RunConfig(model=config, layout=chosen, training=TrainingConfig(**options), **parts), device)


def large(preset: str, layout: Layout, **training: Any) -> Case:
    options = {"sequence_length": 1024, "batch_size": 8 * layout.data, "precision": "bfloat16", "compile": "off"}
    model = ModelConfig(**PRESETS[preset])
    run = RunConfig(model=model, layout=layout, training=TrainingConfig(**{**options, **training}))
    again = {"none": "", "operators": ", operators again", "full": ", layers again"}[run.training.recompute]
    return Case(f"{preset}{again}", run, "cuda")


SPLIT = {"tensor": 4, "data": 2, "sequence_parallel": True}
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
ZERO3 = {"data": 4, "sharding": "zero3"}
CUT_ZERO3 = {"tensor": 2, "data": 2, "sharding": "zero3"}
GROUPS = {"tensor": 2, "data": 4, "sharding": "zero3", "shard_group": 2}
EXPERT_RANKS = {"data": 2, "expert": 2}
HALF = {"precision": "bfloat16"}
DOCUMENTS = {"document_mask": True}
LAYERS, OPERATORS, CORE = ({"recompute": part} for part in ("full", "operators", "selective"))
EVERY_SECOND = {"recompute": "full", "recompute_every": 2}
UNDROPPED = {"dropout": 0.0}
BARE_NORMS = {"norm": "rms", "norm_affine": False, "embedding_norm": True, "qk_norm": True, "num_layers": 6}

SMALL = (
    small("nothing cut", "cpu", {}, {}),
    small("half precision", "cuda", {}, HALF),
    small("cut", "cpu", {"tensor": 2}, {}),
    small("split", "cuda", SPLIT, HALF),
    small("accumulated", "cpu", {"data": 2}, {"micro_batch_size": 1}),
    small("layers again", "cuda", {"tensor": 2}, LAYERS),
    small("operators again", "cuda", {"tensor": 2}, OPERATORS | HALF, LLAMA),
    small("keys on many ranks", "cuda", {"tensor": 8}, HALF, LLAMA),
    small("keys repeated", "cuda", {}, {"precision": "float32"}, LLAMA),
    small("attention again", "cpu", {}, CORE),
    small("shared", "cuda", ZERO3, HALF),
    small("shared, kept", "cpu", {"data": 4, "sharding": "zero2"}, {"micro_batch_size": 2}),
    small("groups, split", "cuda", GROUPS | {"sequence_parallel": True}, LAYERS),
    small(
        "offloaded", "cuda", {}, {"precision": "float16", **LAYERS, "offload": ("activations", "optimizer")}, SIX_LAYERS
    ),
    small("long", "cpu", {}, {"sequence_length": 512, "batch_size": 2}, {"max_sequence_length": 512}),
    small(
        "unequal layers",
        "cuda",
        CUT_ZERO3,
        EVERY_SECOND | HALF,
        {"layers": ("attention swiglu", "attention swiglu", "attention gelu")},
    ),
    small(
        "layers of one part and of four",
        "cpu",
        {"tensor": 2, "sequence_parallel": True},
        CORE,
        {"layers": ("attention", "gelu attention swiglu attention", "gelu")},
    ),
    small("squared ReLU", "cuda", {"tensor": 2}, OPERATORS, {"layers": ("attention relu2",), **UNDROPPED}),
    small("GeGLU", "cpu", {}, EVERY_SECOND, {"layers": ("attention geglu",), **UNDROPPED}),
    small("QK layer norm", "cuda", {"tensor": 2}, OPERATORS, {"qk_norm": True, "qk_norm_kind": "layer"}),
    small("documents", "cpu", {"tensor": 2}, DOCUMENTS, UNDROPPED),
    small("documents, split", "cuda", SPLIT, DOCUMENTS | HALF),
    small("documents, shared heads", "cuda", {"tensor": 2}, DOCUMENTS | HALF, LLAMA),
    small(
        "documents again",
        "cuda",
        {"data": 2, "sharding": "zero3"},
        {**DOCUMENTS, **LAYERS, "offload": ("activations",), "micro_batch_size": 2},
        LLAMA,
    ),
    small("soft cap", "cpu", {"tensor": 2}, {"z_loss": 1e-4}, {"logit_softcap": 15.0, **UNDROPPED}),
    small("soft cap, half precision", "cuda", {}, HALF, {"logit_softcap": 15.0}),
    small(
        "norms without parameters", "cpu", {"tensor": 2, "sequence_parallel": True}, OPERATORS, BARE_NORMS | UNDROPPED
    ),
    small("embedding norm", "cuda", {"data": 2, "sharding": "zero3"}, HALF, {"embedding_norm": True}),
    small("BERT", "cpu", {"tensor": 2}, {}, BERT),
    small("BERT undropped", "cpu", {}, OPERATORS, BERT | UNDROPPED | SIX_LAYERS),
    small("BERT's attention again", "cpu", {}, CORE, BERT),
    small("BERT, split", "cuda", SPLIT, EVERY_SECOND | HALF, BERT),
    small("BERT, shared", "cuda", GROUPS, DOCUMENTS | HALF, BERT),
    small("multipliers", "cpu", {"tensor": 2, "data": 2}, {}, MULTIPLIED),
    small("multipliers, split", "cuda", SPLIT, HALF, MULTIPLIED),
    small("masked BERT", "cpu", {"tensor": 2, "data": 2}, {}, BERT | MASKED),
    small("masked BERT, split", "cuda", SPLIT, LAYERS | HALF, {**BERT, **MASKED, "norm_place": "before"}),
    small("masked BERT, shared", "cuda", CUT_ZERO3, {**HALF, "micro_batch_size": 2}, {**BERT, **MASKED, "tied": False}),
    small("classes", "cpu", {"tensor": 2, "data": 2}, {}, {**BERT, "head": "classes", "num_classes": 3}),
    small("number", "cpu", {"tensor": 2, "data": 2}, {}, {**BERT, "head": "number"}),
    small("choice, shared", "cuda", CUT_ZERO3, {**HALF, "micro_batch_size": 2}, {**BERT, "head": "choice"}),
    small("spans, split", "cuda", {"tensor": 4, "sequence_parallel": True}, {}, {**BERT, "head": "spans"}),
    small("spans of a decoder", "cpu", {"tensor": 2}, {}, {**LLAMA, "tied": True, "head": "spans"}),
    small("norms after, offloaded", "cuda", {}, {**LAYERS, "offload": ("activations",)}, NORMS_AFTER),
    small("norms after", "cuda", {"tensor": 2}, HALF, LLAMA | NORMS_AFTER),
    small("norms on outputs", "cpu", {"tensor": 2}, {}, NORMS_ON_OUTPUTS),
    small("norms on outputs, split", "cuda", SPLIT, HALF, NORMS_ON_OUTPUTS),
    small("norms on outputs, operators again", "cpu", {}, OPERATORS, NORMS_ON_OUTPUTS),
    small("norms on outputs, layers again", "cuda", {"tensor": 2}, LAYERS | HALF, NORMS_ON_OUTPUTS),
    small("norms of all heads", "cpu", {"tensor": 2}, {}, OLMO2),
    small("norms of all heads, split", "cuda", SPLIT, HALF, OLMO2),
    small("norms of all heads, many ranks", "cuda", {"tensor": 8}, OPERATORS | HALF, OLMO2),
    small("norms of all heads, layers again", "cpu", {"tensor": 2}, LAYERS, OLMO2),
    small("gates", "cpu", {"tensor": 2}, {}, GATES),
    small("gates, operators again", "cuda", SPLIT, OPERATORS | HALF, GATES),
    small("windows", "cpu", {"tensor": 2}, {}, WINDOWS),
    small("blocks", "cpu", {"tensor": 2}, {}, BLOCKS),
    small("blocks, half precision", "cuda", {"tensor": 2}, HALF, BLOCKS),
    small("blocks, attention again", "cpu", {"tensor": 2}, CORE, BLOCKS),
    small("blocks on context ranks", "cpu", {"context": 2, "tensor": 2}, {}, BLOCKS),
    small("windows, documents", "cuda", {"tensor": 2}, DOCUMENTS | HALF, WINDOWS),
    small("windows, attention again", "cuda", {}, CORE | HALF, WINDOWS),
    small("windows on context ranks", "cpu", {"context": 2, "tensor": 2}, DOCUMENTS, WINDOWS),
    small("Muon", "cpu", {"tensor": 2}, {}, {}, MUON),
    small("Muon, one token", "cpu", {}, {"sequence_length": 1, "batch_size": 1}, {"vocab_size": 256, **WIDE}, MUON),
    small("Muon, shared", "cuda", GROUPS, HALF, LLAMA, MUON),
    small("Muon, offloaded", "cuda", {"data": 2}, {"offload": ("optimizer",)}, {}, MUON),
    small("adapters", "cpu", {"tensor": 2}, {}, {**LLAMA, "lora_rank": 8}),
    small("adapters, shared", "cuda", ZERO3, LAYERS | HALF, {**LLAMA, "lora_rank": 8}),
    small("averaged", "cpu", {"tensor": 2}, {}, {}, AVERAGED),
    small("averaged, shared", "cuda", ZERO3, HALF, {}, AVERAGED),
    small("low rank", "cpu", {"data": 2}, {}, {}, LOW_RANK),
    small("low rank, split", "cuda", SPLIT, HALF, LLAMA, LOW_RANK),
    small("low rank, experts", "cuda", {**EXPERT_RANKS, "data": 4, "tensor": 2}, HALF, EXPERTS, LOW_RANK),
    small("states", "cpu", {}, {}, STATES),
    small("states, half precision", "cuda", {"tensor": 4}, HALF, STATES),
    small("states' scans again", "cpu", {"tensor": 2}, CORE, STATES),
    small("states' operators again", "cpu", {}, OPERATORS | DOCUMENTS, STATES),
    small("states' layers again", "cuda", {}, LAYERS, STATES),
    small("hybrid, split", "cuda", SPLIT, HALF, HYBRID),
    small("hybrid, shared, documents", "cuda", ZERO3, HALF | DOCUMENTS, HYBRID),
    small("hybrid, adapters", "cpu", {"tensor": 2}, {}, {**HYBRID, "lora_rank": 8}),
    small("hybrid, Muon", "cpu", {"tensor": 2}, {}, HYBRID, MUON),
    small("hybrid on context ranks", "cpu", {"context": 2, "tensor": 2}, DOCUMENTS, HYBRID),
    small("delta rules", "cpu", {}, {}, DELTAS),
    small("delta rules, half precision", "cuda", {"tensor": 4}, HALF, DELTAS),
    small("delta rules again", "cpu", {"tensor": 2}, CORE, DELTAS),
    small("delta rules' operators again", "cpu", {}, OPERATORS | DOCUMENTS, DELTAS),
    small("delta rules' layers again", "cuda", {}, LAYERS, DELTAS),
    small("delta rules, split", "cuda", SPLIT, HALF, DELTA),
    small("delta rules, shared, documents", "cuda", ZERO3, HALF | DOCUMENTS, DELTA),
    small("delta rules, adapters", "cpu", {"tensor": 2}, {}, {**DELTA, "lora_rank": 8}),
    small("delta rules, Muon", "cpu", {"tensor": 2}, {}, DELTA, MUON),
    small("delta rules on context ranks", "cpu", {"context": 2, "tensor": 2}, DOCUMENTS, DELTA),
    small("delta rules, other norms", "cpu", {"tensor": 2}, {}, OTHER_NORMS),
    small("delta rules, other norms, split", "cuda", SPLIT, OPERATORS | HALF, OTHER_NORMS),
    small("channels", "cpu", {}, {}, {**CHANNELS, "layers": ("mamba",), "num_layers": 6}),
    small("channels' scans again", "cuda", {"tensor": 2}, CORE | HALF, CHANNELS),
    small("channels' operators again", "cpu", {"tensor": 2}, OPERATORS | DOCUMENTS, CHANNELS),
    small("channels, split, layers again", "cuda", SPLIT, LAYERS, CHANNELS),
    small("channels, shared, adapters", "cuda", ZERO3, HALF, {**CHANNELS, "lora_rank": 8}),
    small("channels on context ranks", "cpu", {"context": 2, "tensor": 2}, DOCUMENTS, CHANNELS),
    small("latents", "cpu", {}, {}, LATENT),
    small("latents, half precision", "cuda", {"tensor": 2}, HALF, LATENT),
    small("latents, split, documents", "cuda", SPLIT, HALF | DOCUMENTS, LATENT_KEYS),
    small("latents, attention again", "cpu", {"tensor": 2}, CORE, LATENT),
    small("latents, operators again", "cpu", {"tensor": 2, "sequence_parallel": True}, OPERATORS, LATENT),
    small("latents, layers again", "cuda", ZERO3, LAYERS | HALF, LATENT_KEYS),
    small("latents, adapters", "cpu", {"tensor": 2}, {}, {**LATENT, "lora_rank": 8}),
    small("latents, Muon", "cpu", {"tensor": 2}, {}, LATENT, MUON),
    small("experts", "cpu", {}, {}, {**EXPERTS, **SIX_LAYERS}),
    small("experts, half precision", "cuda", {"tensor": 2}, HALF, EXPERTS),
    small("experts, split", "cuda", SPLIT, HALF, DEEPSEEK),
    small("experts, shared copies", "cuda", ZERO3, HALF, DEEPSEEK),
    small("experts, operators again", "cpu", SEQUENCE, OPERATORS, {**DEEPSEEK, **SIX_LAYERS}),
    small("experts, layers again", "cuda", {"tensor": 2}, LAYERS | HALF, EXPERTS),
    small("experts without a gate", "cpu", {"tensor": 4}, {"micro_batch_size": 1}, PLAIN_EXPERTS),
    small("experts, adapters", "cpu", {"tensor": 2}, {}, {**EXPERTS, "lora_rank": 8}),
    small("experts, Muon", "cpu", {"tensor": 2}, {}, EXPERTS, MUON),
    small("experts on context ranks", "cpu", {"context": 2, "tensor": 2}, LAYERS, DEEPSEEK),
    small("expert ranks", "cpu", EXPERT_RANKS, {}, {**EXPERTS, **SIX_LAYERS}),
    small("expert ranks, two groups", "cuda", {**EXPERT_RANKS, "data": 4}, HALF, DEEPSEEK),
    small("expert ranks, split", "cuda", {**SPLIT, "expert": 2}, OPERATORS | HALF, DEEPSEEK),
    small("expert ranks, layers again", "cuda", {**EXPERT_RANKS, "tensor": 2}, LAYERS | HALF, EXPERTS),
    small("expert ranks of context ranks", "cpu", {"context": 2, "tensor": 2, "expert": 2}, LAYERS, DEEPSEEK),
    small("expert ranks of data and context ranks", "cuda", {"context": 2, "data": 2, "expert": 4}, HALF, DEEPSEEK),
    small(
        "expert ranks, shared, kept",
        "cuda",
        {"data": 4, "expert": 2, "sharding": "zero2"},
        HALF | {"micro_batch_size": 1},
        DEEPSEEK,
    ),
    small("expert ranks, shared copies", "cuda", {**ZERO3, "expert": 2}, HALF, DEEPSEEK),
    small("expert ranks, whole experts", "cuda", {**ZERO3, "expert": 4}, HALF, EXPERTS),
    small("expert ranks, groups", "cuda", {**GROUPS, "data": 8, "shard_group": 4, "expert": 2}, LAYERS | HALF, EXPERTS),
    small(
        "expert ranks, shared context",
        "cuda",
        {"data": 2, "context": 2, "expert": 2, "sharding": "zero3"},
        HALF,
        EXPERTS,
    ),
    small("expert ranks, Muon", "cuda", {**ZERO3, "expert": 2}, HALF, EXPERTS, MUON),
    small("expert ranks, offloaded", "cuda", EXPERT_RANKS, HALF | {"offload": ("optimizer",)}, EXPERTS, AVERAGED),
    *(
        small(f"latents on context ranks, {way}", "cpu", {"context": 2, "tensor": 2, "context_attention": way}, {}, of)
        for way, of in (("gather", LATENT), ("all_to_all", LATENT), ("ring", LATENT_KEYS))
    ),
    small("512 ranks", "cuda", {"tensor": 8, "data": 64}, HALF),
)
"""Cases with a small model. Each takes about half a second."""

PAPER = large("megatron-8.3b", Layout(tensor=8, data=64))
LARGE = (
    large("gpt2-small", Layout(data=8)),
    large("megatron-1.2b", Layout(data=64), recompute="operators"),
    PAPER,
    large("megatron-8.3b", Layout(tensor=8, data=64, sequence_parallel=True), recompute="full"),
    large("llama3-8b", Layout(tensor=2, data=32, sequence_parallel=True, sharding="zero3"), micro_batch_size=2),
    large("llama3-70b", Layout(tensor=8, data=64, sequence_parallel=True, sharding="zero3"), recompute="full"),
)
"""Cases with a large model. Each takes up to a minute."""
