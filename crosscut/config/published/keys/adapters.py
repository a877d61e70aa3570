"""Keys of `adapter_config.json`, which PEFT writes."""

from crosscut.config.published.keys.form import Keys, because

ADAPTER = Keys(
    title="`adapter_config.json`",
    used=because(
        {
            "the rank of a matrix": "r rank_pattern",
            "the scale of an adapter": "lora_alpha alpha_pattern use_rslora",
            "must include the modules of all tensors in the file": (
                "target_modules exclude_modules layers_to_transform"
            ),
            "another name than that of the model is told": "base_model_name_or_path",
        }
    ),
    only={
        "peft_type": ("LORA",),
        "bias": ("none",),
        "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica", None),
        "use_dora": (False, None),
        "use_qalora": (False, None),
        "lora_bias": (False, None),
        "modules_to_save": (None, []),
        "target_parameters": (None, []),
        "trainable_token_indices": (None, [], {}),
        "alora_invocation_tokens": (None, []),
        "layer_replication": (None, []),
        **dict.fromkeys(("enable_lora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"), (None,)),
    },
    without_effect=because(
        {
            "the tensors' own names and shapes say it": "layers_pattern fan_in_fan_out",
            "names the model or the program": "auto_mapping peft_version revision task_type",
            "says where PEFT keeps its matrices while it runs": "runtime_config",
            "belongs to the training of the adapter": (
                "inference_mode ensure_weight_tying lora_dropout megatron_config megatron_core merge_weights "
                "qalora_group_size corda_config eva_config loftq_config lora_ga_config velora_config"
            ),
        }
    ),
    remedy="Merge the adapter with PEFT (`merge_and_unload`), and load the merged model.",
)
