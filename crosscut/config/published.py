"""A published model's `config.json`, as Hugging Face has it, and the `ModelConfig` that says the same.

One table serves both directions: a key of theirs for each field of ours, and what a family fixes. Whatever in a file
changes what the model computes and has no field here is an error that names it.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from crosscut.config.checks import listed
from crosscut.config.errors import ConfigError
from crosscut.config.model import ModelConfig

MODEL_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"

_SLIDING_WINDOW = 4096
"""What `transformers` takes for the families with such a window where a file lacks the key. Null is full attention."""

LOW_FREQUENCY, HIGH_FREQUENCY = 1.0, 4.0
"""Turns in the original length below which Llama 3 slows a rotation down, and above which it leaves it."""


@dataclass(frozen=True)
class Published:
    """What a published model says of itself."""

    model: ModelConfig
    stops: tuple[int, ...]
    """Ids that end what it writes, the model's own first."""


@dataclass(frozen=True)
class _Family:
    """What Hugging Face calls a `model_type`."""

    model_type: str
    architecture: str
    keys: Mapping[str, str]
    """Their keys, by our fields."""
    fixed: Mapping[str, Any]
    """Our fields that the family decides."""
    defaults: Mapping[str, Any]
    """Our fields whose value a file may leave out, where it is not ours."""
    required: Mapping[str, tuple[Any, ...]]
    """What else changes the computation: the values that we can do, the first being what a missing key means."""


_LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "mlp_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
_LLAMA_FIXED = {"positions": "rotary", "norm": "rms", "mlp": "swiglu", "biases": "none", "qk_norm": False}
_LLAMA_DEFAULTS = {"norm_epsilon": 1e-6, "tied": False, "dropout": 0.0}
_LLAMA_REQUIRED = {"hidden_act": ("silu",), "quantization_config": (None,)}

_GPT2 = _Family(
    "gpt2",
    "GPT2LMHeadModel",
    {
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_heads": "n_head",
        "mlp_size": "n_inner",
        "vocab_size": "vocab_size",
        "max_sequence_length": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
        "dropout": "resid_pdrop",
    },
    {"positions": "learned", "norm": "layer", "mlp": "gelu", "biases": "all", "qk_norm": False},
    {"tied": True},
    {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
)
_BIGCODE = dataclasses.replace(
    _GPT2,
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    fixed={**_GPT2.fixed, "num_kv_heads": 1},
    required={
        "activation_function": ("gelu_pytorch_tanh", "gelu_new"),
        "multi_query": (True,),
        "scale_attn_weights": (True,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
)
_LLAMA = _Family("llama", "LlamaForCausalLM", _LLAMA_KEYS, _LLAMA_FIXED, _LLAMA_DEFAULTS, _LLAMA_REQUIRED)
_MISTRAL = dataclasses.replace(_LLAMA, model_type="mistral", architecture="MistralForCausalLM")
_QWEN2 = dataclasses.replace(
    _LLAMA, model_type="qwen2", architecture="Qwen2ForCausalLM", fixed={**_LLAMA_FIXED, "biases": "qkv"}
)
_QWEN3 = dataclasses.replace(
    _LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={**_LLAMA_FIXED, "qk_norm": True},
    required={**_LLAMA_REQUIRED, "attention_bias": (False,)},
)
_ALL = (_GPT2, _BIGCODE, _LLAMA, _MISTRAL, _QWEN2, _QWEN3)
FAMILIES = MappingProxyType({family.model_type: family for family in _ALL})
"""By `model_type`. SmolLM is a Llama; Mistral is one with a window; GPT-BigCode is GPT-2 with multiple queries."""


def is_published(folder: Path) -> bool:
    """Whether a folder holds a published model's configuration."""
    return (folder / MODEL_FILE).is_file()


def read_published(folder: Path) -> Published:
    """What the files of a folder say. Raises `ConfigError` naming what Crosscut's model cannot do."""
    table = _Table(folder / MODEL_FILE)
    family = _family_of(table)
    for key, allowed in family.required.items():
        table.require(key, allowed)
    fields = {**family.defaults, **{ours: table.take(key, ours) for ours, key in family.keys.items() if key in table}}
    fields.update(family.fixed)
    if fields["positions"] == "rotary":
        fields.update(_biases(table, family), **_rotary(table), **_window(table, family, fields))
    for name in ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_sequence_length"):
        if name not in fields:
            raise ConfigError(f"`{family.keys[name]}` must be given in `{table.path}`, but is missing.")
    stops = [end for ends in end_ids(folder).values() for end in ends]
    return Published(ModelConfig(**fields), tuple(dict.fromkeys(stops)))


def end_ids(folder: Path) -> dict[Path, tuple[int, ...]]:
    """The ids that end what a folder's model writes, by the files that say so, the model's own first.

    Any `model_type` will do. Raises `ConfigError` for a file that cannot be read and for what is no id.
    """
    found = {}
    for path in (folder / MODEL_FILE, folder / GENERATION_FILE):
        ends = read_json(path).get("eos_token_id") if path.is_file() else None
        ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(type(end) is int for end in ids):
            raise ConfigError(f"`eos_token_id` in `{path}` must be an id or a list of some, but is {ends!r}.")
        if ids:
            found[path] = tuple(ids)
    return found


def reason_against_export(model: ModelConfig) -> str:
    """What keeps a model from the nearest family, in words that follow a colon; empty where one can say it."""
    family, differences = _nearest(model)
    if not differences:
        return ""
    name, wanted = next(iter(differences.items()))
    return (
        f"`model.{name}` must be {wanted!r} in a model of Hugging Face's family {family.model_type!r}, the nearest to "
        f"this one, but is {getattr(model, name)!r}"
    )


def published_table(model: ModelConfig, *, dtype: str, stops: tuple[int, ...]) -> dict[str, Any]:
    """The `config.json` of a model whose tensors are of `dtype`, by torch's name; texts end at any of `stops`.

    Raises `ConfigError` for a model that none of the families can say.
    """
    if reason := reason_against_export(model):
        raise ConfigError(f"{reason}. Crosscut knows no family to export it as.")
    family, _ = _nearest(model)
    table: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    table.update({key: getattr(model, ours) for ours, key in family.keys.items()})
    table.update({key: allowed[0] for key, allowed in family.required.items() if allowed[0] is not None})
    if model.positions == "learned":
        table.update(embd_pdrop=model.dropout, attn_pdrop=model.dropout)
    else:
        table.update(rope_theta=model.rotary_base, rope_scaling=_rope_scaling(model))
    if family is _LLAMA:
        table.update(attention_bias=model.biases == "all", mlp_bias=model.biases == "all")
    ends = stops[0] if len(stops) == 1 else list(stops)
    return {**table, "eos_token_id": ends, "torch_dtype": dtype}


class _Table:
    """A `config.json`, whose values are asked for by key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json(path)

    def __contains__(self, key: str) -> bool:
        """Whether it says something; null says nothing."""
        return self.values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the file says nothing."""
        return self.values[key] if key in self else default

    def take(self, key: str, field: str) -> Any:
        """The value for one of our fields, which must be of its type."""
        value, kind = self.values[key], ModelConfig.__annotations__[field]
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise ConfigError(f"`{key}` in `{self.path}` must be of type {kind.__name__}, but is {value!r}.")
        return value

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Raise unless the value is one that our model can do."""
        if (value := self.get(key, allowed[0])) not in allowed:
            raise self.refusal(key, listed(map(repr, allowed)), value)

    def refusal(self, key: str, must: str, value: Any) -> ConfigError:
        """The error for a value that our model cannot do."""
        return ConfigError(
            f"`{key}` in `{self.path}` must be {must}, but is {value!r}. Crosscut's model computes nothing else: "
            "choose another model."
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file of a published model holds. Raises `ConfigError` where it holds none."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"`{path}` must be a readable file, but is not: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"`{path}` must be valid JSON, but is not: {error}.") from None
    if not isinstance(table, dict):
        raise ConfigError(f"`{path}` must hold a JSON object, but holds {type(table).__name__}.")
    return table


def _family_of(table: _Table) -> _Family:
    name = table.get("model_type")
    if name not in FAMILIES:
        architecture = f" ({', '.join(map(str, table.get('architectures', [])))})" if "architectures" in table else ""
        raise ConfigError(
            f"`model_type` in `{table.path}` must be {listed(map(repr, FAMILIES))}, but is {name!r}{architecture}. "
            "Crosscut knows these families."
        )
    return FAMILIES[name]


def _biases(table: _Table, family: _Family) -> dict[str, Any]:
    """Llama's are all or none."""
    if family is not _LLAMA:
        return {}
    attention, mlp = (bool(table.get(key, False)) for key in ("attention_bias", "mlp_bias"))
    if attention != mlp:
        raise table.refusal("attention_bias", f"{mlp!r} as `mlp_bias` is", attention)
    return {"biases": "all" if attention else "none"}


def _rotary(table: _Table) -> dict[str, Any]:
    """Newer files have all of it in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`."""
    rope = {**table.get("rope_scaling", {}), **table.get("rope_parameters", {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    fields: dict[str, Any] = {"rotary_base": float(rope.get("rope_theta", table.get("rope_theta", 10_000.0)))}
    partial = rope.get("partial_rotary_factor", table.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise table.refusal("partial_rotary_factor", "1.0", partial)
    if kind == "default":
        return fields
    if kind != "llama3":
        raise table.refusal("rope_type", "'default' or 'llama3'", kind)
    for key, wanted in (("low_freq_factor", LOW_FREQUENCY), ("high_freq_factor", HIGH_FREQUENCY)):
        if rope.get(key) != wanted:
            raise table.refusal(key, repr(wanted), rope.get(key))
    for field, key in (("rotary_factor", "factor"), ("rotary_original_length", "original_max_position_embeddings")):
        if key not in rope:
            raise ConfigError(f"`{key}` must be given in `{table.path}` for rope_type 'llama3', but is missing.")
        fields[field] = ModelConfig.__annotations__[field](rope[key])
    return fields


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    if model.rotary_factor == 1.0:
        return None
    return {
        "rope_type": "llama3",
        "factor": model.rotary_factor,
        "low_freq_factor": LOW_FREQUENCY,
        "high_freq_factor": HIGH_FREQUENCY,
        "original_max_position_embeddings": model.rotary_original_length,
    }


def _window(table: _Table, family: _Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A sliding window sees everything up to its length, so that is the longest sequence of the same model."""
    is_used = family is _MISTRAL or bool(table.get("use_sliding_window", False))
    default = None if family is _LLAMA else _SLIDING_WINDOW
    window = table.values.get("sliding_window", default) if is_used else None
    if window is None or "max_sequence_length" not in fields:
        return {}
    return {"max_sequence_length": min(fields["max_sequence_length"], int(window))}


def _nearest(model: ModelConfig) -> tuple[_Family, dict[str, Any]]:
    """The family that comes nearest to a model, and the fields that it has otherwise, with its values: none is best."""
    candidates = [_differences(family, model) for family in _ALL if family is not _MISTRAL]
    return min(candidates, key=lambda candidate: len(candidate[1]))


def _differences(family: _Family, model: ModelConfig) -> tuple[_Family, dict[str, Any]]:
    """The fields that the family has otherwise, with its values."""
    wanted = dict(family.fixed)
    if wanted["positions"] == "learned":
        wanted = {"num_kv_heads": model.num_heads, "head_size": model.hidden_size // model.num_heads, **wanted}
    if family is _LLAMA and model.biases == "all":
        wanted["biases"] = "all"
    return family, {name: value for name, value in wanted.items() if getattr(model, name) != value}
