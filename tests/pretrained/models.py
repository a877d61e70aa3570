"""Tiny random models of every family, made by `transformers`, and what it computes with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from crosscut.config.data import Objective
from crosscut.data import Tokenizer

B, S, V = 2, 12, 300
TOKENS = torch.arange(B * S).view(B, S) * 37 % V

_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}
LLAMA_SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
"""Rotary settings with which some rotations of the tiny models are slow, some are fast, and some are in between."""

_MIXER = {"chunk_size": 4, "conv_kernel": 3}
STATE_SPACE_SHAPES: dict[str, dict[str, Any]] = {
    "mamba": {"num_hidden_layers": 2, "hidden_size": 32, "state_size": 6, "conv_kernel": 3},
    "jamba": {
        "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "mamba_d_state": 6, "mamba_d_conv": 3, "mamba_dt_rank": 5, "num_experts": 1,
        "attn_layer_period": 2, "attn_layer_offset": 1, "max_position_embeddings": 64,
    },
    "mamba2": {
        "num_hidden_layers": 2, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2,
        **_MIXER,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-*-", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "intermediate_size": 48, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8,
        "n_groups": 1, "max_position_embeddings": 64, **_MIXER,
    },
    "bamba": {
        "attn_layer_indices": [1], "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "mamba_n_heads": 8, "mamba_n_groups": 1,
        "mamba_d_state": 16, "mamba_d_conv": 3, "mamba_chunk_size": 4, "max_position_embeddings": 64,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"], "num_local_experts": 0, "num_hidden_layers": 2, "hidden_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "shared_intermediate_size": 48, "mamba_n_heads": 8,
        "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 3, "mamba_chunk_size": 4,
        "max_position_embeddings": 64, "embedding_multiplier": 3.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.2, "logits_scaling": 1.5,
    },
}  # fmt: skip
"""Sizes of the families with state-space layers. A sequence of 12 tokens has three chunks."""
DELTA_SHAPE = {
    **LLAMA_SHAPE, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_value_head_dim": 6,
    "linear_key_head_dim": 8, "linear_conv_kernel_dim": 3,
}  # fmt: skip
DELTA_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **DELTA_SHAPE, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]
    },
    "olmo_hybrid": DELTA_SHAPE,
}  # fmt: skip
"""Sizes of the families with gated delta nets."""
DEEPSEEK_SHAPE = {
    **LLAMA_SHAPE, "num_key_value_heads": 4, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8,
    "v_head_dim": 5, "first_k_dense_replace": 2,
}  # fmt: skip
DEEPSEEK_ROPE = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 0.7,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 12}
_QWEN_EXPERTS = {**LLAMA_SHAPE, **_EXPERTS, "num_hidden_layers": 3, "num_experts": 6}
_SHARED = {"mlp_only_layers": [1], "shared_expert_intermediate_size": 24}
_GROUPS = {**_EXPERTS, "n_routed_experts": 12, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7}
_DEEPSEEK = {**DEEPSEEK_SHAPE, **_GROUPS, "first_k_dense_replace": 1, "n_shared_experts": 2}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**LLAMA_SHAPE, "num_local_experts": 6}),
    "qwen2_moe": ("qwen2_moe", {**_QWEN_EXPERTS, **_SHARED, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**_QWEN_EXPERTS, "head_dim": 16, "decoder_sparse_step": 2}),
    "olmoe": ("olmoe", {**LLAMA_SHAPE, "num_experts": 6, "num_experts_per_tok": 3}),
    "granitemoe": (
        "granitemoe",
        {
            **LLAMA_SHAPE, "num_local_experts": 6, "num_experts_per_tok": 3, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22, "attention_multiplier": 0.2, "logits_scaling": 1.5,
        },
    ),
    "deepseek_v3 with experts": (
        "deepseek_v3", {**_DEEPSEEK, "q_lora_rank": 12, "rope_parameters": DEEPSEEK_ROPE},
    ),
    "deepseek_v2 with experts": ("deepseek_v2", {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v2 without groups": ("deepseek_v2", {**_DEEPSEEK, "q_lora_rank": None}),
    "qwen3_next with experts": (
        "qwen3_next",
        {
            **DELTA_SHAPES["qwen3_next"], **_QWEN_EXPERTS, **_SHARED,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "jamba with experts": (
        "jamba",
        {**STATE_SPACE_SHAPES["jamba"], "num_experts": 6, "num_experts_per_tok": 3, "expert_layer_offset": 0},
    ),
    "granitemoehybrid with experts": (
        "granitemoehybrid",
        {**STATE_SPACE_SHAPES["granitemoehybrid"], "num_local_experts": 6, "intermediate_size": 12},
    ),
    "nemotron_h with experts": (
        "nemotron_h",
        {
            **STATE_SPACE_SHAPES["nemotron_h"], **_GROUPS, "hybrid_override_pattern": "ME*-E", "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
}  # fmt: skip
"""Mixtures of experts. Three and two ranks can share the experts."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "gpt2 untied": ("gpt2", {**_GPT2, "n_inner": 48, "tie_word_embeddings": False}),
    "gpt_bigcode": ("gpt_bigcode", _GPT2),
    "llama": ("llama", {**LLAMA_SHAPE, "num_key_value_heads": 4}),
    "llama tied": ("llama", {**LLAMA_SHAPE, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama multi-query": ("llama", {**LLAMA_SHAPE, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {**LLAMA_SHAPE, "sliding_window": 16}),
    "qwen2": ("qwen2", {**LLAMA_SHAPE, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**LLAMA_SHAPE, "head_dim": 16}),
    "olmo2": ("olmo2", {**LLAMA_SHAPE, "num_key_value_heads": 2}),
    "olmo2 with many key heads": ("olmo2", {**LLAMA_SHAPE, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "arcee": ("arcee", {**LLAMA_SHAPE, "hidden_act": "relu2"}),
    "nanochat": ("nanochat", {**LLAMA_SHAPE, "final_logit_softcapping": 2.0}),
    "nanochat without a cap": ("nanochat", {**LLAMA_SHAPE, "head_dim": 16, "final_logit_softcapping": None}),
    "deepseek_v2": ("deepseek_v2", {**DEEPSEEK_SHAPE, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {**DEEPSEEK_SHAPE, "q_lora_rank": 12, "rope_parameters": DEEPSEEK_ROPE}),
    "starcoder2": ("starcoder2", {**LLAMA_SHAPE, "tie_word_embeddings": True}),
    "starcoder2 without biases": ("starcoder2", {**LLAMA_SHAPE, "use_bias": False, "head_dim": 16}),
    **{name: (name, shape) for name, shape in (STATE_SPACE_SHAPES | DELTA_SHAPES).items()},
    "qwen3_next with scaled rotations": (
        "qwen3_next",
        {
            **DELTA_SHAPES["qwen3_next"], "num_hidden_layers": 4, "layer_types": None, "num_experts": 0,
            "tie_word_embeddings": True, "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "olmo_hybrid without positions": (
        "olmo_hybrid",
        {
            **DELTA_SHAPE, "num_hidden_layers": 3, "linear_value_head_dim": 8, "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_theta": None, "rope_type": "default"}, "tie_word_embeddings": True,
        },
    ),
    "mamba with biases": ("mamba", {**STATE_SPACE_SHAPES["mamba"], "use_bias": True, "tie_word_embeddings": False}),
    "mamba2 with limits": (
        "mamba2",
        {
            **STATE_SPACE_SHAPES["mamba2"], "time_step_limit": [0.9, 1.4], "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba with biases": (
        "bamba",
        {**STATE_SPACE_SHAPES["bamba"], **dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias"), True)},
    ),
    "granitemoehybrid with rotary positions": (
        "granitemoehybrid",
        {
            **STATE_SPACE_SHAPES["granitemoehybrid"], "position_embedding_type": "rope", "tie_word_embeddings": True,
            "time_step_limit": [0.5, float("inf")],
        },
    ),
    **MIXTURES,
}  # fmt: skip


def _in_threes(fields: dict[str, Any]) -> dict[str, Any]:
    if "n_head" in fields:
        return {**fields, "n_head": 6, "n_embd": 48}
    mixer = {"num_heads": 12, "mamba_num_heads": 12, "mamba_n_heads": 12, "n_groups": 3, "mamba_n_groups": 3}
    mixer |= {"linear_num_value_heads": 6, "linear_num_key_heads": 3}
    fields = {**fields, **{name: number for name, number in mixer.items() if name in fields}, "hidden_size": 48}
    if "num_attention_heads" not in fields:
        return fields
    shared = max(1, fields["num_key_value_heads"] * 3 // 2)
    return {**fields, "num_attention_heads": 6, "num_key_value_heads": shared}


IN_THREES = {f"{name} in threes": (kind, _in_threes(fields)) for name, (kind, fields) in FAMILIES.items()}
"""The models of `FAMILIES`, with heads that three ranks can share."""


class InFloat64(TorchFunctionMode):
    """Mode that keeps float64 tensors in float64. The norms and the routers of `transformers` otherwise convert every
    tensor to float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        converts = func in (torch.Tensor.to, torch.Tensor.type) and torch.float32 in args[1:]
        if (func is torch.Tensor.float or converts) and args[0].dtype == torch.float64:
            return args[0]
        if kwargs.get("dtype") is torch.float32 and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def make(folder: Path, name: str, **saving: Any) -> None:
    """Write a model of `FAMILIES` or `IN_THREES` with random weights, and a tokenizer."""
    write_model(folder, *(FAMILIES | IN_THREES)[name], **saving)


def write_model(folder: Path, model_type: str, fields: dict[str, Any], **saving: Any) -> None:
    """Write a model with the fields of its `config.json`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, vocab_size=V, bos_token_id=None, eos_token_id=0, pad_token_id=None, **fields)
    )
    write_random(model, folder, **saving)
    if model_type == "olmo_hybrid":
        name_as_released(folder, fields)


def name_as_released(folder: Path, fields: dict[str, Any]) -> None:
    """Rewrite the tensors of an OLMo hybrid as in the released files. `transformers` writes the taps in three tensors
    of about equal sizes, and names the norm of attention as another norm.
    """
    tensors = load_file(path := folder / "model.safetensors")
    keys = fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
    sizes = [keys, keys, fields["linear_num_value_heads"] * fields["linear_value_head_dim"]]
    for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        joined = torch.cat([tensors[each] for each in names])
        tensors.update(zip(names, (each.clone() for each in joined.split(sizes)), strict=True))
    for name in [name for name in tensors if name.endswith("post_feedforward_layernorm.weight")]:
        start = name.removesuffix("post_feedforward_layernorm.weight")
        tensors[f"{start}post_attention_layernorm.weight"] = tensors.pop(f"{start}feedforward_layer_norm.weight")
    save_file(tensors, path, {"format": "pt"})


def write_random(model: Any, folder: Path, *, wordpiece: bool = False, **saving: Any) -> None:
    """Write a model of `transformers` with random weights, and a tokenizer: a byte-level BPE, or a WordPiece as real
    encoders have. No norm is the identity and no bias is zero.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2).add_(1.0 if parameter.dim() == 1 else 0.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    model.save_pretrained(folder, **saving)
    objective = Objective.MASKED if wordpiece else Objective.CAUSAL
    text = "the quick brown fox jumps over the lazy dog " * 50
    Tokenizer.train([text], vocab_size=V, objective=objective).save(folder / "tokenizer.json")


IN_FLOAT64: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
"""Options of `from_pretrained`. The grouped products of experts, which are the default, have no float64."""


def their_model(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    options = IN_FLOAT64 if dtype == torch.float64 else {"dtype": dtype}
    return in_one_type(AutoModelForCausalLM.from_pretrained(folder, **options), dtype)


def in_one_type(model: Any, dtype: torch.dtype) -> Any:
    """The model with all parameters in one type. `transformers` keeps the decay rates of OLMo hybrid in float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def their_logits(folder: Path, dtype: torch.dtype, tokens: Tensor = TOKENS) -> Tensor:
    """Logits [B, S, V] that `transformers` computes. If `dtype` is float64, intermediate results are float64, too."""
    if dtype == torch.float64:
        with InFloat64():
            return their_model(folder, dtype)(tokens).logits
    return their_model(folder, dtype)(tokens).logits


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of a folder's `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def parameters_in_session(request: pytest.FixtureRequest, test: Callable[..., None]) -> list[dict[str, Any]]:
    """Parameters of the cases of a test that this session runs, so that a fixture computes nothing for other cases."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    return [dict(item.callspec.params) for item in items if item.function is test]
