"""Conversion between the `config.json` of a published model on Hugging Face and `ModelConfig`.

The table in `families` is used in both directions. It maps our fields to the keys of a family, and lists the values
that are the same in all models of a family. If a key changes the model's computation but `ModelConfig` has no field for
this key, an error names the key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosscut.config.checks import MOST, MOST_SEED, listed, shown
from crosscut.config.errors import ConfigError
from crosscut.config.model import HeadKind, ModelConfig
from crosscut.config.published.families import FAMILIES, MISTRAL, ROBERTA, SOFT_CAP_FIELD, Family
from crosscut.config.system.files import read_json

MODEL_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"

LOW_FREQUENCY, HIGH_FREQUENCY = 1.0, 4.0
"""Limits of Llama 3 for rotary frequencies, in turns within the original sequence length. Frequencies below the first
limit are divided by the rotary factor. Frequencies above the second limit are unchanged."""


@dataclass(frozen=True)
class Published:
    """Configuration of a published model, from the files in its folder."""

    model: ModelConfig
    stops: tuple[int, ...]
    """Token ids that end a text of the model. The ids from `config.json` come first."""
    labels: tuple[str, ...] = ()
    """Names of the classes of a model with `head = "classes"`; empty for other models."""


def is_published(folder: Path) -> bool:
    """Whether a folder holds the configuration of a published model."""
    return (folder / MODEL_FILE).is_file()


def read_published(folder: Path) -> Published:
    """Read the configuration of a published model from its folder. Raises `ConfigError` for a value that is missing or
    that Crosscut does not support; the message names the key.
    """
    table = _Table(folder / MODEL_FILE)
    family = _family_of(table)
    for key, allowed in family.required.items():
        table.require(key, allowed)
    fields = {**family.defaults, **{ours: table.take(key, ours) for ours, key in family.keys.items() if key in table}}
    if table.names_null(family.keys.get(SOFT_CAP_FIELD, "")):
        fields[SOFT_CAP_FIELD] = 0.0
    fields.update(family.fixed, **_heads(table, family))
    if family.first_position and "max_sequence_length" in fields:
        table.require_at_least(family.keys["max_sequence_length"], family.first_position + 1)
        fields["max_sequence_length"] -= family.first_position
    if fields["positions"] == "rotary":
        fields.update(_biases(table, family), **_rotary(table), **_window(table, family, fields))
    for name in ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_sequence_length"):
        if name not in fields:
            raise ConfigError(
                f"`{family.keys[name]}` must be given in `{table.path}`, but is missing. Download the file again."
            )
    stops = [end for ends in end_ids(folder).values() for end in ends]
    model = _model(fields, family, table.path)
    return Published(model, tuple(dict.fromkeys(stops)), _labels(table) if model.num_classes else ())


def first_position_of(folder: Path) -> int:
    """Row of the first position in a published model's table of learned positions. 0 if `folder` does not hold the
    configuration of a published model.
    """
    return _family_of(_Table(folder / MODEL_FILE)).first_position if is_published(folder) else 0


def _model(fields: Mapping[str, Any], family: Family, path: Path) -> ModelConfig:
    """Build a model from the values of a `config.json`. Errors name the file's keys instead of our fields."""
    try:
        return ModelConfig(**fields)
    except ConfigError as error:
        message = str(error)
        for ours, key in {**family.keys, "rotary_base": "rope_theta", "rotary_factor": "factor"}.items():
            message = message.replace(f"`model.{ours}`", f"`{key}` in `{path}`")
        raise ConfigError(f"{message} Choose another model.") from None


def end_ids(folder: Path) -> dict[Path, tuple[int, ...]]:
    """Token ids that end a text of the model, by the name of the file in `folder` that gives them. `config.json` comes
    first.

    The model may belong to any family, including families that Crosscut does not support. Raises `ConfigError` for a
    file that cannot be read and for a value that is not an id.
    """
    found = {}
    for path in (folder / MODEL_FILE, folder / GENERATION_FILE):
        ends = read_json(path).get("eos_token_id") if path.is_file() else None
        ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(type(end) is int and 0 <= end <= MOST for end in ids):
            raise ConfigError(
                f"`eos_token_id` in `{path}` must be an id or a list of ids, each from 0 to {MOST}, but is "
                f"{ends!r}. Correct it, or remove it."
            )
        if ids:
            found[path] = tuple(ids)
    return found


def begin_id(folder: Path) -> int | None:
    """The token id with which texts of the model begin, from the model's `config.json` in `folder`. None if there is no
    such file or the file names no id. Raises `ConfigError` for a file that cannot be read and for a value that is not
    an id.
    """
    path = folder / MODEL_FILE
    begin = read_json(path).get("bos_token_id") if path.is_file() else None
    if begin is not None and not (type(begin) is int and 0 <= begin <= MOST):
        raise ConfigError(
            f"`bos_token_id` in `{path}` must be an id from 0 to {MOST}, but is {shown(begin)}. Correct it, or remove "
            "it."
        )
    return begin


def reason_against_export(model: ModelConfig) -> str:
    """Reason why the model belongs to no family, as a clause that follows a colon. The reason names all settings that
    differ from the closest family. Empty if the model can be exported.
    """
    if model.mlp_pattern:
        return f"`model.mlp_pattern` must be empty in every Hugging Face family, but is {list(model.mlp_pattern)}"
    family, differences = _nearest(model)
    if not differences:
        return ""
    must = " and ".join(f"`model.{name}` must be {shown(wanted)}" for name, wanted in differences.items())
    values = {name: shown(getattr(model, name)) for name in differences}
    told = " and ".join(f"`model.{name}` is {value}" for name, value in values.items())
    if len(values) == 1:
        told = f"is {next(iter(values.values()))}"
    return f"{must} in a Hugging Face model of the closest family, {family.model_type!r}, but {told}"


def require_exportable(model: ModelConfig) -> None:
    """Raise `ConfigError` for a model that belongs to no family."""
    if reason := reason_against_export(model):
        raise ConfigError(f"{reason}. Crosscut can export only models of the families that it knows.")


def published_table(
    model: ModelConfig, *, dtype: str, begin: int, stops: tuple[int, ...], labels: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Build the `config.json` of a model. `dtype` is torch's name for the element type of the tensors, `begin` is the
    token id with which a text begins, `stops` are the token ids that end a text, and `labels` are the names of the
    classes of a model with `head = "classes"`.

    Raises `ConfigError` for a model that belongs to no family, and if the number of labels is not the number of
    classes.
    """
    require_exportable(model)
    family, _ = _nearest(model)
    table: dict[str, Any] = {"architectures": [_architecture(family, model)], "model_type": family.model_type}
    table.update({key: getattr(model, ours) for ours, key in family.keys.items()})
    if not model.logit_softcap and SOFT_CAP_FIELD in family.keys:
        table[family.keys[SOFT_CAP_FIELD]] = None
    table.update({key: allowed[0] for key, allowed in family.required.items() if allowed[0] is not None})
    table.update(dict.fromkeys(family.dropouts, model.dropout), **dict.fromkeys(family.biases, model.biases == "all"))
    if model.positions == "rotary":
        table.update(rope_theta=model.rotary_base, rope_scaling=_rope_scaling(model))
    if model.num_classes:
        table.update(_named_classes(model.num_classes, labels))
    ends = stops[0] if len(stops) == 1 else list(stops)
    return {**table, "bos_token_id": begin, "eos_token_id": ends, "torch_dtype": dtype}


def _named_classes(number: int, labels: tuple[str, ...]) -> dict[str, Any]:
    """Keys for the names of the classes. Without labels, the names are the defaults of `transformers`."""
    names = labels or tuple(f"LABEL_{index}" for index in range(number))
    if len(names) != number or len(set(names)) != number:
        raise ConfigError(
            f"`labels` must be {number} different names, one for each class, but are {shown(list(labels))}. Give one "
            "name for each class, or none."
        )
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


class _Table:
    """A `config.json` with typed access to its values by key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json(path)

    def __contains__(self, key: str) -> bool:
        """Whether the file has a value for the key. Null does not count as a value."""
        return self.values.get(key) is not None

    def names_null(self, key: str) -> bool:
        """Whether the file has the value null for the key."""
        return key in self.values and self.values[key] is None

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default if the file has no value for the key."""
        return self.values[key] if key in self else default

    def take(self, key: str, field: str) -> Any:
        """Value for a field of `ModelConfig`. Raises `ConfigError` unless the value has the field's type."""
        value, kind = self.values[key], ModelConfig.__annotations__[field]
        if kind is float:
            return self.number(key, value)
        if type(value) is not kind:
            raise ConfigError(f"`{key}` in `{self.path}` must be of type {kind.__name__}, but is {shown(value)}.")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """The object under a key, or an empty object if the key is missing. Raises `ConfigError` for a value that is
        not an object.
        """
        if not isinstance(value := self.get(key, {}), dict):
            raise ConfigError(f"`{key}` in `{self.path}` must be an object, but is {shown(value)}. Correct the file.")
        return value

    def number(self, key: str, value: Any, kind: type[float] | type[int] = float) -> Any:
        """Check a number that was found under a key. Raises `ConfigError` for any other value."""
        if type(value) not in (int, kind) or not abs(value) <= MOST_SEED:
            name = "a whole number" if kind is int else "a number"
            raise ConfigError(f"`{key}` in `{self.path}` must be {name}, but is {shown(value)}. Correct the file.")
        return kind(value)

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Raise `ConfigError` unless the value is one that Crosscut supports."""
        if (value := self.get(key, allowed[0])) not in allowed:
            raise self.refusal(key, listed(map(shown, allowed)), value)

    def require_at_least(self, key: str, smallest: int) -> None:
        """Raise `ConfigError` if a whole number is smaller than `smallest`."""
        if (value := self.values[key]) < smallest:
            raise ConfigError(
                f"`{key}` in `{self.path}` must be at least {smallest}, but is {value}. Choose another model."
            )

    def refusal(self, key: str, must: str, value: Any) -> ConfigError:
        """Error for a value that Crosscut does not support."""
        return ConfigError(
            f"`{key}` in `{self.path}` must be {must}, but is {shown(value)}. Crosscut supports no other value. "
            "Choose another model."
        )


def _family_of(table: _Table) -> Family:
    name = table.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        architectures = table.get("architectures", [])
        names = ", ".join(map(str, architectures)) if isinstance(architectures, list) else shown(architectures)
        architecture = f" ({names})" if names else ""
        raise ConfigError(
            f"`model_type` in `{table.path}` must be {listed(map(repr, FAMILIES))}, but is {shown(name)}"
            f"{architecture}. Choose a model of one of these families."
        )
    return FAMILIES[name]


def _heads(table: _Table, family: Family) -> Mapping[str, Any]:
    """Fields for the heads of the file's architecture. Empty if Crosscut does not support these heads: an output
    projection for masked tokens that is not tied, or a classifier that predicts numbers or several classes at once.
    """
    architectures = table.get("architectures", [])
    if not isinstance(architectures, list) or len(architectures) != 1:
        return {}
    fields = family.heads.get(str(architectures[0]), {})
    if not fields or fields["head"] == HeadKind.MASKED_TOKENS:
        return fields if table.get("tie_word_embeddings", True) else {}
    fields = {**fields, "sentence_order": False, "tied": True, SOFT_CAP_FIELD: 0.0}
    if fields["head"] != HeadKind.CLASSES:
        return fields
    number, kind = len(_labels(table)), table.get("problem_type", _ONE_CLASS)
    return {**fields, "num_classes": number} if number > 1 and kind == _ONE_CLASS else {}


_ONE_CLASS = "single_label_classification"
"""Value of `problem_type` in a model that assigns exactly one class to each text."""


def _labels(table: _Table) -> tuple[str, ...]:
    """Names of the classes in a file, in the order of their logits."""
    given = table.section("id2label")
    if not given:
        number = table.number("num_labels", table.get("num_labels", 2), int)
        return tuple(f"LABEL_{index}" for index in range(min(number, MOST)))
    names = tuple(given.get(str(index)) for index in range(len(given)))
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"`id2label` in `{table.path}` must map the numbers from 0 to {len(given) - 1} to names, but is "
            f"{shown(given)}. Correct the file."
        )
    return tuple(map(str, names))


def _architecture(family: Family, model: ModelConfig) -> str:
    """Architecture of a family with the heads of a model."""
    for architecture, fields in family.heads.items():
        if all(getattr(model, name) == value for name, value in fields.items()):
            return architecture
    return family.architecture


def _biases(table: _Table, family: Family) -> dict[str, Any]:
    """Value of `model.biases`, "all" or "none", if the file gives it. Empty otherwise."""
    if not family.biases:
        return {}
    *others, last = ((key, bool(table.get(key, family.fixed["biases"] == "all"))) for key in family.biases)
    for key, value in others:
        if value != last[1]:
            raise table.refusal(key, f"{shown(last[1])} as `{last[0]}` is", value)
    return {"biases": "all" if last[1] else "none"}


def _rotary(table: _Table) -> dict[str, Any]:
    """Fields for rotary positions. Newer files keep the values in `rope_parameters`, older files in `rope_theta` and
    `rope_scaling`.
    """
    rope = {**table.section("rope_scaling"), **table.section("rope_parameters")}
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = rope.get("rope_theta", table.get("rope_theta", 10_000.0))
    fields: dict[str, Any] = {"rotary_base": table.number("rope_theta", base)}
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
            raise ConfigError(
                f"`{key}` must be given in `{table.path}` for rope_type 'llama3', but is missing. Download the "
                "file again."
            )
        fields[field] = table.number(key, rope[key], ModelConfig.__annotations__[field])
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


def _window(table: _Table, family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Maximum sequence length of a model with a sliding window: the length of the window. For sequences up to this
    length, a sliding window is the same as full attention.
    """
    is_used = family.is_windowed or bool(table.get("use_sliding_window", False))
    window = table.values.get("sliding_window", family.window) if is_used else None
    if window is None or "max_sequence_length" not in fields:
        return {}
    return {"max_sequence_length": min(fields["max_sequence_length"], table.number("sliding_window", window, int))}


def _nearest(model: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """Family that is closest to a model, and the family's values of the fields in which the model differs. The mapping
    of values is empty if the model belongs to the family.
    """
    candidates = [_differences(family, model) for family in FAMILIES.values() if family not in (MISTRAL, ROBERTA)]
    return min(candidates, key=lambda candidate: len(candidate[1]))


def _differences(family: Family, model: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """Fields in which the model differs from the family, with the family's values."""
    wanted = dict(family.fixed)
    if wanted["positions"] == "learned":
        wanted = {"num_kv_heads": model.num_heads, "head_size": model.hidden_size // model.num_heads, **wanted}
    if "token_types" in family.keys and not model.token_types:
        wanted["token_types"] = family.defaults["token_types"]
    if family.biases and model.biases in ("all", "none"):
        wanted["biases"] = model.biases
    if any(fields["head"] == model.head for fields in family.heads.values()):
        wanted.pop("head", None)
    return family, {name: value for name, value in wanted.items() if getattr(model, name) != value}
