"""Keys of `config.json`, by family."""

from functools import cache

from crosscut.config.published.families import FAMILIES, Family
from crosscut.config.published.keys.form import Keys, because

_USED = because(
    {
        "the family": "model_type",
        "the head of the model": "architectures",
        "the names of the classes": "id2label",
        "the number of classes": "num_labels",
        "whether a text has one class or a number; other heads are left out": "problem_type",
        "a text ends with these ids": "eos_token_id",
        "an export of the model has the same id": "bos_token_id",
        "whether the output projection is the embedding": "tie_word_embeddings",
    }
)
_ROTARY = because(
    {
        "rotary positions": "rope_parameters rope_scaling rope_theta partial_rotary_factor "
        "original_max_position_embeddings",
        "each layer must have full attention or the sliding window": "layer_types",
    }
)
_MIXER = because({"the minimum and the maximum of the step sizes of state-space mixers": "time_step_limit"})
_WINDOW = because({"the longest sequence is the sliding window": "sliding_window use_sliding_window"})
_WINDOW_WITHOUT_EFFECT = because(
    {"names the layers of the sliding window, and no sequence is longer than the window": "max_window_layers"}
)
_NO_WINDOW = because({"the family has no sliding window": "sliding_window use_sliding_window max_window_layers"})

_MIXER_WITHOUT_EFFECT = because(
    {
        "initial values of new weights": (
            "rescale_prenorm_residual time_step_min time_step_max time_step_floor time_step_rank mamba_dt_min "
            "mamba_dt_max mamba_dt_init_floor time_step_scale time_step_init_scheme"
        ),
        "the same numbers in another precision": "residual_in_fp32 mamba_ssm_cache_dtype",
        "another implementation of the same experts": "moe_shared_expert_overlap",
        "another implementation of the same numbers": (
            "num_logits_to_keep use_mamba_kernels use_mambapy use_associative_scan"
        ),
        "the family does not read it": "expand mamba_expand mamba_proj_bias layers_block_type",
        "belongs to mixtures of experts, which the model must not have": (
            "n_routed_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size "
            "moe_latent_size moe_shared_expert_intermediate_size n_group topk_group norm_topk_prob "
            "routed_scaling_factor output_router_logits router_aux_loss_coef intermediate_size"
        ),
        "belongs to layers that predict several tokens, which the model must not have": (
            "mtp_layers_block_type mtp_hybrid_override_pattern"
        ),
        "only in training, where the run decides": "z_loss_coefficient",
    }
)
"""Keys of families with state-space mixers."""

_WIDTH = "`expand` and the hidden size give the width"

_ONLY: dict[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False, None),
    "tie_encoder_decoder": (False, None),
    "use_bidirectional_attention": (False, None),
    "use_mrope": (False, None),
    "rope_interleaved": (False, None),
    "pruned_heads": ({}, None),
    "per_layer_config": (None, {}),
    "mlp_type": ("default", None),
    "norm_type": ("layer_norm", "rms_norm", None),
    **dict.fromkeys(
        (
            "attention_chunk_size", "layer_types", "kv_sharing_modes", "fusion_config",
            "quantization_config", "compression_config", "transformers_weights",
        ),
        (None,),
    ),
}  # fmt: skip
"""Keys that change what a model computes, in every family that does not use them."""
_ONLY_CAUSAL: dict[str, tuple[object, ...]] = {"is_causal": (True,)}

_WITHOUT_EFFECT = because(
    {
        "says who wrote the file": "transformers_version name_or_path _name_or_path _commit_hash",
        "the weights' own files give the type of the values": "dtype torch_dtype",
        "the inverse of `id2label`": "label2id",
        "the form of outputs in Python": (
            "output_hidden_states output_attentions return_dict use_return_dict torchscript tie_last_hidden_states"
        ),
        "the same numbers in parts": "chunk_size_feed_forward pretraining_tp",
        "the same numbers in another precision": (
            "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 reorder_and_upcast_attn use_bfloat16"
        ),
        "another implementation of the same numbers": (
            "attn_implementation experts_implementation _attn_implementation_autoset inference_runner max_batch_size "
            "pad_key_length pre_allocate_kv_cache validate_runner_input distributed_config"
        ),
        "initial values of new weights": "initializer_range initializer_factor",
        "Crosscut always caches keys and values": "use_cache output_past",
        "Crosscut has its own mask for padding": "pad_token_id",
        "belongs to other architectures": (
            "sep_token_id cls_token_id decoder_start_token_id is_decoder cross_attention_hidden_size prefix n_ctx "
            "n_special predict_special_tokens directionality pooler_fc_size pooler_num_attention_heads "
            "pooler_num_fc_layers pooler_size_per_head pooler_type summary_activation summary_first_dropout "
            "summary_proj_to_labels summary_type summary_use_proj num_mtp_layers"
        ),
        "other programs read it": (
            "auto_map custom_pipelines is_llama_config transformers.js_config task_specific_params finetuning_task "
            "tokenizer_class sentence_transformers"
        ),
        "only in training, and each model of Crosscut has one rate (`model.dropout`)": (
            "attention_dropout classifier_dropout hidden_dropout"
        ),
        "only in training, where the run decides": "gradient_checkpointing",
        "applies to generated text, as in `generation_config.json`, if that file is missing": (
            "do_sample temperature top_k top_p repetition_penalty max_length min_length num_beams no_repeat_ngram_size "
            "bad_words_ids forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens "
            "length_penalty early_stopping num_return_sequences num_beam_groups diversity_penalty typical_p "
            "encoder_no_repeat_ngram_size exponential_decay_length_penalty output_scores return_dict_in_generate "
            "remove_invalid_values"
        ),
    }
)


_EXPERTS = because(
    {
        "only in training, where the run decides (docs/experts.md)": (
            "output_router_logits router_aux_loss_coef router_jitter_noise seq_aux"
        ),
        "another implementation of the same experts": "ep_size",
        "the family does not read it": "norm_topk_prob",
        "predicts further tokens, which Crosscut does not": "num_nextn_predict_layers",
    }
)
"""Keys of families with experts."""
_DELTA_WITHOUT_EFFECT = because(
    {
        "initial values of new weights": (
            "linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor"
        )
    }
)


def _has_mixer(family: Family) -> bool:
    """Whether the family has state-space mixers."""
    return any(field.startswith(("mamba.", "mamba2.")) for field in family.keys)


def _used_by(family: Family) -> dict[str, str]:
    """Keys that a family uses, with what each one sets."""
    fields: dict[str, str] = {}
    for field, key in family.keys.items():
        fields[key] = f"{fields[key]} and `model.{field}`" if key in fields else f"`model.{field}`"
    second = {name: f"another name of `{key}`" for name, key in family.aliases.items()}
    if (sparse := family.experts) is not None:
        fields |= dict.fromkeys(sparse.keys, "which layers have experts")
        fields |= {sparse.shared_key: "`model.experts.shared_size`"} if sparse.shared_key else {}
        fields |= {sparse.method_key: "`model.experts.groups`"} if sparse.method_key else {}
    used: dict[str, str] = {**_USED, **second, **dict.fromkeys(family.biases, "`model.biases`"), **fields}
    if family.may_rotate:
        used |= _ROTARY
    if family.layers is not None:
        used = {key: use for key, use in used.items() if key != "layer_types" or key in family.aliases}
        used |= dict.fromkeys(family.layers.keys, "`model.layers`")
    if "mamba2.num_heads" in family.keys:
        used |= _MIXER
    if family.expansion:
        of = "heads" if "mamba2.num_heads" in family.keys else "channels"
        used[family.expansion] = f"the width of all state-space {of} together, divided by the hidden size"
    if family.positions:
        used[family.positions] = "`model.positions`"
    if family.has_window:
        used |= _WINDOW
    return used


@cache
def keys_of_model(model_type: str) -> Keys:
    """Table of the keys of a family's `config.json`. Call it with the family's `model_type`."""
    family = FAMILIES[model_type]
    used = _used_by(family)
    causal = _ONLY_CAUSAL if family.fixed["attention"] == "causal" else {}
    only = {key: allowed for key, allowed in {**_ONLY, **causal, **family.required}.items() if key not in used}
    dropouts = dict.fromkeys(family.dropouts, _WITHOUT_EFFECT["attention_dropout"])
    heads = "`multi_query` gives the number" if "multi_query" in family.required else "the family has no such key"
    rest = {
        "num_key_value_heads": heads,
        **{key: f"`{other}` gives the number" for key, other in family.derived.items()},
        **(_EXPERTS if family.has_experts else {}),
        **(_DELTA_WITHOUT_EFFECT if "gated_delta.num_key_heads" in family.keys else {}),
        **_WITHOUT_EFFECT,
        **dropouts,
        **(_WINDOW_WITHOUT_EFFECT if family.has_window else _NO_WINDOW),
        **(_MIXER_WITHOUT_EFFECT if _has_mixer(family) else {}),
        **({"intermediate_size": _WIDTH} if "mamba.step_rank" in family.keys else {}),
    }
    return Keys(
        title=f"`config.json` of `{family.model_type}`",
        used=used,
        only=only,
        without_effect={key: reason for key, reason in rest.items() if key not in used and key not in only},
    )
