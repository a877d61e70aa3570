"""Published families of mixtures of experts, with each family's keys for the fields of `ModelConfig`.

Mixtral is a Llama, and Qwen2-MoE and Qwen3-MoE are a Qwen2 and a Qwen3, whose MLPs are mixtures of experts. OLMoE is a
Llama with experts and with norms of all queries and of all keys. Granite MoE is a Llama with experts and with four
multipliers.
"""

import dataclasses

from crosscut.config.published.families.attention import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3, task_models
from crosscut.config.published.families.family import MULTIPLIERS, SOFTMAX_EXPERTS, ExpertLayers, Family

_NUMBER = {"experts.number": "num_experts", "experts.per_token": "num_experts_per_tok"}
_LOCAL_NUMBER = {**_NUMBER, "experts.number": "num_local_experts"}
_SIZE = {"experts.size": "moe_intermediate_size", "experts.renormalise": "norm_topk_prob"}
QWEN_EXPERTS = {**_NUMBER, **_SIZE}
"""Keys of the experts of Qwen3-MoE."""
QWEN_SHARED = {**QWEN_EXPERTS, "experts.shared_size": "shared_expert_intermediate_size"}
"""Keys of the experts of Qwen2-MoE and Qwen3-Next."""
QWEN_LAYERS = ExpertLayers(dense_number=0, dense_key="mlp_only_layers", step_key="decoder_sparse_step")
SHARED_EXPERTS = {**SOFTMAX_EXPERTS, "experts.shared_gate": True}
"""Settings of experts beside an MLP with a gate."""
_WITHOUT_MLP = {field: key for field, key in LLAMA.keys.items() if field != "mlp_size"}
_ALL_SPARSE = {"layers": ("attention experts",)}


def _without(fields: dict[str, object], keys: dict[str, str]) -> dict[str, object]:
    """Fields that no key gives."""
    return {field: value for field, value in fields.items() if field not in keys}


MIXTRAL = dataclasses.replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys={**_WITHOUT_MLP, **_LOCAL_NUMBER, "experts.size": "intermediate_size"},
    fixed={**MISTRAL.fixed, **_ALL_SPARSE, **SOFTMAX_EXPERTS},
    defaults={
        **MISTRAL.defaults,
        "norm_epsilon": 1e-5,
        "rotary_base": 1_000_000.0,
        "experts.number": 8,
        "experts.per_token": 2,
        "experts.size": 14_336,
    },
    window=None,
    heads=task_models("Mixtral", "classes"),
    aliases={"num_experts": "num_local_experts"},
)
QWEN2_MOE = dataclasses.replace(
    QWEN2,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    keys={**QWEN2.keys, **QWEN_SHARED},
    fixed={**QWEN2.fixed, **_without(SHARED_EXPERTS, QWEN_SHARED)},
    defaults={
        **QWEN2.defaults,
        "num_layers": 24,
        "hidden_size": 2048,
        "num_heads": 16,
        "num_kv_heads": 16,
        "mlp_size": 5632,
        "experts.number": 60,
        "experts.per_token": 4,
        "experts.size": 1408,
        "experts.shared_size": 5632,
        "experts.renormalise": False,
    },
    required={**QWEN2.required, "qkv_bias": (True,)},
    experts=QWEN_LAYERS,
    heads=task_models("Qwen2Moe", "classes"),
)
QWEN3_MOE = dataclasses.replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys={**QWEN3.keys, **QWEN_EXPERTS},
    fixed={**QWEN3.fixed, **_without(SOFTMAX_EXPERTS, QWEN_EXPERTS)},
    defaults={
        **{field: value for field, value in QWEN3.defaults.items() if field != "head_size"},
        "num_layers": 24,
        "hidden_size": 2048,
        "num_kv_heads": 4,
        "mlp_size": 6144,
        "experts.number": 128,
        "experts.per_token": 8,
        "experts.size": 768,
        "experts.renormalise": False,
    },
    experts=QWEN_LAYERS,
    heads=task_models("Qwen3Moe", "classes", "spans"),
    aliases={"num_local_experts": "num_experts"},
)
OLMOE = dataclasses.replace(
    OLMO2,
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    keys={
        **_WITHOUT_MLP,
        **_NUMBER,
        "experts.size": "intermediate_size",
        "experts.renormalise": "norm_topk_prob",
    },
    fixed={**OLMO2.fixed, "norm_place": "before", **_ALL_SPARSE, **_without(SOFTMAX_EXPERTS, _SIZE)},
    defaults={
        **OLMO2.defaults,
        "num_layers": 16,
        "hidden_size": 2048,
        "num_heads": 16,
        "max_sequence_length": 4096,
        "experts.number": 64,
        "experts.per_token": 8,
        "experts.size": 2048,
        "experts.renormalise": False,
    },
    required={**OLMO2.required, "clip_qkv": (None,)},
    heads={},
    aliases={"num_local_experts": "num_experts"},
)
GRANITE_MOE = dataclasses.replace(
    LLAMA,
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    keys={**_WITHOUT_MLP, **MULTIPLIERS, **_LOCAL_NUMBER, "experts.size": "intermediate_size"},
    fixed={**_without({**LLAMA.fixed}, MULTIPLIERS), **_ALL_SPARSE, **SOFTMAX_EXPERTS},
    defaults={
        **LLAMA.defaults,
        "attention_multiplier": 1.0,
        "experts.number": 8,
        "experts.per_token": 2,
        "experts.size": 11_008,
    },
    required={**LLAMA.required, "attention_bias": (False,)},
    biases=(),
    heads={},
)

EXPERT_FAMILIES: tuple[Family, ...] = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE)
"""Families in the order in which a model's family is looked for."""
