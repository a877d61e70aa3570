"""Published families with state-space layers, with each family's keys for the fields of `ModelConfig`.

Mamba and Mamba-2 have only such layers. Nemotron-H mixes layers of one part each: state-space mixers, attention and
MLPs or mixtures of experts. The layers of Bamba, of Granite 4 and of Jamba have a mixer, which is either attention or a
state-space mixer, and an MLP or, in Granite 4 and Jamba, a mixture of experts. The state-space mixers of Mamba and
Jamba are of the first kind (`mamba`).
"""

import dataclasses

from crosscut.config.published.families.attention import LLAMA_KEYS, LLAMA_TIED
from crosscut.config.published.families.family import (
    MULTIPLIERS,
    PLAIN,
    SIGMOID_EXPERTS,
    SOFTMAX_EXPERTS,
    ExpertLayers,
    Family,
    LayerList,
)

_FIXED = {"norm": "rms", "biases": "none", "qk_norm": False, **PLAIN}
_HYBRID_MIXER = {
    "mamba2.num_heads": "mamba_n_heads",
    "mamba2.head_size": "mamba_d_head",
    "mamba2.state_size": "mamba_d_state",
    "mamba2.num_groups": "mamba_n_groups",
    "mamba2.conv_size": "mamba_d_conv",
    "mamba2.chunk_size": "mamba_chunk_size",
}
"""Keys of the mixers of Bamba and Granite 4."""
_HYBRID_DEFAULTS = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_heads": 32,
    "tied": False,
    "dropout": 0.0,
    "mamba2.num_heads": 128,
    "mamba2.num_groups": 1,
    "mamba2.state_size": 256,
    "mamba2.chunk_size": 256,
}

MAMBA2 = Family(
    "mamba2",
    "Mamba2ForCausalLM",
    {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
        "max_sequence_length": "max_position_embeddings",
        "norm_epsilon": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
        "mamba2.num_heads": "num_heads",
        "mamba2.head_size": "head_dim",
        "mamba2.state_size": "state_size",
        "mamba2.num_groups": "n_groups",
        "mamba2.conv_size": "conv_kernel",
        "mamba2.chunk_size": "chunk_size",
    },
    {"positions": "none", "layers": ("mamba2",), **_FIXED},
    {
        "num_layers": 64,
        "hidden_size": 4096,
        "num_heads": 1,
        "vocab_size": 32_768,
        "max_sequence_length": 2048,
        "norm_epsilon": 1e-5,
        "tied": False,
        "dropout": 0.0,
        "mamba2.num_heads": 128,
        "mamba2.head_size": 64,
        "mamba2.num_groups": 8,
        "mamba2.chunk_size": 256,
    },
    {"hidden_act": ("silu",), "use_conv_bias": (True,)},
    expansion="expand",
    biases=("use_bias",),
    tied_tensors=(("embeddings.weight", "lm_head.weight"),),
)
"""A file of this family or of `mamba` names no maximum length. The published models were trained on sequences of 2,048
tokens."""

MAMBA = dataclasses.replace(
    MAMBA2,
    model_type="mamba",
    architecture="MambaForCausalLM",
    keys={
        **{field: key for field, key in MAMBA2.keys.items() if not field.startswith("mamba2.")},
        "mamba.state_size": "state_size",
        "mamba.conv_size": "conv_kernel",
        "mamba.step_rank": "time_step_rank",
    },
    fixed={**MAMBA2.fixed, "layers": ("mamba",), "mamba.vector_norms": False},
    defaults={
        **{field: value for field, value in MAMBA2.defaults.items() if not field.startswith("mamba2.")},
        "num_layers": 32,
        "hidden_size": 768,
        "vocab_size": 50_280,
        "tied": True,
    },
)

NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    {
        **{field: key for field, key in LLAMA_KEYS.items() if field != "tied"},
        "norm_epsilon": "layer_norm_epsilon",
        "mamba2.num_heads": "mamba_num_heads",
        "mamba2.head_size": "mamba_head_dim",
        "mamba2.state_size": "ssm_state_size",
        "mamba2.num_groups": "n_groups",
        "mamba2.conv_size": "conv_kernel",
        "mamba2.chunk_size": "chunk_size",
        "experts.number": "n_routed_experts",
        "experts.per_token": "num_experts_per_tok",
        "experts.size": "moe_intermediate_size",
        "experts.shared_size": "moe_shared_expert_intermediate_size",
        "experts.renormalise": "norm_topk_prob",
        "experts.scaling": "routed_scaling_factor",
        "experts.groups": "n_group",
        "experts.groups_per_token": "topk_group",
    },
    {"positions": "none", "tied": False, **_FIXED, **SIGMOID_EXPERTS, "experts.mlp": "relu2"},
    {
        "num_layers": 0,
        "hidden_size": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_size": 128,
        "mlp_size": 21_504,
        "vocab_size": 131_072,
        "max_sequence_length": 4096,
        "norm_epsilon": 1e-5,
        "dropout": 0.0,
        "mamba2.num_heads": 128,
        "mamba2.num_groups": 8,
        "mamba2.chunk_size": 128,
        "experts.number": 8,
        "experts.per_token": 2,
        "experts.size": 7688,
        "experts.shared_size": 7688,
        "experts.renormalise": True,
        "experts.scaling": 1.0,
        "experts.groups": 1,
        "experts.groups_per_token": 1,
    },
    {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "use_conv_bias": (True,),
        "num_nextn_predict_layers": (0,),
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias"), (False,)),
        "tie_word_embeddings": (False,),
        "n_shared_experts": (1,),
        "moe_latent_size": (None,),
    },
    layers=LayerList(
        kinds={"mamba": "mamba2", "attention": "attention", "mlp": "relu2", "moe": "experts"},
        key="layers_block_type",
        letters_key="hybrid_override_pattern",
        letters={"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"},
    ),
    aliases={
        "layer_types": "layers_block_type",
        "attention_head_dim": "head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_limit": "time_step_limit",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_chunk_size": "chunk_size",
        "num_local_experts": "n_routed_experts",
    },
)

BAMBA = Family(
    "bamba",
    "BambaForCausalLM",
    {**LLAMA_KEYS, **_HYBRID_MIXER},
    {"positions": "rotary", **_FIXED, "rotary_fraction": 0.5},
    {
        **_HYBRID_DEFAULTS,
        "num_kv_heads": 8,
        "mlp_size": 14_336,
        "vocab_size": 128_000,
        "max_sequence_length": 262_144,
        "norm_epsilon": 1e-5,
    },
    {
        "hidden_act": ("silu",),
        "mamba_conv_bias": (True,),
        "partial_rotary_factor": (0.5,),
    },
    layers=LayerList(
        kinds={"mamba": "mamba2 swiglu", "attention": "attention swiglu"}, indices_key="attn_layer_indices"
    ),
    expansion="mamba_expand",
    biases=("attention_bias", "mlp_bias", "mamba_proj_bias"),
    tied_tensors=LLAMA_TIED,
)
GRANITE = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    {
        **LLAMA_KEYS,
        "mlp_size": "shared_intermediate_size",
        **MULTIPLIERS,
        **_HYBRID_MIXER,
        "experts.number": "num_local_experts",
        "experts.per_token": "num_experts_per_tok",
        "experts.size": "intermediate_size",
        "experts.shared_size": "shared_intermediate_size",
    },
    {
        **{name: value for name, value in _FIXED.items() if name not in MULTIPLIERS},
        **{name: value for name, value in SOFTMAX_EXPERTS.items() if name != "experts.shared_size"},
    },
    {
        **_HYBRID_DEFAULTS,
        "mlp_size": 1024,
        "vocab_size": 32_000,
        "max_sequence_length": 2048,
        "norm_epsilon": 1e-6,
        "attention_multiplier": 1.0,
        "experts.number": 8,
        "experts.per_token": 2,
        "experts.size": 11_008,
        "experts.shared_size": 1024,
    },
    {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mamba_proj_bias": (False,),
        "mamba_conv_bias": (True,),
    },
    layers=LayerList(kinds={"mamba": "mamba2 swiglu", "attention": "attention swiglu"}, key="layer_types"),
    expansion="mamba_expand",
    positions="position_embedding_type",
    experts=ExpertLayers(dense_number=0),
    tied_tensors=LLAMA_TIED,
    aliases={"layers_block_type": "layer_types"},
)

JAMBA = Family(
    "jamba",
    "JambaForCausalLM",
    {
        **LLAMA_KEYS,
        "mamba.state_size": "mamba_d_state",
        "mamba.conv_size": "mamba_d_conv",
        "mamba.step_rank": "mamba_dt_rank",
        "experts.number": "num_experts",
        "experts.per_token": "num_experts_per_tok",
        "experts.size": "intermediate_size",
    },
    {"positions": "none", "mamba.vector_norms": True, **_FIXED, **SOFTMAX_EXPERTS, "experts.renormalise": False},
    {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "mlp_size": 14_336,
        "vocab_size": 65_536,
        "max_sequence_length": 262_144,
        "norm_epsilon": 1e-6,
        "tied": False,
        "dropout": 0.0,
        "experts.number": 16,
        "experts.per_token": 2,
        "experts.size": 14_336,
    },
    {
        "hidden_act": ("silu",),
        "mamba_proj_bias": (False,),
        "mamba_conv_bias": (True,),
    },
    layers=LayerList(
        kinds={"mamba": "mamba swiglu", "attention": "attention swiglu"},
        period_key="attn_layer_period",
        offset_key="attn_layer_offset",
        period=(8, 4),
    ),
    expansion="mamba_expand",
    experts=ExpertLayers(
        dense_number=1, period_key="expert_layer_period", offset_key="expert_layer_offset", period=(2, 1)
    ),
    tied_tensors=LLAMA_TIED,
    aliases={"num_local_experts": "num_experts"},
)

STATE_SPACE_FAMILIES = (MAMBA, MAMBA2, NEMOTRON_H, BAMBA, GRANITE, JAMBA)
"""Families in the order in which a model's family is looked for."""
