"""Published families with latent attention, with each family's keys for the fields of `ModelConfig`.

DeepSeek-V2 and -V3 without experts are Llamas with latent attention.
"""

import dataclasses

from crosscut.config.published.families.attention import LLAMA

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
    },
    fixed={**LLAMA.fixed, "layers": ("latent_attention swiglu",), "latent_attention.norm_epsilon": 1e-6},
    defaults={
        **LLAMA.defaults,
        "vocab_size": 102_400,
        "latent_attention.query_rank": 1536,
        "latent_attention.key_value_rank": 512,
        "latent_attention.nope_size": 128,
        "latent_attention.rope_size": 64,
        "latent_attention.value_size": 128,
    },
    required={**LLAMA.required, "attention_bias": (False,), "mlp_bias": (False,)},
    biases=(),
    heads={"DeepseekV2ForSequenceClassification": {"head": "classes"}},
    dense_layers=("first_k_dense_replace", 0),
    derived={"head_dim": "qk_rope_head_dim", "qk_head_dim": "qk_nope_head_dim"},
)
DEEPSEEK_V3 = dataclasses.replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={
        **DEEPSEEK_V2.defaults,
        "num_layers": 61,
        "hidden_size": 7168,
        "num_heads": 128,
        "num_kv_heads": 128,
        "mlp_size": 18_432,
        "vocab_size": 129_280,
        "max_sequence_length": 4096,
    },
    required={**LLAMA.required, "attention_bias": (False,), "rope_interleave": (True,)},
    heads={"DeepseekV3ForSequenceClassification": {"head": "classes"}},
    dense_layers=("first_k_dense_replace", 3),
)

LATENT_FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3)
"""Families in the order in which a model's family is looked for."""
