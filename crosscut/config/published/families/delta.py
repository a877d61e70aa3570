"""Published families with gated delta nets, with each family's keys for the fields of `ModelConfig`.

Qwen3-Next is a Qwen3 whose attention has gates, whose norms multiply by 1 + their weights, and most of whose MLPs are
mixtures of experts. OLMo hybrid is an OLMo 2. In both, most layers have a gated delta net in place of attention.
"""

import dataclasses

from crosscut.config.published.families.attention import LLAMA_KEYS, OLMO2, QWEN3
from crosscut.config.published.families.experts import QWEN_LAYERS, QWEN_SHARED, SHARED_EXPERTS
from crosscut.config.published.families.family import LayerList

_MIXER = {
    "gated_delta.num_value_heads": "linear_num_value_heads",
    "gated_delta.num_key_heads": "linear_num_key_heads",
    "gated_delta.value_head_size": "linear_value_head_dim",
    "gated_delta.key_head_size": "linear_key_head_dim",
    "gated_delta.conv_size": "linear_conv_kernel_dim",
}
_ATTENTION, _DELTA = "attention swiglu", "gated_delta swiglu"
_LAYERS = LayerList(kinds={"linear_attention": _DELTA, "full_attention": _ATTENTION}, key="layer_types", interval=4)

QWEN3_NEXT = dataclasses.replace(
    QWEN3,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    keys={**LLAMA_KEYS, **_MIXER, **QWEN_SHARED},
    fixed={
        **{name: value for name, value in QWEN3.fixed.items() if name != "layers"},
        "attention_gate": True,
        "rotary_fraction": 0.25,
        "norm_offset": True,
        "gated_delta.negative_eigenvalues": False,
        "gated_delta.norm_epsilon": 0.0,
        **{field: value for field, value in SHARED_EXPERTS.items() if field not in QWEN_SHARED},
    },
    defaults={
        **QWEN3.defaults,
        "num_layers": 48,
        "hidden_size": 2048,
        "num_heads": 16,
        "num_kv_heads": 2,
        "head_size": 256,
        "mlp_size": 5632,
        "gated_delta.num_value_heads": 32,
        "gated_delta.num_key_heads": 16,
        "experts.number": 512,
        "experts.per_token": 10,
        "experts.size": 512,
        "experts.shared_size": 512,
        "experts.renormalise": True,
    },
    required={**QWEN3.required, "partial_rotary_factor": (0.25,)},
    layers=dataclasses.replace(_LAYERS, interval_key="full_attention_interval"),
    window=None,
    experts=QWEN_LAYERS,
    heads={},
)
OLMO_HYBRID = dataclasses.replace(
    OLMO2,
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    keys={**LLAMA_KEYS, **_MIXER, "gated_delta.negative_eigenvalues": "linear_allow_neg_eigval"},
    fixed={
        **{name: value for name, value in OLMO2.fixed.items() if name not in ("layers", "positions")},
        "norm_place": "before",
        "gated_delta.norm_epsilon": 1e-5,
    },
    defaults={
        **OLMO2.defaults,
        "hidden_size": 3840,
        "num_heads": 30,
        "vocab_size": 100_352,
        "max_sequence_length": 65_536,
        "norm_epsilon": 1e-6,
        "gated_delta.negative_eigenvalues": True,
    },
    layers=dataclasses.replace(_LAYERS, needs_all=True, norm_places={_DELTA: "before", _ATTENTION: "output"}),
    nulls=("pad_token_id",),
    has_optional_base=True,
    heads={},
)
"""The released models have no positions: their files set `rope_theta` to null."""

DELTA_FAMILIES = (QWEN3_NEXT, OLMO_HYBRID)
"""Families in the order in which a model's family is looked for."""
