"""Published families with latent attention, with each family's keys for the fields of `ModelConfig`.

DeepSeek-V2 and -V3 are Llamas with latent attention. The MLPs of all layers but the first ones are mixtures of experts.
"""

import dataclasses

from crosscut.config.published.families.attention import LLAMA
from crosscut.config.published.families.family import SIGMOID_EXPERTS, SOFTMAX_EXPERTS, ExpertLayers

_EXPERTS = {
    "experts.number": "n_routed_experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.size": "moe_intermediate_size",
    "experts.scaling": "routed_scaling_factor",
    "experts.groups": "n_group",
    "experts.groups_per_token": "topk_group",
    "experts.balance_loss": "aux_loss_alpha",
}
_LAYERS = ExpertLayers(first_key="first_k_dense_replace", shared_key="n_shared_experts")

DEEPSEEK_V2 = dataclasses.replace(
    LLAMA,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    keys={
        **{field: key for field, key in LLAMA.keys.items() if field != "head_size"},
        "latent_attention.query_rank": "q_lora_rank",
        "latent_attention.key_value_rank": "kv_lora_rank",
        "latent_attention.nope_size": "qk_nope_head_dim",
        "latent_attention.rope_size": "qk_rope_head_dim",
        "latent_attention.value_size": "v_head_dim",
        **_EXPERTS,
    },
    fixed={
        **LLAMA.fixed,
        "layers": ("latent_attention swiglu",),
        "latent_attention.norm_epsilon": 1e-6,
        **{field: SOFTMAX_EXPERTS[field] for field in SOFTMAX_EXPERTS.keys() - {*_EXPERTS, "experts.shared_size"}},
        "experts.renormalise": False,
        "experts.group_top": 1,
    },
    defaults={
        **LLAMA.defaults,
        "vocab_size": 102_400,
        "latent_attention.query_rank": 1536,
        "latent_attention.key_value_rank": 512,
        "latent_attention.nope_size": 128,
        "latent_attention.rope_size": 64,
        "latent_attention.value_size": 128,
        "experts.number": 64,
        "experts.size": 1407,
        "experts.balance_loss": 0.001,
    },
    required={
        **LLAMA.required,
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_topk_prob"), (False,)),
        "scoring_func": ("softmax",),
        "moe_layer_freq": (1,),
    },
    biases=(),
    heads={"DeepseekV2ForSequenceClassification": {"head": "classes"}},
    experts=dataclasses.replace(_LAYERS, shared=2, method_key="topk_method"),
    aliases={"num_experts": "n_routed_experts"},
    derived={"head_dim": "qk_rope_head_dim", "qk_head_dim": "qk_nope_head_dim"},
)
DEEPSEEK_V3 = dataclasses.replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    keys={**DEEPSEEK_V2.keys, "experts.renormalise": "norm_topk_prob"},
    fixed={
        **{field: value for field, value in DEEPSEEK_V2.fixed.items() if not field.startswith("experts.")},
        **SIGMOID_EXPERTS,
    },
    defaults={
        **DEEPSEEK_V2.defaults,
        "num_layers": 61,
        "hidden_size": 7168,
        "num_heads": 128,
        "num_kv_heads": 128,
        "mlp_size": 18_432,
        "vocab_size": 129_280,
        "max_sequence_length": 4096,
        "experts.number": 256,
        "experts.per_token": 8,
        "experts.size": 2048,
        "experts.renormalise": True,
        "experts.scaling": 2.5,
        "experts.groups": 8,
        "experts.groups_per_token": 4,
    },
    required={
        **LLAMA.required,
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    heads={"DeepseekV3ForSequenceClassification": {"head": "classes"}},
    experts=dataclasses.replace(_LAYERS, first=3),
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)

LATENT_FAMILIES = (DEEPSEEK_V3, DEEPSEEK_V2)
"""Families in the order in which a model's family is looked for. Both have the same layers without experts."""
