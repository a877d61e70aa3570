"""`config.json` of published models, both ways, and what a run takes from it."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import ConfigError, ModelConfig, dump_toml, load_run
from crosscut.config.checks import listed
from crosscut.config.published.families import AS_OTHERS, FAMILIES
from crosscut.config.published.folders import (
    Published,
    begin_id,
    first_position_of,
    published_table,
    read_published,
    reason_against_export,
)
from tests.refusals import refusal

GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 32, "n_head": 4,
    "n_inner": None, "vocab_size": 300, "n_positions": 64, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new", "resid_pdrop": 0.25, "eos_token_id": 7,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ROTARY = {"positions": "rotary", "norm": "rms", "layers": ("attention swiglu",), "biases": "none"}
OURS = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "mlp_size": 48, "vocab_size": 300,
    "max_sequence_length": 64, "norm_epsilon": 1e-6, "rotary_base": 500000.0, "tied": False, "dropout": 0.0, **ROTARY,
}  # fmt: skip
"""Settings of the model that `LLAMA` describes."""


def write(folder: Path, table: dict[str, Any], **more: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**table, **more}), encoding="utf-8")
    return folder


@pytest.fixture
def read(tmp_path):
    def published(table: dict[str, Any], **more: Any) -> Published:
        return read_published(write(tmp_path, table, **more))

    return published


def test_gpt2_is_the_default_model(read):
    ours = ModelConfig(
        num_layers=2, hidden_size=32, num_heads=4, vocab_size=300, max_sequence_length=64, dropout=0.25
    )  # fmt: skip
    assert read(GPT2).model == ours
    assert read(GPT2).stops == (7,)


def test_llama_has_rotary_positions_and_its_own_sizes(read):
    assert read(LLAMA).model == ModelConfig(**OURS)
    assert read(LLAMA, attention_bias=True, mlp_bias=True).model == ModelConfig(**{**OURS, "biases": "all"})
    assert read(LLAMA, head_dim=16).model.head_size == 16
    assert read(LLAMA, num_key_value_heads=None).model.num_kv_heads == 4


def test_qwens_have_biases_or_norms(read):
    assert read(LLAMA, model_type="qwen2").model == ModelConfig(**{**OURS, "biases": "qkv"})
    assert read(LLAMA, model_type="qwen3").model == ModelConfig(**{**OURS, "qk_norm": True, "head_size": 128})


@pytest.mark.parametrize(
    "more",
    [{"rope_scaling": LLAMA3_ROPE}, {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, **LLAMA3_ROPE}}],
    ids=["older files", "newer files"],
)
def test_the_stretch_of_llama_3_is_read(read, more):
    assert read(LLAMA, **more).model == ModelConfig(**OURS, rotary_factor=8.0, rotary_original_length=8192)


@pytest.mark.parametrize(
    ("rope", "ours"),
    [
        ({"type": "linear", "factor": 2.0}, {"rotary_scaling": "linear", "rotary_factor": 2.0}),
        (
            {"type": "dynamic", "factor": 4.0},
            {
                "rotary_scaling": "dynamic", "rotary_factor": 4.0, "rotary_original_length": 64,
                "max_sequence_length": 256,
            },
        ),
        (YARN_ROPE, {"rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_length": 16}),
        (
            {**YARN_ROPE, "beta_fast": 32, "beta_slow": None, "mscale": 1.0, "mscale_all_dim": 1.0},
            {
                "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_length": 16,
                "rotary_attention_factor": 1.0,
            },
        ),
        ({"type": "linear", "factor": 1.0}, {}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_scaled_rotations_are_read(read, rope, ours):
    """A file with dynamic scaling gives the length of the training, and a model reads `factor` times as many tokens."""
    assert read(LLAMA, rope_scaling=rope).model == ModelConfig(**{**OURS, **ours})


def test_a_window_limits_the_sequence(read):
    assert read(LLAMA, model_type="mistral", sliding_window=16).model.max_sequence_length == 16
    assert read(LLAMA, model_type="mistral", sliding_window=None).model.max_sequence_length == 64
    assert read(LLAMA, sliding_window=16).model.max_sequence_length == 64  # as in `transformers`
    assert read(LLAMA, model_type="qwen2", sliding_window=16, use_sliding_window=False).model.max_sequence_length == 64
    assert read(LLAMA, model_type="qwen2", sliding_window=16, use_sliding_window=True).model.max_sequence_length == 16


def test_a_window_that_is_not_told_is_that_of_transformers(read):
    long = {**LLAMA, "max_position_embeddings": 32768}
    assert read(long, model_type="mistral").model.max_sequence_length == 4096
    assert read(long, model_type="mistral", sliding_window=None).model.max_sequence_length == 32768
    assert read(long, model_type="qwen3", use_sliding_window=True).model.max_sequence_length == 4096
    assert read(long, model_type="qwen3").model.max_sequence_length == 32768
    assert read(long).model.max_sequence_length == 32768
    assert read(LLAMA, model_type="mistral").model.max_sequence_length == 64


def test_ends_of_text_of_both_files_are_stops(read, tmp_path):
    assert read(LLAMA).stops == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 5]}', encoding="utf-8")
    assert read(LLAMA, eos_token_id=5).stops == (5, 9)


YARN = "rope_type = 'yarn', factor = 4.0, original_max_position_embeddings = 16"
LLAMA3 = "rope_type = 'llama3', high_freq_factor = 4.0, original_max_position_embeddings = 8192"
REFUSED = {
    "hidden_act = 'relu'": "`hidden_act` in `{path}` must be 'silu', but is 'relu'.",
    "rope_scaling = {type = 'longrope'}": "`rope_type` in `{path}` must be 'default', 'llama3', 'linear', 'dynamic' or "
    "'yarn', but is 'longrope'.",
    f"rope_scaling = {{{YARN}, beta_fast = 16}}": "`beta_fast` in `{path}` must be 32.0, but is 16.",
    f"rope_scaling = {{{YARN}, truncate = false}}": "`truncate` in `{path}` must be true, but is false.",
    f"rope_scaling = {{{LLAMA3}, factor = 8.0, low_freq_factor = 2.0}}": "`low_freq_factor` in `{path}` must be 1.0, "
    "but is 2.0.",
    "rope_parameters = {rope_type = 'default', partial_rotary_factor = 0.5}": "`partial_rotary_factor` in `{path}` "
    "must be 1.0, but is 0.5.",
    "attention_bias = true": "`attention_bias` in `{path}` must be false like `mlp_bias`, but is true.",
    "model_type = 'deepseek_v2'\nnum_experts_per_tok = 2\ntopk_method = 'noaux_tc'": "`topk_method` in `{path}` must "
    "be 'greedy' or 'group_limited_greedy', but is 'noaux_tc'.",
    "model_type = 'deepseek_v2'\nnum_experts_per_tok = 2\nnorm_topk_prob = true": "`norm_topk_prob` in `{path}` "
    "must be false, but is true.",
    "model_type = 'deepseek_v3'\nscoring_func = 'softmax'": "`scoring_func` in `{path}` must be 'sigmoid', but is "
    "'softmax'.",
    "model_type = 'deepseek_v3'\ntopk_method = 'greedy'": "`topk_method` in `{path}` must be 'noaux_tc', but is "
    "'greedy'.",
    "model_type = 'deepseek_v3'\nmoe_layer_freq = 2": "`moe_layer_freq` in `{path}` must be 1, but is 2.",
    "model_type = 'deepseek_v3'\nfirst_k_dense_replace = 1\nn_shared_experts = 0": "`n_shared_experts` in `{path}` "
    "must be at least 1, but is 0.",
    "model_type = 'olmoe'\nclip_qkv = 8.0": "`clip_qkv` in `{path}` must be null, but is 8.0.",
    "model_type = 'qwen2_moe'\nqkv_bias = false": "`qkv_bias` in `{path}` must be true, but is false.",
    "model_type = 'qwen3_moe'\ndecoder_sparse_step = 0": "`decoder_sparse_step` in `{path}` must be at least 1, but is "
    "0.",
    "model_type = 'jamba'\nexpert_layer_offset = 2": "`expert_layer_offset` in `{path}` must be at least 0 and below "
    "`expert_layer_period` (2), but is 2.",
    "model_type = 'nemotron_h'\nhybrid_override_pattern = 'ME'\nmoe_latent_size = 8": "`moe_latent_size` in `{path}` "
    "must be null, but is 8.",
    "model_type = 'deepseek_v3'\nfirst_k_dense_replace = 2\nrope_interleave = false": "`rope_interleave` in `{path}` "
    "must be true, but is false.",
    "model_type = 'qwen3_next'\nfull_attention_interval = 0": "`full_attention_interval` in `{path}` must be at least "
    "1, but is 0.",
    "model_type = 'qwen3_next'\nmlp_only_layers = ['all']": "`mlp_only_layers` in `{path}` must be a list of indices "
    "of layers, but is ['all'].",
    "model_type = 'qwen3_next'\nnum_experts = 0\npartial_rotary_factor = 0.5": "`partial_rotary_factor` in `{path}` "
    "must be 0.25, but is 0.5.",
    "model_type = 'olmo_hybrid'\nattention_bias = true": "`attention_bias` in `{path}` must be false, but is true.",
    "model_type = 'qwen3'\nattention_bias = true": "`attention_bias` in `{path}` must be false, but is true.",
    "quantization_config = {bits = 4}": "`quantization_config` in `{path}` must be null, but is {{'bits': 4}}.",
}
TYPES = f"`model_type` in `{{path}}` must be {listed(map(repr, FAMILIES))}, but is"
OF_THESE = ". Choose a model of one of these families."
INCOMPLETE = {
    "model_type = 'falcon_h1'\narchitectures = ['FalconH1ForCausalLM']": f"{TYPES} 'falcon_h1' (FalconH1ForCausalLM), "
    f"whose layers run attention and a state-space mixer side by side on one input{OF_THESE}",
    "model_type = 'zamba2'": f"{TYPES} 'zamba2', whose layers share one block of attention and an MLP, which also "
    f"reads the embedding{OF_THESE}",
    "model_type = 'gpt_oss'": f"{TYPES} 'gpt_oss', whose experts have biases and another gate{OF_THESE}",
    "model_type = 'deepseek_v2'": "`num_experts_per_tok` in `{path}` must be a whole number, but is missing. Correct "
    "the file.",
    "model_type = 'mixtral'\nnum_experts_per_tok = 9": "`num_experts_per_tok` in `{path}` must be at most "
    "`num_local_experts` in `{path}` (8), but is 9. Choose fewer experts per token, or have more experts. Choose "
    "another model.",
    "model_type = 'deepseek_v3'\nfirst_k_dense_replace = 1\nn_group = 7": "`n_group` in `{path}` must divide "
    "`n_routed_experts` in `{path}` (256), but is 7. Try 1, 2, 4, 8, 16, 32, 64, 128 or 256. Choose another model.",
    "model_type = 'olmo_hybrid'\nlayer_types = ['linear_attention', 'sliding_attention']": "`layer_types` in `{path}` "
    "must list only layers of the kinds 'linear_attention' or 'full_attention', but has 'sliding_attention'. Choose "
    "another model.",
    "model_type = 'nemotron_h'\nnum_hidden_layers = 3\nhybrid_override_pattern = 'M*'": (
        "`hybrid_override_pattern` in `{path}` must be a list of 3 kinds (`num_hidden_layers`), but is ['mamba', "
        "'attention']. Crosscut supports no other value. Choose another model."
    ),
    "model_type = 'nemotron_h'\nlayers_block_type = []": "`layers_block_type` in `{path}` must be a list with the kind "
    "of each layer, but is []. Crosscut supports no other value. Choose another model.",
    "model_type = 'bamba'\nattn_layer_indices = 'all'": "`attn_layer_indices` in `{path}` must be a list of indices of "
    "layers, but is 'all'. Crosscut supports no other value. Choose another model.",
    "model_type = 'mamba2'\nnum_heads = 3": "`head_dim` in `{path}` must be the size of each of 3 heads that together "
    "have 64 elements (`expand`), but is 64. Crosscut supports no other value. Choose another model.",
    "model_type = 'mamba2'\nnum_heads = 1\ntime_step_limit = [0.1, 0.01]": (
        "`time_step_limit` in `{path}` must be two numbers from 0 to infinity, the smaller one first, but is [0.1, "
        "0.01]. Crosscut supports no other value. Choose another model."
    ),
    "model_type = 'gemma'\narchitectures = ['GemmaForCausalLM']": "`model_type` in `{path}` must be 'gpt2', "
    "'gpt_bigcode', 'llama', 'mistral', 'qwen2', 'qwen3', 'olmo2', 'starcoder2', 'arcee', 'nanochat', 'bert', "
    "'roberta', 'mixtral', 'qwen2_moe', 'qwen3_moe', 'olmoe', 'granitemoe', 'deepseek_v3', 'deepseek_v2', 'mamba', "
    "'mamba2', 'nemotron_h', 'bamba', 'granitemoehybrid', 'jamba', 'qwen3_next' or 'olmo_hybrid', but is 'gemma' "
    "(GemmaForCausalLM). Choose a model of one of these families.",
    f"rope_scaling = {{{LLAMA3}, low_freq_factor = 1.0}}": "`factor` must be given in `{path}` for rope_type 'llama3', "
    "but is missing. Download the file again.",
    "rope_scaling = {type = 'linear'}": "`factor` must be given in `{path}` for rope_type 'linear', but is missing. "
    "Download the file again.",
    **{
        f"model_type = {name!r}\nnum_hidden_layers = {10**12}\n{more}": "`num_hidden_layers` in `{path}` must be at "
        "most 10,000, but is 1,000,000,000,000. Choose another model."
        for name, more in (("jamba", "num_experts = 1"), ("qwen3_next", "mlp_only_layers = []"), ("olmo_hybrid", ""))
    },
    "hidden_size = '32'": "`hidden_size` in `{path}` must be of type int, but is '32'. Correct the file.",
}
OF_BERT = {
    "hidden_act = 'relu'": "`hidden_act` in `{path}` must be 'gelu', but is 'relu'.",
    "is_decoder = true": "`is_decoder` in `{path}` must be false, but is true.",
    "position_embedding_type = 'relative_key'": "`position_embedding_type` in `{path}` must be 'absolute', but is "
    "'relative_key'.",
    "model_type = 'roberta'\npad_token_id = 0": "`pad_token_id` in `{path}` must be 1, but is 0.",
}
ADVICE = " Crosscut supports no other value. Choose another model."
BERT = {
    "model_type": "bert", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": 300, "max_position_embeddings": 64, "type_vocab_size": 2, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "more", "message"),
    [
        *((LLAMA, more, told + ADVICE) for more, told in REFUSED.items()),
        *((BERT, more, told + ADVICE) for more, told in OF_BERT.items()),
        *((LLAMA, more, told) for more, told in INCOMPLETE.items()),
    ],
)
def test_what_the_model_cannot_do_is_named(read, tmp_path, table, more, message):
    assert refusal(ConfigError, read, table, **tomllib.loads(more)) == message.format(path=tmp_path / "config.json")


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"num_experts": 0}, ("gated_delta", "gated_delta", "gated_delta", "attention", "gated_delta")),
        ({"mlp_only_layers": [0, 1, 2, 3, 4, 9], "full_attention_interval": 2}, ("gated_delta", "attention")),
        ({"decoder_sparse_step": 6, "layer_types": ["full_attention"] * 5}, ("attention",)),
        (
            {"mlp_only_layers": [1, 3], "decoder_sparse_step": 2, "full_attention_interval": 5},
            ("gated_delta",) * 4 + ("attention",),
        ),
    ],
)
def test_layers_of_qwen3_next_without_experts_are_read(read, keys, layers):
    """A layer has experts if it is not listed, if there are experts, and if its number is a multiple of the step."""
    model = read(LLAMA, model_type="qwen3_next", num_hidden_layers=5, **keys).model
    assert [model.layer(i) for i in range(5)] == [f"{layers[i % len(layers)]} swiglu" for i in range(5)]


@pytest.mark.parametrize(("number", "places"), [(3, "bbo"), (6, "bbbobb")])
def test_norms_of_olmo_hybrid_depend_on_the_layer(read, number, places):
    """Without a list, every fourth layer has attention, or the last one."""
    model = read(LLAMA, model_type="olmo_hybrid", num_hidden_layers=number).model
    assert "".join(model.norm_place_of(i)[0] for i in range(number)) == places
    assert [model.layer(i) == "attention swiglu" for i in range(number)] == [place == "o" for place in places]


@pytest.mark.parametrize(
    ("keys", "base"),
    [
        ({}, 10_000.0),
        ({"rope_parameters": None}, 10_000.0),
        ({"rope_parameters": None, "rope_theta": None}, None),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "rope_theta": 50.0}, None),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 50.0}, 50.0),
        ({"rope_parameters": {"rope_theta": 60.0}, "rope_theta": None}, 60.0),
    ],
)
def test_positions_of_olmo_hybrid_are_rotary_if_there_is_a_base(tmp_path, keys, base):
    from transformers import AutoConfig

    table = {key: value for key, value in LLAMA.items() if not key.startswith("rope")}
    table = {**table, "model_type": "olmo_hybrid", "num_key_value_heads": 2, **keys}
    (tmp_path / "config.json").write_text(json.dumps(table))
    model = read_published(tmp_path).model
    assert (model.rotary_base if model.positions == "rotary" else None) == base
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == base


def test_a_size_must_be_a_number_unless_it_follows_from_others(read, tmp_path):
    assert refusal(ConfigError, read, LLAMA, num_hidden_layers=None) == (
        f"`num_hidden_layers` in `{tmp_path / 'config.json'}` must be of type int, but is null. Correct the file."
    )
    assert read(LLAMA, model_type="qwen2", num_key_value_heads=None).model.num_kv_heads == 4


def test_a_second_name_of_a_key_has_precedence(read):
    assert read(GPT2, n_layer=1, num_hidden_layers=2) == read(GPT2)
    assert read(GPT2, max_position_embeddings=32).model.max_sequence_length == 32


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"attention_bias": 1}, "`attention_bias` in `.*` must be true or false, but is 1"),
        ({"model_type": "qwen2", "use_sliding_window": "no"}, "`use_sliding_window` in `.*` must be true or false"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"]},
            "`layer_types` in `.*` must be a list of 'full",
        ),
        ({"layer_types": "full"}, "`layer_types` in `.*` must be a list of 'full_attention', but is 'full'"),
        ({"attention_chunk_size": 8}, "`attention_chunk_size` in `.*` must be null, but is 8"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3, "problem_type": "regression"},
            "`problem_type` in `.*` must be 'single_label_classification' or null for 3 labels, but is 'regression'",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "problem_type": "multi_label"},
            "`problem_type` in `.*` must be 'regression' or null for 1 labels, but is 'multi_label'",
        ),
        ({"is_causal": None}, "`is_causal` in `.*` must be true, but is null"),
        ({"per_layer_config": {"0": {}}}, "`per_layer_config` in `.*` must be null, but is"),
        ({"rope_scaling": {"mrope_section": [1]}}, "`mrope_section` in `.*` must be null, but is"),
        ({"rope_parameters": {"full_attention": {}}}, "`full_attention` in `.*` must be null, but is"),
    ],
    ids=str,
)
def test_a_key_that_changes_the_computation_is_named(read, more, message):
    with pytest.raises(ConfigError, match=message):
        read(LLAMA, **more)


def test_keys_of_no_table_are_named_and_stop_nothing(read, tmp_path):
    found = read(LLAMA, depth="much", _private=1, rope_scaling={"beta_medium": 1, "rope_theta": 500000.0})
    path = tmp_path / "config.json"
    assert found.model == ModelConfig(**OURS)
    assert found.notices == tuple(
        f"Crosscut does not know these keys in `{path}` and ignores them: `{key}`." for key in ("depth", "beta_medium")
    )
    assert read(LLAMA, torch_dtype="float16", use_cache=False, initializer_range=3).notices == ()


WRONG_TYPES = [
    ({"model_type": []}, "`model_type` in `{path}` must be 'gpt2'"),
    ({"model_type": {"a": 1}}, "`model_type` in `{path}` must be 'gpt2'"),
    ({"model_type": 7, "architectures": 5}, "`model_type` in `{path}` must be 'gpt2'"),
    ({"rope_theta": "abc"}, "`rope_theta` in `{path}` must be a number, but is 'abc'."),
    ({"rope_theta": [1]}, "`rope_theta` in `{path}` must be a number, but is [1]."),
    ({"rope_theta": 10**400}, "`rope_theta` in `{path}` must be a number, but is 1"),
    ({"rope_theta": float("inf")}, "`rope_theta` in `{path}` must be a number, but is inf."),
    ({"rope_theta": -1}, "`rope_theta` in `{path}` must be above 0 and finite, but is -1.0."),
    ({"rope_scaling": "abc"}, "`rope_scaling` in `{path}` must be an object, but is 'abc'."),
    ({"rope_parameters": 3}, "`rope_parameters` in `{path}` must be an object, but is 3."),
    ({"rope_scaling": {**LLAMA3_ROPE, "factor": "8"}}, "`factor` in `{path}` must be a number, but is '8'."),
    ({"rope_scaling": {**LLAMA3_ROPE, "factor": None}}, "`factor` in `{path}` must be a number, but is None."),
    ({"rms_norm_eps": 10**400}, "`rms_norm_eps` in `{path}` must be a number, but is 1"),
    ({"model_type": "mistral", "sliding_window": "x"}, "`sliding_window` in `{path}` must be a whole number, but is"),
    ({"num_hidden_layers": 10**9}, "`num_hidden_layers` in `{path}` must be at most 10,000, but is 1,000,000,000."),
    ({"hidden_size": 2**40}, "`hidden_size` in `{path}` must be at most 1,048,576, but is 1,099,511,627,776."),
    ({"num_attention_heads": 0}, "`num_attention_heads` in `{path}` must be at least 1, but is 0."),
    ({"vocab_size": 10**4000}, "`vocab_size` in `{path}` must be at most 2,147,483,647, but is 1"),
]


@pytest.mark.parametrize(("more", "message"), WRONG_TYPES, ids=lambda value: str(value)[:40])
def test_value_of_another_type_or_size_is_named(read, tmp_path, more, message):
    assert refusal(ConfigError, read, LLAMA, **more).startswith(message.format(path=tmp_path / "config.json"))


@pytest.mark.parametrize("key", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_variants_of_gpt2_are_named(read, key):
    with pytest.raises(ConfigError, match=f"`{key}` in `.*` must be false, but is true"):
        read(GPT2, **{key: True})


def test_files_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "config.json"
    for content, must in ((None, "be a readable file"), ("{", "be valid JSON"), ("[]", "be a JSON object")):
        if content is not None:
            path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=f"`{path}` must {must}, but "):
            read_published(tmp_path)


STARCODER2 = {
    "model_type": "starcoder2", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 64,
    "norm_epsilon": 1e-6, "rope_theta": 500000.0, "residual_dropout": 0.25,
}  # fmt: skip


def test_starcoder2_is_gpt2_with_rotary_positions(read):
    ours = {**OURS, "norm": "layer", "layers": ("attention gelu",), "biases": "all", "tied": True, "dropout": 0.25}
    assert read(STARCODER2).model == ModelConfig(**ours)
    assert read(STARCODER2, use_bias=False).model == ModelConfig(**{**ours, "biases": "none"})
    assert read(STARCODER2, sliding_window=16).model.max_sequence_length == 16


MODERN = {
    "layers": ("attention relu2",), "qk_norm": True, "norm_affine": False, "embedding_norm": True,
    "logit_softcap": 15.0, "tied": False,
}  # fmt: skip


@pytest.mark.parametrize("change", [{}, {"logit_softcap": 0.0}, {"tied": True, "head_size": 16, "logit_softcap": 30.0}])
def test_nanochat_is_read_again(tmp_path, change):
    ours = ModelConfig(**{**OURS, **MODERN, **change})
    assert reason_against_export(ours) == ""
    table = published_table(ours, dtype="float32", begin=2, stops=(3,))
    assert (table["model_type"], table["hidden_act"]) == ("nanochat", "relu2")
    assert table["final_logit_softcapping"] == (ours.logit_softcap or None), "a cap of 0 would give no numbers"
    assert read_published(write(tmp_path, table)).model == ours
    del table["final_logit_softcapping"]
    assert read_published(write(tmp_path, table)).model.logit_softcap == 15.0, "as in `transformers`"


def test_what_keeps_a_modern_model_from_nanochat_is_told() -> None:
    assert reason_against_export(ModelConfig(**{**OURS, **MODERN, "biases": "all", "layers": ("attention gelu",)})) == (
        "`model.layers` must be ['attention relu2'] and `model.biases` must be 'none' in a Hugging Face model of the "
        "closest family, 'nanochat', but `model.layers` is ['attention gelu'] and `model.biases` is 'all'"
    )


ENCODER = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "mlp_size": 48, "vocab_size": 300,
    "max_sequence_length": 64, "attention": "bidirectional", "norm_place": "after", "token_types": 2,
    "layers": ("attention gelu_exact",), "norm_epsilon": 1e-12, "dropout": 0.25,
}  # fmt: skip
"""The values of `BERT`."""


def test_bert_reads_in_both_directions(read):
    assert read(BERT).model == ModelConfig(**ENCODER)
    assert read(BERT, layer_norm_eps=1e-7, type_vocab_size=1).model == ModelConfig(
        **{**ENCODER, "norm_epsilon": 1e-7, "token_types": 1}
    )


def test_positions_of_roberta_begin_after_that_of_padding(read, tmp_path):
    assert read(BERT, model_type="roberta", max_position_embeddings=66).model == ModelConfig(**ENCODER)
    assert first_position_of(tmp_path) == 2
    read(BERT)
    assert first_position_of(tmp_path) == 0


def test_roberta_without_a_position_is_named(read, tmp_path):
    assert refusal(ConfigError, read, BERT, model_type="roberta", max_position_embeddings=2) == (
        f"`max_position_embeddings` in `{tmp_path / 'config.json'}` must be at least 3, but is 2. Choose another model."
    )


def test_heads_follow_the_architecture(read):
    masked = {**ENCODER, "head": "masked_tokens"}
    assert read(BERT, architectures=["BertForMaskedLM"]).model == ModelConfig(**masked)
    assert read(BERT, architectures=["BertForPreTraining"]).model == ModelConfig(**masked, sentence_order=True)
    untied = read(BERT, architectures=["BertForPreTraining"], tie_word_embeddings=False)
    assert untied.model == ModelConfig(**ENCODER)
    for other in (["BertForTokenClassification"], [], "BertForMaskedLM", [3]):
        assert read(BERT, architectures=other).model == ModelConfig(**ENCODER)


def test_heads_of_tasks_follow_the_architecture(read):
    encoder = ModelConfig(**ENCODER)
    assert read(BERT, architectures=["BertForQuestionAnswering"]).model == encoder.with_head("spans")
    assert read(BERT, architectures=["BertForMultipleChoice"]).model == encoder.with_head("choice")
    classes = {"architectures": ["BertForSequenceClassification"]}
    two, named = read(BERT, **classes), read(BERT, **classes, id2label={"0": "no", "1": "perhaps", "2": "yes"})
    assert (two.model, two.labels) == (encoder.with_head("classes", num_classes=2), ("LABEL_0", "LABEL_1"))
    assert (named.model, named.labels) == (encoder.with_head("classes", num_classes=3), ("no", "perhaps", "yes"))
    apart = read(BERT, **classes, id2label={"0": "no", "1": "yes"}, num_labels=3)
    assert apart.labels == ("LABEL_0", "LABEL_1", "LABEL_2"), "as in transformers, which ignores other names"
    for one in ({"id2label": {"0": "score"}}, {"num_labels": 1}, {"num_labels": 1, "problem_type": "regression"}):
        assert read(BERT, **classes, **one).model == encoder.with_head("number")
    several = "multi_label_classification"
    for other in (
        {"problem_type": several},
        {"problem_type": "regression"},
        {"num_labels": 1, "problem_type": several},
    ):
        assert read(BERT, **classes, **other).model == encoder
    with pytest.raises(ConfigError, match=r"^`id2label` in `.*` must map the numbers from 0 to 1 to names, but is \{"):
        read(BERT, **classes, id2label={"1": "no", "2": "yes"})


def test_names_of_classes_are_written_and_as_many_as_the_classes(tmp_path):
    model = ModelConfig(**ENCODER).with_head("classes", num_classes=2)
    given = {"dtype": "float32", "begin": 2, "stops": (3,)}
    found = read_published(write(tmp_path, published_table(model, **given, labels=("no", "yes"))))
    assert (found.model, found.labels) == (model, ("no", "yes"))
    assert published_table(model, **given)["label2id"] == {"LABEL_0": 0, "LABEL_1": 1}
    assert refusal(ConfigError, published_table, model, **given, labels=("no", "no")) == (
        "`labels` must be 2 different names, one for each class, but are ['no', 'no']. Give one name for each class, "
        "or no names."
    )


def test_a_choice_of_a_decoder_has_no_published_form() -> None:
    decoder = ModelConfig(num_layers=1, hidden_size=32, num_heads=2, vocab_size=100)
    assert not reason_against_export(decoder.with_head("classes", num_classes=2))
    assert reason_against_export(decoder.with_head("choice")).startswith(
        "`model.head` must be 'next_token' in a Hugging Face model of the closest family, 'gpt2', but is "
    )


SMALL_GPT2 = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "mlp_size": 100, "vocab_size": 300}
SMALL_STARCODER2 = {**OURS, "norm": "layer", "layers": ("attention gelu",), "biases": "all", "dropout": 0.5}
OF_STARCODER2 = {"model_type": "starcoder2", "attention_dropout": 0.5}
WRITTEN = [
    (OURS, {}, {"model_type": "llama", "bos_token_id": 2, "eos_token_id": [3, 4], "torch_dtype": "float32"}),
    (OURS, {"biases": "all"}, {}),
    (OURS, {"biases": "qkv"}, {"model_type": "qwen2"}),
    (OURS, {"qk_norm": True, "head_size": 16}, {"model_type": "qwen3"}),
    (OURS, {"tied": True}, {}),
    (OURS, {"rotary_factor": 8.0, "rotary_original_length": 4096}, {}),
    (OURS, {"num_kv_heads": 1}, {}),
    (SMALL_GPT2, {"tied": False}, {"model_type": "gpt2"}),
    (SMALL_GPT2, {"num_kv_heads": 1}, {"model_type": "gpt_bigcode", "multi_query": True}),
    (SMALL_GPT2, {"num_heads": 1}, {"model_type": "gpt2"}),
    (SMALL_STARCODER2, {}, OF_STARCODER2),
    (SMALL_STARCODER2, {"biases": "none", "tied": False}, OF_STARCODER2),
    (SMALL_STARCODER2, {"num_kv_heads": 1, "head_size": 16}, OF_STARCODER2),
    (ENCODER, {}, {"model_type": "bert", "attention_probs_dropout_prob": 0.25}),
    (ENCODER, {"token_types": 1}, {}),
    (ENCODER, {"norm_epsilon": 1e-5, "dropout": 0.0}, {"attention_probs_dropout_prob": 0.0}),
    (ENCODER, {"head": "masked_tokens"}, {"model_type": "bert"}),
    (ENCODER, {"head": "masked_tokens", "sentence_order": True}, {}),
]


@pytest.mark.parametrize(("base", "change", "written"), WRITTEN)
def test_what_is_written_is_read_again(tmp_path, base, change, written):
    ours = ModelConfig(**{**base, **change})
    table = published_table(ours, dtype="float32", begin=2, stops=(3, 4))
    assert written.items() <= table.items()
    assert read_published(write(tmp_path, table)) == Published(ours, (3, 4))


def test_families_that_are_written_as_others_are_on_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "pretrained.md").read_text(encoding="utf-8").replace("\n", " ")
    told = [f"`{name}` as `{other}`" for name, other in AS_OTHERS.items()]
    assert f"which they equal: {', '.join(told[:-1])} and {told[-1]}." in page


SIZES = {"number": 4, "size": 24}
EXPERTS = {"layers": ("attention experts",), "experts": SIZES}
SHARED = {**SIZES, "shared_size": 48}
V3 = {**SHARED, "scores": "sigmoid", "balance_bias": True, "scaling": 2.5}
LATENT = {
    "latent_attention": {"query_rank": 12, "key_value_rank": 10, "nope_size": 6, "rope_size": 8, "value_size": 5},
    "num_kv_heads": 0, "layers": ("latent_attention swiglu", "latent_attention experts"),
}  # fmt: skip
OF_MIXTURES = [
    (EXPERTS, {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 24}),
    ({**EXPERTS, "qk_norm": True}, {"model_type": "qwen3_moe", "norm_topk_prob": True, "mlp_only_layers": []}),
    (
        {**EXPERTS, "qk_norm": True, "layers": ("attention swiglu", "attention experts")},
        {"model_type": "qwen3_moe", "mlp_only_layers": [0], "intermediate_size": 48, "moe_intermediate_size": 24},
    ),
    (
        {**EXPERTS, "experts": {**SHARED, "shared_gate": True}, "biases": "qkv"},
        {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48},
    ),
    (
        {
            **EXPERTS,
            "experts": {**EXPERTS["experts"], "renormalise": False},
            "qk_norm": True,
            "qk_norm_over": "all_heads",
        },
        {"model_type": "olmoe", "norm_topk_prob": False},
    ),
    ({**EXPERTS, "attention_multiplier": 0.1}, {"model_type": "granitemoe", "attention_multiplier": 0.1}),
    (
        {**LATENT, "experts": V3},
        {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "n_shared_experts": 2, "aux_loss_alpha": 0.01},
    ),
    (
        {**LATENT, "experts": {**SHARED, "renormalise": False, "groups": 2, "group_top": 1}},
        {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 2},
    ),
]


@pytest.mark.parametrize(("change", "written"), OF_MIXTURES)
def test_what_is_written_of_a_mixture_is_read_again(tmp_path, change, written):
    """A family whose layers all have experts gives no width of an MLP."""
    ours = ModelConfig(**{**OURS, **change})
    table = published_table(ours, dtype="float32", begin=2, stops=(3, 4))
    assert written.items() <= table.items()
    again = read_published(write(tmp_path, table)).model
    assert dataclasses.replace(again, mlp_size=ours.mlp_size) == ours


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers": ("attention experts", "attention swiglu")}, "`model.layers` must be ['attention experts'] in a"),
        ({"experts": {**SIZES, "scores": "sigmoid"}}, "`model.experts.scores` must be 'softmax' in a"),
        ({"experts": {**SHARED, "scaling": 2.0}}, "`model.experts.scaling` must be 1.0 in a"),
        (
            {**LATENT, "experts": V3, "layers": ("latent_attention experts", "latent_attention swiglu")},
            "`model.layers` must be a list in which only the first layers have no experts in a",
        ),
        (
            {**LATENT, "experts": {**V3, "shared_size": 36}},
            "`model.experts.shared_size` must be a multiple of 24 (`model.experts.size`) in a",
        ),
    ],
)
def test_what_keeps_a_mixture_from_all_families_is_told(change, told):
    assert reason_against_export(ModelConfig(**{**OURS, **EXPERTS, **change})).startswith(told)


def test_keys_of_experts_without_experts_change_nothing(read):
    dense = {"model_type": "qwen3_moe", "num_experts": 0}
    assert read(LLAMA, **dense).model == read(LLAMA, model_type="qwen3", head_dim=8).model
    assert read(LLAMA, **dense, moe_intermediate_size=8).model == read(LLAMA, **dense).model


def test_a_jamba_of_attention_only_is_written_as_a_granite(read, tmp_path):
    jamba = {**LLAMA, "model_type": "jamba", "num_experts": 1, "attn_layer_period": 1, "attn_layer_offset": 0}
    model = read(jamba).model
    table = published_table(model, dtype="float32", begin=0, stops=(1,))
    assert table["model_type"] == "granitemoehybrid"
    assert all(value for key, value in table.items() if key.startswith("mamba") and type(value) is int)
    again = read_published(write(tmp_path, table)).model
    assert [getattr(again, name) for name in ("layers", "positions")] == [model.layers, model.positions]


def test_one_end_of_text_is_a_number(tmp_path):
    table = published_table(ModelConfig(**OURS), dtype="bfloat16", begin=2, stops=(3,))
    assert (table["eos_token_id"], table["torch_dtype"]) == (3, "bfloat16")


def test_what_keeps_an_encoder_from_bert_is_told() -> None:
    assert reason_against_export(ModelConfig(**{**ENCODER, "token_types": 0})) == (
        "`model.token_types` must be 2 in a Hugging Face model of the closest family, 'bert', but is 0"
    )


def test_gpt_bigcode_is_read_with_multiple_queries_only(read):
    with pytest.raises(ConfigError, match=r"`multi_query` in `.*` must be true, but is false"):
        read(GPT2, model_type="gpt_bigcode", multi_query=False)


@pytest.mark.parametrize(
    ("change", "name", "family", "wanted"),
    [
        ({"layers": ("attention gelu",)}, "layers", "llama", "\\['attention swiglu'\\]"),
        ({"biases": "qkv", "qk_norm": True}, "qk_norm", "qwen2", "false"),
        ({"norm": "layer"}, "norm", "llama", "'rms'"),
    ],
)
def test_a_model_of_no_family_is_named(change, name, family, wanted):
    with pytest.raises(ConfigError, match=rf"`model.{name}` must be {wanted} in a .* closest family, '{family}'"):
        published_table(ModelConfig(**{**OURS, **change}), dtype="float32", begin=0, stops=(0,))


def test_what_keeps_a_model_from_all_families_can_be_asked_before():
    grouped = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, vocab_size=300)
    told = "`model.num_kv_heads` must be 4 in a Hugging Face model of the closest family, 'gpt2', but is 2"
    assert reason_against_export(grouped) == told
    assert (
        refusal(ConfigError, published_table, grouped, dtype="float32", begin=0, stops=(0,))
        == f"{told}. Crosscut can export only models of the families that it knows."
    )
    assert reason_against_export(ModelConfig(**OURS)) == ""
    bare = ModelConfig(**OURS, norm_affine=False, embedding_norm=True)
    assert reason_against_export(bare) == (
        "`model.norm_affine` must be true and `model.embedding_norm` must be false in a Hugging Face model of the "
        "closest family, 'llama', but `model.norm_affine` is false and `model.embedding_norm` is true"
    )
    assert reason_against_export(ModelConfig(**OURS, attention_gate=True)) == (
        "`model.attention_gate` must be false in a Hugging Face model of the closest family, 'llama', but is true"
    )
    assert reason_against_export(ModelConfig(**OURS, logit_softcap=15.0, qk_norm_kind="layer", qk_norm=True)) == (
        "`model.qk_norm` must be false and `model.logit_softcap` must be 0.0 in a Hugging Face model of the closest "
        "family, 'llama', but `model.qk_norm` is true and `model.logit_softcap` is 15.0"
    )


# A run that starts from a folder


def start_from(folder: Path, **sections: Any) -> dict[str, Any]:
    return {"training": {"initialize_from": str(folder), "sequence_length": 32}, **sections}


def test_a_run_takes_model_and_tokenizer_of_the_folder(tmp_path):
    write(tmp_path, LLAMA)
    run = load_run(start_from(tmp_path), ["data.text=book.txt", "model.dropout=0.5"])
    assert run.model == ModelConfig(**{**OURS, "dropout": 0.5})
    assert run.data.tokenizer == str(tmp_path / "tokenizer.json")
    assert load_run(start_from(tmp_path, data={"tokens": "shards"})).data.tokenizer == "", "they are there already"
    own = load_run(start_from(tmp_path, data={"text": ["book.txt"], "tokenizer": "own.json"}))
    assert own.data.tokenizer == "own.json"


def test_a_model_that_agrees_may_be_given(tmp_path):
    write(tmp_path, LLAMA)
    assert load_run(start_from(tmp_path, model={**OURS, "vocab_size": 0})).model == ModelConfig(**OURS)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layers=3", ("`model.num_layers` must be 2, but is 3. The run starts from the model in `{0}` "
         "(`training.initialize_from`). Remove `model.num_layers`.")),
        ("model.positions=learned", ("`model.positions` must be 'rotary', but is 'learned'. The run starts from the "
         "model in `{0}` (`training.initialize_from`). Remove `model.positions`.")),
        ("model.tied=true", ("`model.tied` must be false, but is true. The run starts from the model in `{0}` "
         "(`training.initialize_from`). Remove `model.tied`.")),
    ],
)  # fmt: skip
def test_a_model_that_differs_is_named(tmp_path, override, message):
    write(tmp_path, LLAMA)
    assert refusal(ConfigError, load_run, start_from(tmp_path), [override]) == message.format(tmp_path)


LONGER = ["model.max_sequence_length=256", "model.rotary_scaling=yarn", "model.rotary_factor=4",
          "model.rotary_original_length=64"]  # fmt: skip


def test_a_run_may_lengthen_the_sequences_of_its_folder(tmp_path):
    write(tmp_path, LLAMA)
    longer = {"max_sequence_length": 256, "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_length": 64}
    run = load_run(start_from(tmp_path), [*LONGER, "training.sequence_length=256"])
    assert run.model == ModelConfig(**{**OURS, **longer})


@pytest.mark.parametrize(
    ("table", "window"), [(GPT2, {}), (LLAMA, {"model_type": "mistral", "sliding_window": 16})], ids=["GPT-2", "window"]
)
def test_positions_and_windows_of_a_folder_have_an_end(tmp_path, table, window):
    write(tmp_path, table, **window)
    with pytest.raises(ConfigError, match=r"^`model.max_sequence_length` must be \d+, but is 256. The run starts from"):
        load_run(start_from(tmp_path), ["model.max_sequence_length=256"])


def test_false_is_not_left_out(tmp_path):
    write(tmp_path, LLAMA, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"`model\.tied` must be true"):
        load_run(start_from(tmp_path), ["model.tied=false"])


def test_an_unknown_key_beside_the_folder_is_named(tmp_path):
    write(tmp_path, LLAMA)
    with pytest.raises(ConfigError, match=r"`model.num_layer` must be a key of `model`"):
        load_run(start_from(tmp_path), ["model.num_layer=2"])


def test_a_resolved_run_does_without_the_folder(tmp_path):
    write(tmp_path, LLAMA)
    run = load_run(start_from(tmp_path, data={"text": ["book.txt"]}))
    (tmp_path / "config.json").unlink()
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(run), encoding="utf-8")
    assert load_run(path) == run
    with pytest.raises(ConfigError, match=r"config.json` must be a readable file, but is not: No such file"):
        load_run(start_from(tmp_path))


def test_the_token_that_begins_a_text_is_the_config_files(tmp_path):
    assert begin_id(tmp_path) is None
    for given, found in ((None, None), (7, 7), (0, 0)):
        (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": given}))
        assert begin_id(tmp_path) == found
    for wrong in (-1, True, "7", [7]):
        (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": wrong}))
        with pytest.raises(ConfigError, match=r"^`bos_token_id` in `.*` must be an id from 0 to 2147483647, but is "):
            begin_id(tmp_path)
