"""Published families with state-space layers, with each family's keys for the fields of `ModelConfig`.

Mamba and Mamba-2 have only such layers. Nemotron-H mixes layers of one part each: state-space mixers, attention and
MLPs. The layers of Bamba, of Granite 4 and of Jamba have a mixer, which is either attention or a state-space mixer, and
an MLP. The state-space mixers of Mamba and Jamba are of the first kind (`mamba`).
"""

import dataclasses

from crosscut.config.published.families.attention import LLAMA_KEYS, LLAMA_TIED
from crosscut.config.published.families.family import PLAIN, Family, LayerList

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
    },
    {"positions": "none", "tied": False, **_FIXED},
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
    },
    {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "use_conv_bias": (True,),
        "num_nextn_predict_layers": (0,),
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias"), (False,)),
        "tie_word_embeddings": (False,),
    },
    layers=LayerList(
        kinds={"mamba": "mamba2", "attention": "attention", "mlp": "relu2"},
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
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "attention_multiplier",
    "logit_divisor": "logits_scaling",
}
GRANITE = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    {**LLAMA_KEYS, "mlp_size": "shared_intermediate_size", **_MULTIPLIERS, **_HYBRID_MIXER},
    {name: value for name, value in _FIXED.items() if name not in _MULTIPLIERS},
    {
        **_HYBRID_DEFAULTS,
        "mlp_size": 1024,
        "vocab_size": 32_000,
        "max_sequence_length": 2048,
        "norm_epsilon": 1e-6,
        "attention_multiplier": 1.0,
    },
    {
        "num_local_experts": (0,),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mamba_proj_bias": (False,),
        "mamba_conv_bias": (True,),
    },
    stated=("num_local_experts",),
    layers=LayerList(kinds={"mamba": "mamba2 swiglu", "attention": "attention swiglu"}, key="layer_types"),
    expansion="mamba_expand",
    positions="position_embedding_type",
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
    },
    {"positions": "none", "mamba.vector_norms": True, **_FIXED},
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
    },
    {
        "num_experts": (1,),
        "hidden_act": ("silu",),
        "mamba_proj_bias": (False,),
        "mamba_conv_bias": (True,),
    },
    stated=("num_experts",),
    layers=LayerList(
        kinds={"mamba": "mamba swiglu", "attention": "attention swiglu"},
        period_key="attn_layer_period",
        offset_key="attn_layer_offset",
        period=(8, 4),
    ),
    expansion="mamba_expand",
    tied_tensors=LLAMA_TIED,
    aliases={"num_local_experts": "num_experts"},
)

STATE_SPACE_FAMILIES = (MAMBA, MAMBA2, NEMOTRON_H, BAMBA, GRANITE, JAMBA)
"""Families in the order in which a model's family is looked for."""
