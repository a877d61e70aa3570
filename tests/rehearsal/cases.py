"""Runs for which the planner's formulas are compared with dry runs: a small model with many options, and large models
on their usual layouts.
"""

from typing import Any, NamedTuple

from crosscut.config import PRESETS, Layout, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from crosscut.rehearsal import Device

LLAMA = {
    "positions": "rotary",
    "norm": "rms",
    "mlp": "swiglu",
    "biases": "none",
    "num_kv_heads": 2,
    "mlp_size": 352,
    "dropout": 0.0,
    "tied": False,
}
BERT = {"attention": "bidirectional", "norm_place": "after", "token_types": 2, "mlp": "gelu_exact"}
MASKED = {"head": "masked_tokens", "sentence_order": True}
NORMS_AFTER = {"norm_place": "after", "num_layers": 6}
AVERAGED = OptimizerConfig(ema_decay=0.999)
MUON = OptimizerConfig(matrices="muon", matrix_learning_rate=0.02)
WIDE = {"num_layers": 1, "hidden_size": 512}
SIZES = {"num_layers": 3, "hidden_size": 128, "num_heads": 8, "vocab_size": 2048, "max_sequence_length": 128}


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


SMALL = (
    small("nothing cut", "cpu", {}, {}),
    small("half precision", "cuda", {}, {"precision": "bfloat16"}),
    small("cut", "cpu", {"tensor": 2}, {}),
    small("split", "cuda", {"tensor": 4, "data": 2, "sequence_parallel": True}, {"precision": "bfloat16"}),
    small("accumulated", "cpu", {"data": 2}, {"micro_batch_size": 1}),
    small("layers again", "cuda", {"tensor": 2}, {"recompute": "full"}),
    small("operators again", "cuda", {"tensor": 2}, {"recompute": "operators", "precision": "bfloat16"}, LLAMA),
    small("keys on many ranks", "cuda", {"tensor": 8}, {"precision": "bfloat16"}, LLAMA),
    small("keys repeated", "cuda", {}, {"precision": "float32"}, LLAMA),
    small("attention again", "cpu", {}, {"recompute": "selective"}),
    small("shared", "cuda", {"data": 4, "sharding": "zero3"}, {"precision": "bfloat16"}),
    small("shared, kept", "cpu", {"data": 4, "sharding": "zero2"}, {"micro_batch_size": 2}),
    small(
        "groups, split",
        "cuda",
        {"tensor": 2, "data": 4, "sharding": "zero3", "shard_group": 2, "sequence_parallel": True},
        {"recompute": "full"},
    ),
    small(
        "offloaded",
        "cuda",
        {},
        {"precision": "float16", "recompute": "full", "offload": ("activations", "optimizer")},
        {"num_layers": 6},
    ),
    small("long", "cpu", {}, {"sequence_length": 512, "batch_size": 2}, {"max_sequence_length": 512}),
    small(
        "unequal layers",
        "cuda",
        {"tensor": 2, "data": 2, "sharding": "zero3"},
        {"recompute": "full", "recompute_every": 2, "precision": "bfloat16"},
        {"mlp_pattern": ("swiglu", "swiglu", "gelu")},
    ),
    small("squared ReLU", "cuda", {"tensor": 2}, {"recompute": "operators"}, {"mlp": "relu2", "dropout": 0.0}),
    small("GeGLU", "cpu", {}, {"recompute": "full", "recompute_every": 2}, {"mlp": "geglu", "dropout": 0.0}),
    small(
        "QK layer norm", "cuda", {"tensor": 2}, {"recompute": "operators"}, {"qk_norm": True, "qk_norm_kind": "layer"}
    ),
    small("documents", "cpu", {"tensor": 2}, {"document_mask": True}, {"dropout": 0.0}),
    small(
        "documents, split",
        "cuda",
        {"tensor": 4, "data": 2, "sequence_parallel": True},
        {"document_mask": True, "precision": "bfloat16"},
    ),
    small("documents, shared heads", "cuda", {"tensor": 2}, {"document_mask": True, "precision": "bfloat16"}, LLAMA),
    small(
        "documents again",
        "cuda",
        {"data": 2, "sharding": "zero3"},
        {"document_mask": True, "recompute": "full", "offload": ("activations",), "micro_batch_size": 2},
        LLAMA,
    ),
    small("soft cap", "cpu", {"tensor": 2}, {"z_loss": 1e-4}, {"logit_softcap": 15.0, "dropout": 0.0}),
    small("soft cap, half precision", "cuda", {}, {"precision": "bfloat16"}, {"logit_softcap": 15.0}),
    small(
        "norms without parameters",
        "cpu",
        {"tensor": 2, "sequence_parallel": True},
        {"recompute": "operators"},
        {"norm": "rms", "norm_affine": False, "embedding_norm": True, "qk_norm": True, "dropout": 0.0, "num_layers": 6},
    ),
    small(
        "embedding norm", "cuda", {"data": 2, "sharding": "zero3"}, {"precision": "bfloat16"}, {"embedding_norm": True}
    ),
    small("BERT", "cpu", {"tensor": 2}, {}, BERT),
    small("BERT undropped", "cpu", {}, {"recompute": "operators"}, {**BERT, "dropout": 0.0, "num_layers": 6}),
    small("BERT's attention again", "cpu", {}, {"recompute": "selective"}, BERT),
    small(
        "BERT, split",
        "cuda",
        {"tensor": 4, "data": 2, "sequence_parallel": True},
        {"precision": "bfloat16", "recompute": "full", "recompute_every": 2},
        BERT,
    ),
    small(
        "BERT, shared",
        "cuda",
        {"tensor": 2, "data": 4, "sharding": "zero3", "shard_group": 2},
        {"precision": "bfloat16", "document_mask": True},
        BERT,
    ),
    small("masked BERT", "cpu", {"tensor": 2, "data": 2}, {}, {**BERT, **MASKED}),
    small(
        "masked BERT, split",
        "cuda",
        {"tensor": 4, "data": 2, "sequence_parallel": True},
        {"precision": "bfloat16", "recompute": "full"},
        {**BERT, **MASKED, "norm_place": "before"},
    ),
    small(
        "masked BERT, shared",
        "cuda",
        {"tensor": 2, "data": 2, "sharding": "zero3"},
        {"precision": "bfloat16", "micro_batch_size": 2},
        {**BERT, **MASKED, "tied": False},
    ),
    small("classes", "cpu", {"tensor": 2, "data": 2}, {}, {**BERT, "head": "classes", "num_classes": 3}),
    small(
        "choice, shared",
        "cuda",
        {"tensor": 2, "data": 2, "sharding": "zero3"},
        {"precision": "bfloat16", "micro_batch_size": 2},
        {**BERT, "head": "choice"},
    ),
    small("spans, split", "cuda", {"tensor": 4, "sequence_parallel": True}, {}, {**BERT, "head": "spans"}),
    small("spans of a decoder", "cpu", {"tensor": 2}, {}, {**LLAMA, "tied": True, "head": "spans"}),
    small("norms after, offloaded", "cuda", {}, {"recompute": "full", "offload": ("activations",)}, NORMS_AFTER),
    small("norms after", "cuda", {"tensor": 2}, {"precision": "bfloat16"}, {**LLAMA, **NORMS_AFTER}),
    small("Muon", "cpu", {"tensor": 2}, {}, {}, MUON),
    small("Muon, one token", "cpu", {}, {"sequence_length": 1, "batch_size": 1}, {"vocab_size": 256, **WIDE}, MUON),
    small(
        "Muon, shared",
        "cuda",
        {"tensor": 2, "data": 4, "sharding": "zero3", "shard_group": 2},
        {"precision": "bfloat16"},
        LLAMA,
        MUON,
    ),
    small("Muon, offloaded", "cuda", {"data": 2}, {"offload": ("optimizer",)}, {}, MUON),
    small("adapters", "cpu", {"tensor": 2}, {}, {**LLAMA, "lora_rank": 8}),
    small(
        "adapters, shared",
        "cuda",
        {"data": 4, "sharding": "zero3"},
        {"precision": "bfloat16", "recompute": "full"},
        {**LLAMA, "lora_rank": 8},
    ),
    small("averaged", "cpu", {"tensor": 2}, {}, {}, AVERAGED),
    small("averaged, shared", "cuda", {"data": 4, "sharding": "zero3"}, {"precision": "bfloat16"}, {}, AVERAGED),
    small("512 ranks", "cuda", {"tensor": 8, "data": 64}, {"precision": "bfloat16"}),
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
