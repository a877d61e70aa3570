"""Tiny models of the other language models of transformers that have a `tp_plan`.

Their configs take the sizes of one table, under the names that they know. A model that needs other sizes raises an
error when it is built.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cutting.models import FAMILIES, VOCABULARY, decoder_inputs, loss_of

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "query_pre_attn_scalar": 8, "sliding_window": 4,
    "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "num_layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
    # latent attention
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "index_n_heads": 4, "index_head_dim": 8, "index_topk": 4,
    # experts
    "moe_intermediate_size": 16, "shared_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16, "ffn_hidden_size": 32, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "top_k_experts": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "mlp_only_layers": [],
    "zero_expert_num": 2,
    # mixers with a state
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
    "mamba_d_ssm": 32, "conv_L_cache": 3, "block_ff_dim": 32,
}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "head_dim": 4}
"""Sizes of models with latent attention, whose keys are made for all heads."""
LARGEST = 3_000_000
"""Parameters of the largest model that is proven: the table did not shrink larger ones."""


def others() -> list[str]:
    """Kinds of the language models that have a plan, each once, without those of `FAMILIES`."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    seen = {getattr(transformers, family.model).config_class for family in FAMILIES.values()}
    found = []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        config = _config_class(kind)
        if getattr(config, "base_model_tp_plan", None) and config not in seen:
            seen.add(config)
            found.append(kind)
    return found


def _config_class(kind: str) -> Any:
    """Class of the config of a kind's language model; None if the kind has none."""
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return None
    found = CONFIG_MAPPING[kind]
    return found.sub_configs.get("text_config", found)


def build_other(kind: str, **changes: Any) -> tuple[nn.Module, dict[str, Any], Callable[[Any], Tensor]]:
    """Tiny model of a kind, its keyword inputs, and its loss, in the form that `prove_module` takes. `changes` are
    other values of its config. Raises `ValueError` if the model is not tiny, and any error if the sizes do not fit.
    """
    from transformers import AutoModelForCausalLM

    kind_of_config = _config_class(kind)
    renamed: dict[str, str] = kind_of_config.attribute_map
    known = {*kind_of_config.__dataclass_fields__, *renamed}
    sizes = {**SIZES, **(LATENT if "kv_lora_rank" in known else {}), **changes}
    config = kind_of_config(**{renamed.get(name, name): size for name, size in sizes.items() if name in known})
    config._experts_implementation = "eager"
    with torch.device("meta"):
        number = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if number > LARGEST:
        raise ValueError(f"the model must have at most {LARGEST:,} parameters, but has {number:,}")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.train(), decoder_inputs(), loss_of
