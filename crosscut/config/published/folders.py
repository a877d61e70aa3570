"""Conversion between the `config.json` of a published model on Hugging Face and `ModelConfig`.

The table in `families` is used in both directions. It maps our fields to the keys of a family, and lists the values
that are the same in all models of a family. If a key changes the model's computation but `ModelConfig` has no field for
this key, an error names the key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from crosscut.config.checks import MOST, Settings, listed, shown
from crosscut.config.errors import ConfigError
from crosscut.config.model import Biases, ModelConfig
from crosscut.config.parts.head import HeadKind
from crosscut.config.parts.rotary import Positions, RotaryScaling
from crosscut.config.published.delta import delta_fields, delta_keys
from crosscut.config.published.experts import (
    expert_differences,
    expert_keys,
    fields_of,
    fixed_of,
    plain_layers,
    with_experts,
)
from crosscut.config.published.families import AS_OTHERS, FAMILIES, REFUSED, SOFT_CAP_FIELD, Family
from crosscut.config.published.hybrid import (
    layer_fields,
    layer_keys,
    mixer_fields,
    mixer_keys,
    mixers_of_family,
    period_of,
)
from crosscut.config.published.keys import keys_of_model
from crosscut.config.published.latent import latent_fields, latent_keys
from crosscut.config.published.rotary import has_base, rotary_fields, rotary_keys, rotary_notice
from crosscut.config.published.table import PublishedTable, Table
from crosscut.config.published.weights import differing, notice_of_two_sets
from crosscut.config.system.files import read_json

MODEL_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"


@dataclass(frozen=True)
class Published:
    """Configuration of a published model, from the files in its folder."""

    model: ModelConfig
    stops: tuple[int, ...]
    """Token ids that end a text of the model. The ids from `config.json` come first."""
    labels: tuple[str, ...] = ()
    """Names of the classes of a model with `head = "classes"`; empty for other models."""
    is_windowed: bool = False
    """Whether a sliding window limits `model.max_sequence_length`."""
    notices: tuple[str, ...] = ()
    """Lines for the user about the files, such as a line that names unknown keys."""

    @property
    def can_read_longer(self) -> bool:
        """Whether a run may give the model other rotary frequencies, and longer sequences."""
        return self.model.positions is Positions.ROTARY and not self.is_windowed


def is_published(folder: Path) -> bool:
    """Whether a folder holds the configuration of a published model."""
    return (folder / MODEL_FILE).is_file()


def read_published(folder: Path) -> Published:
    """Read the configuration of a published model from its folder. Raises `ConfigError` for a value that Crosscut does
    not support; the message names the key. If the folder also holds the model's weights, they are compared with what
    the configuration says about them.
    """
    table = PublishedTable(folder / MODEL_FILE)
    family = _family_of(table)
    table.resolve_names(family.aliases)
    notices = [keys_of_model(family.model_type).check(table.values, table.path), notice_of_two_sets(folder)]
    fields: Settings = {**family.defaults, **_given(table, family), **family.fixed}
    fields.update(**_heads(table, family), **_positions(table, family, fields), **_biases(table, family))
    fields.update(layer_fields(table, family, fields["num_layers"]))
    fields.update(**mixer_fields(table, family, fields), **latent_fields(table, family))
    fields.update(delta_fields(family, fields))
    fields = with_experts(table, family, fields)
    window: Settings = {}
    if fields["positions"] == Positions.ROTARY:
        fraction, base = fields.get("rotary_fraction", 1.0), fields.get("rotary_base", ModelConfig.rotary_base)
        fields.update(rotary_fields(table, fields["max_sequence_length"], fraction=fraction, base=base))
        if family.rotates_before_norm and fields.get("rotary_scaling") is RotaryScaling.YARN:
            fields["rotary_attention_factor"] = 1.0
        fields.update(window := _window(table, family, fields))
        notices.append(rotary_notice(table))
    notices.append(_untie(folder, family, fields))
    stops = tuple(dict.fromkeys(end for ends in end_ids(folder).values() for end in ends))
    model = _model(fields, family, table.path)
    labels = _labels(table) if model.num_classes else ()
    return Published(model, stops, labels, is_windowed=bool(window), notices=tuple(filter(None, notices)))


def _given(table: PublishedTable, family: Family) -> Settings:
    """Values of a file for the fields of a family. Raises `ConfigError` for a missing key whose default is not
    supported.
    """
    for key in family.stated:
        if key not in table.values:
            raise ConfigError(
                f"`{key}` in `{table.path}` must be {listed(map(shown, family.required[key]))}, but is missing. Choose "
                "another model."
            )
    given = {ours: key for ours, key in family.keys.items() if key in table.values}
    for ours in ("mamba2.head_size", "mamba.step_rank"):
        if table.get(given.get(ours, "")) == "auto":
            given.pop(ours)
    return {ours: table.take(key, ours) for ours, key in given.items()}


def _positions(table: PublishedTable, family: Family, fields: Settings) -> Settings:
    """Kind of the positions, if it depends on the file, and the maximum sequence length of a family in which no text
    uses the first positions.
    """
    if family.positions:
        return {"positions": "rotary" if table.get(family.positions) == "rope" else "none"}
    if family.has_optional_base:
        return {"positions": "rotary" if has_base(table) else "none"}
    if not (first := family.first_position):
        return {}
    if (longest := fields["max_sequence_length"]) <= first:
        key = family.keys["max_sequence_length"]
        must = f"must be at least {first + 1}, but is {longest}"
        raise ConfigError(f"`{key}` in `{table.path}` {must}. Choose another model.")
    return {"max_sequence_length": longest - first}


def _untie(folder: Path, family: Family, fields: Settings) -> str:
    """Change the fields of a model whose output projection should be its embedding, but whose files hold two tensors
    that differ. `transformers` keeps both then. Returns a line for the user, which is empty if nothing is changed.
    """
    head = fields.get("head", HeadKind.NEXT_TOKEN)
    is_masked = head == HeadKind.MASKED_TOKENS
    predicts = is_masked or (head == HeadKind.NEXT_TOKEN and fields["attention"] == "causal")
    if not (predicts and fields["tied"] and (pair := differing(folder, family.tied_tensors))):
        return ""
    if is_masked:
        fields.update(head=HeadKind.NEXT_TOKEN, sentence_order=False)
        done = "Crosscut supports no such head, and leaves it out"
    else:
        fields["tied"] = False
        done = "Crosscut keeps both, as `transformers` does"
    return (
        f"`{pair[0]}` and `{pair[1]}` in `{folder}` differ, although `tie_word_embeddings` in `{MODEL_FILE}` says that "
        f"they are the same. {done}."
    )


def first_position_of(folder: Path) -> int:
    """Row of the first position in a published model's table of learned positions. 0 if `folder` does not hold the
    configuration of a published model.
    """
    return _family_of(PublishedTable(folder / MODEL_FILE)).first_position if is_published(folder) else 0


def _model(fields: Settings, family: Family, path: Path) -> ModelConfig:
    """Build a model from the values of a `config.json`. Errors name the file's keys instead of our fields."""
    try:
        return ModelConfig(**_in_sections(fields))
    except ConfigError as error:
        message = str(error)
        for ours, key in {**family.keys, "rotary_base": "rope_theta", "rotary_factor": "factor"}.items():
            message = message.replace(f"`model.{ours}`", f"`{key}` in `{path}`")
        raise ConfigError(f"{message} Choose another model.") from None


def _in_sections(fields: Settings) -> Settings:
    """Return the fields with those of a section, such as `mamba2.num_heads`, in a mapping of their own."""
    found: Settings = {name: value for name, value in fields.items() if "." not in name}
    for name in fields.keys() - found.keys():
        section, _, field = name.partition(".")
        found.setdefault(section, {})[field] = fields[name]
    return found


def end_ids(folder: Path) -> dict[Path, tuple[int, ...]]:
    """Return the token ids that end a text of the model, keyed by the path of the file in `folder` that lists them.
    `config.json` comes first.

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
                f"{ends!r}. Correct or remove `eos_token_id`."
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
            f"`bos_token_id` in `{path}` must be an id from 0 to {MOST}, but is {shown(begin)}. Correct or remove "
            "`bos_token_id`."
        )
    return begin


def reason_against_export(model: ModelConfig) -> str:
    """Reason why the model belongs to no family, as a clause that follows a colon. The reason names all settings that
    differ from the closest family. Empty if the model can be exported.
    """
    family, differences = _nearest(model)
    if not differences:
        return ""
    must = " and ".join(f"`model.{name}` must be {wanted}" for name, wanted in differences.items())
    values = {name: shown(_value(model, name)) for name in differences}
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
) -> Table:
    """Build the `config.json` of a model. `dtype` is torch's name for the element type of the tensors, `begin` is the
    token id with which a text begins, `stops` are the token ids that end a text, and `labels` are the names of the
    classes of a model with `head = "classes"`.

    Raises `ConfigError` for a model that belongs to no family, and if the number of labels is not the number of
    classes.
    """
    require_exportable(model)
    family, _ = _nearest(model)
    table: Table = {"architectures": [_architecture(family, model)], "model_type": family.model_type}
    table.update({family.keys[ours]: value for ours, value in fields_of(model, family).items()})
    table.update({**layer_keys(plain_layers(model, family), family), **mixer_keys(model, family)})
    table.update({**latent_keys(model, family), **delta_keys(model, family), **expert_keys(model, family)})
    if family.positions:
        table[family.positions] = "rope" if model.positions is Positions.ROTARY else "nope"
    if "attention_multiplier" in family.keys and not model.attention_multiplier:
        table[family.keys["attention_multiplier"]] = model.head_size**-0.5
    if not model.logit_softcap and SOFT_CAP_FIELD in family.keys:
        table[family.keys[SOFT_CAP_FIELD]] = None
    table.update({key: allowed[0] for key, allowed in family.required.items() if allowed[0] is not None})
    table |= dict.fromkeys(family.dropouts, model.dropout) | dict.fromkeys(family.biases, model.biases is Biases.ALL)
    if model.positions is Positions.ROTARY:
        table.update(rotary_keys(model, family.keys["max_sequence_length"]))
    if model.num_classes:
        table.update(_named_classes(model.num_classes, labels))
    if model.head is HeadKind.NUMBER:
        table.update(_named_classes(1, ()), problem_type=_NUMBERS)
    ends = stops[0] if len(stops) == 1 else list(stops)
    return {**table, "bos_token_id": begin, "eos_token_id": ends, "torch_dtype": dtype}


def _named_classes(number: int, labels: tuple[str, ...]) -> Table:
    """Keys for the names of the classes. Without labels, the names are the defaults of `transformers`."""
    names = labels or tuple(f"LABEL_{index}" for index in range(number))
    if len(names) != number or len(set(names)) != number:
        raise ConfigError(
            f"`labels` must be {number} different names, one for each class, but are {shown(list(labels))}. Give one "
            "name for each class, or no names."
        )
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def _family_of(table: PublishedTable) -> Family:
    name = table.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        architectures = table.get("architectures", [])
        names = ", ".join(map(str, architectures)) if isinstance(architectures, list) else shown(architectures)
        architecture = f" ({names})" if names else ""
        if isinstance(name, str) and name in REFUSED:
            architecture += f", {REFUSED[name]}"
        raise ConfigError(
            f"`model_type` in `{table.path}` must be {listed(map(repr, FAMILIES))}, but is {shown(name)}"
            f"{architecture}. Choose a model of one of these families."
        )
    return FAMILIES[name]


def _heads(table: PublishedTable, family: Family) -> Mapping[str, object]:
    """Fields for the heads of the file's architecture. Empty if Crosscut does not support these heads: an untied output
    projection for masked tokens, or a classifier that predicts several numbers or several classes at once.
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
    number, kind = len(_labels(table)), table.get("problem_type")
    only = _NUMBERS if number == 1 else _ONE_CLASS
    if number and kind in (None, only):
        return fields | ({"head": HeadKind.NUMBER} if number == 1 else {"num_classes": number})
    if family.fixed["attention"] == "causal":  # a head that is left out is an encoder's
        raise table.refusal("problem_type", f"{only!r} or null for {number} labels", kind)
    return {}


_ONE_CLASS, _NUMBERS = "single_label_classification", "regression"
"""Values of `problem_type` in a model that assigns exactly one class to each text, and in a model that predicts
numbers. If a file omits the key, a model with one label predicts a number, as in `transformers`."""


def _labels(table: PublishedTable) -> tuple[str, ...]:
    """Names of the classes in a file, in the order of their logits. `transformers` ignores names whose number is not
    `num_labels`.
    """
    given = table.section("id2label")
    number = table.number("num_labels", table.get("num_labels", len(given) or 2), int)
    if number != len(given):
        return tuple(f"LABEL_{index}" for index in range(min(number, MOST)))
    names = tuple(given.get(str(index)) for index in range(len(given)))
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"`id2label` in `{table.path}` must map the numbers from 0 to {len(given) - 1} to names, but is "
            f"{shown(given)}. Correct the file."
        )
    return tuple(map(str, names))


def _architecture(family: Family, model: ModelConfig) -> str:
    """Name of the family's architecture that has the same heads as a model. A classifier also predicts numbers."""
    own = {"head": _head_of(model), "sentence_order": model.sentence_order}
    for architecture, fields in family.heads.items():
        if all(own[name] == value for name, value in fields.items()):
            return architecture
    return family.architecture


def _head_of(model: ModelConfig) -> HeadKind:
    """Head of a model under which a family's table lists it: numbers have the architecture of classes."""
    return HeadKind.CLASSES if model.head is HeadKind.NUMBER else model.head


def _biases(table: PublishedTable, family: Family) -> Table:
    """Value of `model.biases`, "all" or "none", if the file gives it. Empty otherwise."""
    if not family.biases:
        return {}
    *others, last = ((key, table.flag(key, family.fixed["biases"] == Biases.ALL)) for key in family.biases)
    for key, value in others:
        if value != last[1]:
            raise table.refusal(key, f"{shown(last[1])} like `{last[0]}`", value)
    return {"biases": "all" if last[1] else "none"}


def _window(table: PublishedTable, family: Family, fields: Settings) -> Settings:
    """Maximum sequence length of a model with a sliding window: the length of the window. For sequences up to this
    length, a sliding window is the same as full attention.
    """
    if family.layers is not None:
        return {}
    is_used = family.is_windowed or (family.has_window and table.flag("use_sliding_window", False))
    kinds, known = table.get("layer_types", []), ("full_attention", "sliding_attention")[: 1 + is_used]
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        raise table.refusal("layer_types", f"a list of {listed(map(repr, known))}", kinds)
    window = table.values.get("sliding_window", family.window) if is_used else None
    if window is None:
        return {}
    return {"max_sequence_length": min(fields["max_sequence_length"], table.number("sliding_window", window, int))}


def family_of(model: ModelConfig) -> Family:
    """Family as which a model is exported, or the closest one. The families of `AS_OTHERS` are never returned."""
    return _nearest(model)[0]


def _nearest(model: ModelConfig) -> tuple[Family, dict[str, str]]:
    """Return the family that is closest to a model, and the fields in which the model differs, with descriptions of the
    family's values. There are no such fields if the model belongs to the family.
    """
    fit = [family for family in FAMILIES.values() if family.has_experts or not model.num_experts]
    candidates = [_differences(family, model) for family in fit if family.model_type not in AS_OTHERS]
    return min(candidates, key=lambda candidate: len(candidate[1]))


def _differences(family: Family, model: ModelConfig) -> tuple[Family, dict[str, str]]:
    """Return the family, and the fields in which the model differs from it, with descriptions of the family's
    values.
    """
    wanted = fixed_of(model, family)
    if wanted.get("positions") == Positions.LEARNED and model.attends:
        wanted = {"num_kv_heads": model.num_heads, "head_size": model.hidden_size // model.num_heads, **wanted}
    if "token_types" in family.keys and not model.token_types:
        wanted["token_types"] = family.defaults["token_types"]
    if family.biases and model.biases in (Biases.ALL, Biases.NONE):
        wanted["biases"] = model.biases
    if family.rotates_before_norm and model.rotary_factor != 1.0 and model.rotary_scaling is RotaryScaling.YARN:
        wanted["rotary_attention_factor"] = 1.0
    if family.layers is not None and family.layers.norm_places:
        wanted["norm_places"] = tuple(family.layers.norm_places.get(layer, "before") for layer, _ in model.entries)
    if any(fields["head"] == _head_of(model) for fields in family.heads.values()):
        wanted.pop("head", None)
    wanted |= mixers_of_family(model, family)
    entries = plain_layers(model, family)
    found = {name: _value(model, name) for name in wanted} | {"layers": tuple(dict.fromkeys(entries))}
    differences = {name: shown(value) for name, value in wanted.items() if found[name] != value}
    if told := _layer_difference(entries, family):
        differences["layers"] = told
    return family, {**differences, **expert_differences(model, family)}


def _layer_difference(entries: list[str], family: Family) -> str:
    """Description of the layers of a family, if a model with the layers `entries` does not belong to it. Empty if it
    does, and for a family whose layers are all the same.
    """
    if (listing := family.layers) is None:
        return ""
    known = [*dict.fromkeys(listing.kinds.values())]
    if not set(entries) <= set(known):
        return f"a list of {listed(map(repr, known))}"
    if listing.needs_all and len(set(entries)) < len(known):
        return f"a list with {' and '.join(map(repr, known))}"
    if listing.period_key and period_of([entry == known[1] for entry in entries]) is None:
        return f"a list with {known[1]!r} once in each period"
    return ""


def _value(model: ModelConfig, name: str) -> object:
    """Value of a field of a model or of one of its sections. The layers are those that the model uses."""
    if name == "norm_places" and model.norm_places:
        return tuple(str(place) for _, place in model.entries)
    return model.different_layers if name == "layers" else attrgetter(name)(model)
