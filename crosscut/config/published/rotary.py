"""Read and write the settings of rotary position embeddings (RoPE) in the `config.json` of a published model.

Newer files keep the values in `rope_parameters`, older files in `rope_theta` and `rope_scaling`. As in `transformers`,
`rope_scaling` has precedence as a whole. A file names the scaling of the frequencies by `rope_type` (or `type`), with
the names of `model.rotary_scaling`.
"""

import math

from crosscut.config.checks import Settings, listed, shown
from crosscut.config.errors import ConfigError
from crosscut.config.model import ModelConfig
from crosscut.config.parts.kinds import Mixer
from crosscut.config.parts.rotary import RotaryScaling
from crosscut.config.published.keys.rotary import ROTARY
from crosscut.config.published.table import PublishedTable, Table

_UNSCALED = "default"
_LENGTH = "original_max_position_embeddings"
_REQUIRED: dict[RotaryScaling, Table] = {
    RotaryScaling.LLAMA3: {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    RotaryScaling.YARN: {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
}
"""Keys that change the scaled frequencies. Crosscut supports only these values. A Llama 3 file must give all of these
keys. A YaRN file may omit a key, because the values are the defaults of `transformers`."""


def _section(table: PublishedTable) -> Table:
    return table.section("rope_scaling") or table.section("rope_parameters")


def has_base(table: PublishedTable) -> bool:
    """Whether the rotary base in a file is not null. A file without the key has the default of `transformers`."""
    return _section(table).get("rope_theta", table.values.get("rope_theta", 0)) is not None


def rotary_notice(table: PublishedTable) -> str:
    """Line for the user about the keys of the section for rotary positions that Crosscut does not know."""
    return ROTARY.notice(_section(table), table.path)


def rotary_fields(table: PublishedTable, longest: int, *, fraction: float, base: float) -> Settings:
    """Fields of `ModelConfig` for the rotary positions in a file. `longest` is the file's maximum sequence length,
    `fraction` the fraction of each head that models of the family rotate, and `base` the rotary base of a file without
    it.

    Raises `ConfigError` for a value that is missing or that Crosscut does not support.
    """
    rope = _section(table)
    ROTARY.require(rope, table.path)
    kind = _type_of(rope)
    given = rope.get("rope_theta", table.get("rope_theta", base))
    fields: Settings = {"rotary_base": table.number("rope_theta", given, float)}
    partial = rope.get("partial_rotary_factor", table.get("partial_rotary_factor", fraction))
    if partial != fraction:
        raise table.refusal("partial_rotary_factor", shown(fraction), partial)
    if kind == _UNSCALED:
        return fields
    scaling = next((scaling for scaling in RotaryScaling if scaling == kind), None)
    if scaling is None:
        raise table.refusal("rope_type", listed(map(repr, (_UNSCALED, *map(str, RotaryScaling)))), kind)
    _require_constants(table, rope, scaling)
    fields["rotary_factor"] = _factor(table, rope)
    if scaling in (RotaryScaling.LLAMA3, RotaryScaling.YARN):
        original = table.get(_LENGTH, rope.get(_LENGTH, longest))
        fields["rotary_original_length"] = table.number(_LENGTH, original, int)
    if scaling is RotaryScaling.DYNAMIC:
        fields.update(rotary_original_length=longest, max_sequence_length=int(longest * fields["rotary_factor"]))
    if scaling is RotaryScaling.YARN:
        fields.update(_attention_factor(table, rope, fields["rotary_factor"]))
    return fields if fields["rotary_factor"] == 1.0 else {**fields, "rotary_scaling": scaling}


def score_coefficient(table: PublishedTable) -> float:
    """Value of `model.latent_attention.mscale_all_dim` for a file: `mscale_all_dim`, if frequencies are scaled."""
    rope = _section(table)
    given = rope.get("mscale_all_dim")
    return 0.0 if given is None or _type_of(rope) == _UNSCALED else table.number("mscale_all_dim", given, float)


def rotary_keys(model: ModelConfig, longest_key: str) -> Table:
    """Keys of a `config.json` for the rotary positions of a model. `longest_key` is the key of the maximum sequence
    length. With dynamic scaling, the value of this key is the original length.
    """
    keys: Table = {"rope_theta": model.rotary_base, "rope_scaling": None}
    if model.rotary_factor == 1.0:
        return keys
    scaling = model.rotary_scaling
    rope = {"rope_type": str(scaling), "factor": model.rotary_factor, **_REQUIRED.get(scaling, {})}
    if scaling in (RotaryScaling.LLAMA3, RotaryScaling.YARN):
        rope[_LENGTH] = model.rotary_original_length
    if model.rotary_attention_factor:
        rope["attention_factor"] = model.rotary_attention_factor
    if scaling is RotaryScaling.DYNAMIC:
        keys[longest_key] = model.rotary_original_length
    if Mixer.LATENT_ATTENTION in model.kinds and (of_all := model.latent_attention.mscale_all_dim):
        rope["mscale_all_dim"] = of_all
        if model.rotary_attention_factor:  # DeepSeek's own code reads no attention factor
            per_unit = 0.1 * math.log(model.rotary_factor)
            rope["mscale"] = (model.rotary_attention_factor * (per_unit * of_all + 1.0) - 1.0) / per_unit
    return {**keys, "rope_scaling": rope}


def _type_of(rope: Table) -> object:
    return rope.get("rope_type", rope.get("type", _UNSCALED))


def _require_constants(table: PublishedTable, rope: Table, scaling: RotaryScaling) -> None:
    for key, wanted in _REQUIRED.get(scaling, {}).items():
        value = rope.get(key)
        if value is None and scaling is RotaryScaling.YARN:
            continue
        if value != wanted:
            raise table.refusal(key, shown(wanted), value)


def _factor(table: PublishedTable, rope: Table) -> float:
    if "factor" not in rope:
        raise ConfigError(
            f"`factor` must be given in `{table.path}` for rope_type '{_type_of(rope)}', but is missing. Download the "
            "file again."
        )
    return table.number("factor", rope["factor"], float)


def _attention_factor(table: PublishedTable, rope: Table, factor: float) -> Settings:
    """Field for YaRN's attention factor. Empty if the file uses YaRN's default. DeepSeek's files give `mscale` and
    `mscale_all_dim` instead: the attention factor is (0.1 mscale ln f + 1) / (0.1 mscale_all_dim ln f + 1), where f is
    the factor of the frequencies.
    """
    if rope.get("attention_factor") is not None:
        return {"rotary_attention_factor": table.number("attention_factor", rope["attention_factor"], float)}
    coefficients = [
        table.number(key, rope[key], float) for key in ("mscale", "mscale_all_dim") if rope.get(key) not in (None, 0)
    ]
    if len(coefficients) < 2 or factor <= 1:
        return {}
    upper, lower = (0.1 * coefficient * math.log(factor) + 1.0 for coefficient in coefficients)
    return {"rotary_attention_factor": upper / lower}
