"""Read and write what a `config.json` says about the kinds of a model's layers, and about its state-space mixers."""

import math
from collections.abc import Sequence

from crosscut.config.checks import Settings, listed
from crosscut.config.errors import ConfigError
from crosscut.config.model import MOST_LAYERS, ModelConfig
from crosscut.config.parts.kinds import Mixer
from crosscut.config.published.families import Family
from crosscut.config.published.families.family import LayerList
from crosscut.config.published.table import PublishedTable, Table

_NEW_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
"""Names of kinds of layers in files that `transformers` 5 writes, with the older names."""
_LIMIT = "time_step_limit"


def layer_fields(table: PublishedTable, family: Family, num_layers: int) -> Settings:
    """Fields of `ModelConfig` for the kinds of the layers. Empty for a family whose layers are all the same, and for a
    number of layers that no model has, which `ModelConfig` refuses.

    Raises `ConfigError` for a kind that Crosscut does not support, and for a list whose length is not the number of
    layers.
    """
    if family.layers is None or num_layers > MOST_LAYERS:
        return {}
    listing = family.layers
    if listing.indices_key:
        kinds: Sequence[str] = _by_indices(table, listing, num_layers)
    elif listing.period_key:
        first, second, *_ = listing.kinds
        flags = by_period(table, (listing.period_key, listing.offset_key), listing.period, num_layers)
        kinds = [second if is_second else first for is_second in flags]
    else:
        key, kinds = _named(table, listing, num_layers)
        if "num_layers" in family.keys and num_layers and len(kinds) != num_layers:
            raise table.refusal(key, f"a list of {num_layers} kinds (`{family.keys['num_layers']}`)", kinds)
    return {"layers": tuple(listing.kinds[kind] for kind in kinds), "num_layers": len(kinds)}


def _by_indices(table: PublishedTable, listing: LayerList, num_layers: int) -> list[str]:
    indices = table.get(listing.indices_key, [])
    first, second, *_ = listing.kinds
    if not isinstance(indices, list) or any(type(index) is not int for index in indices):
        raise table.refusal(listing.indices_key, "a list of indices of layers", indices)
    return [second if index in indices else first for index in range(num_layers)]


def by_period(table: PublishedTable, keys: tuple[str, str], defaults: tuple[int, int], num_layers: int) -> list[bool]:
    """Whether each layer is one of those of which there is one in each period. `keys` are those of the period and of
    the index of the first such layer. Raises `ConfigError` for an index that is not in the first period.
    """
    period, offset = (
        table.number(key, table.get(key, default), int) for key, default in zip(keys, defaults, strict=True)
    )
    if not 0 <= offset < period:
        raise table.refusal(keys[1], f"at least 0 and below `{keys[0]}` ({period})", offset)
    return [index % period == offset for index in range(num_layers)]


def period_of(kinds: Sequence[bool]) -> tuple[int, int] | None:
    """Period and offset of the layers of the second kind. None if these layers have no period. A period above the
    number of layers means that there are none.
    """
    places = [index for index, is_second in enumerate(kinds) if is_second]
    if not places:
        return len(kinds) + 1, len(kinds)
    period, offset = places[1] - places[0] if len(places) > 1 else len(kinds), places[0]
    fits = offset < period and places == [*range(offset, len(kinds), period)]
    return (period, offset) if fits else None


def _named(table: PublishedTable, listing: LayerList, num_layers: int) -> tuple[str, list[str]]:
    """Return the key that names the kinds of the layers, and the kinds."""
    key = listing.key
    given = table.get(key, _by_interval(table, listing, num_layers))
    if listing.letters_key and key not in table:
        key = listing.letters_key
        letters = table.get(key)
        if not isinstance(letters, str) or not listing.letters.keys() >= set(letters) or not letters:
            raise table.refusal(key, f"a text of the letters {listed(map(repr, listing.letters))}", letters)
        given = [listing.letters[letter] for letter in letters]
    if not isinstance(given, list) or not given:
        raise table.refusal(key, "a list with the kind of each layer", given)
    kinds = [kind if kind in listing.kinds else _NEW_NAMES.get(kind, kind) for kind in map(str, given)]
    if unknown := next((kind for kind in kinds if kind not in listing.kinds), ""):
        raise ConfigError(
            f"`{key}` in `{table.path}` must list only layers of the kinds {listed(map(repr, listing.kinds))}, but has "
            f"{unknown!r}. Choose another model."
        )
    return key, kinds


def _by_interval(table: PublishedTable, listing: LayerList, num_layers: int) -> list[str]:
    """Kinds of the layers of a file that does not list them."""
    first, second, *_ = listing.kinds
    key = listing.interval_key
    interval = table.number(key, table.get(key, listing.interval), int)
    if key in table and interval < 1:
        raise table.refusal(key, "at least 1", interval)
    if not interval:
        return [first] * num_layers
    if listing.needs_all:
        interval = min(interval, num_layers)
    return [first if (index + 1) % interval else second for index in range(num_layers)]


def layer_keys(entries: Sequence[str], family: Family) -> Table:
    """Keys of a `config.json` for the kinds of a model's layers, whose entries of `model.layers` are `entries`. Empty
    for a family whose layers are all the same.
    """
    if family.layers is None:
        return {}
    listing = family.layers
    names = {layer: kind for kind, layer in listing.kinds.items()}
    kinds = [names[entry] for entry in entries]
    if listing.indices_key:
        _, second, *_ = listing.kinds
        return {listing.indices_key: [index for index, kind in enumerate(kinds) if kind == second]}
    if listing.period_key:
        _, second, *_ = listing.kinds
        found = period_of([kind == second for kind in kinds])
        assert found is not None, "models without a period are no models of the family"
        return dict(zip((listing.period_key, listing.offset_key), found, strict=True))
    if listing.letters_key:
        letters = {kind: letter for letter, kind in listing.letters.items()}
        return {listing.letters_key: "".join(letters[kind] for kind in kinds)}
    return {listing.key: kinds}


def mixer_fields(table: PublishedTable, family: Family, fields: Settings) -> Settings:
    """Fields of the sections `mamba` and `mamba2` that do not have keys of their own: the number of channels, the
    limits of the step sizes, and the size of a head that the file leaves out. Empty for a family without state-space
    mixers. `fields` are the other fields.

    Raises `ConfigError` for limits that are not two numbers, and for heads that together are not as wide as the file
    says.
    """
    if "mamba.step_rank" in family.keys:
        times = table.number(family.expansion, table.get(family.expansion, 2), int)
        return {"mamba.inner_size": times * fields["hidden_size"]}
    if "mamba2.num_heads" not in family.keys:
        return {}
    found: Settings = {}
    if family.expansion:
        found["mamba2.head_size"] = _head_size(table, family, fields)
    least, most = _limits(table)
    return {**found, "mamba2.least_time_step": least, "mamba2.most_time_step": 0.0 if math.isinf(most) else most}


def _head_size(table: PublishedTable, family: Family, fields: Settings) -> int:
    """Size of a head: what the file gives, or what the expansion leaves for each head."""
    key, heads = family.keys["mamba2.head_size"], fields["mamba2.num_heads"]
    width = table.number(family.expansion, table.get(family.expansion, 2), int) * fields["hidden_size"]
    size = fields.get("mamba2.head_size")
    if size is None:
        size = width // max(heads, 1)
    if size * heads != width:
        must = f"the size of each of {heads} heads that together have {width} elements (`{family.expansion}`)"
        raise table.refusal(key, must, size)
    return int(size)


def _limits(table: PublishedTable) -> tuple[float, float]:
    """Minimum and maximum of the step sizes. `transformers` writes infinity as an object."""
    given = table.get(_LIMIT, [0.0, math.inf])
    limits = [_number(one) for one in given] if isinstance(given, list) else []
    if len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise table.refusal(_LIMIT, "two numbers from 0 to infinity, the smaller one first", given)
    return limits[0], limits[1]


def _number(value: object) -> float:
    """Return a number of a JSON file, in which infinity may be an object. NaN if the value is no number."""
    if value == {"__float__": "Infinity"}:
        return math.inf
    return float(value) if isinstance(value, int | float) and type(value) is not bool else math.nan


def mixer_keys(model: ModelConfig, family: Family) -> Table:
    """Keys of a `config.json` for the state-space mixers that are not keys of fields. Empty for a family without
    state-space mixers.
    """
    if "mamba.step_rank" in family.keys:
        return {family.expansion: max(model.mamba.inner_size // model.hidden_size, 1)}
    if "mamba2.num_heads" not in family.keys:
        return {}
    sizes, keys = model.mamba2, Table()
    if not sizes.num_heads:  # no layer has a mixer, but `transformers` wants a number that divides the width
        return {family.keys["mamba2.num_heads"]: 1, family.keys["mamba2.head_size"]: 2 * model.hidden_size}
    if family.expansion:
        keys[family.expansion] = sizes.inner_size // model.hidden_size
    if sizes.least_time_step or sizes.most_time_step:
        most = sizes.most_time_step or {"__float__": "Infinity"}
        keys[_LIMIT] = [sizes.least_time_step, most]
    return keys


def mixers_of_family(model: ModelConfig, family: Family) -> Settings:
    """Values that fields of the sections `mamba` and `mamba2` must have in a model of the family. Empty for a family
    without state-space mixers.
    """
    if "mamba.step_rank" in family.keys and Mixer.MAMBA in model.kinds:
        return {"mamba.inner_size": max(round(model.mamba.inner_size / model.hidden_size), 1) * model.hidden_size}
    if "mamba2.num_heads" not in family.keys or Mixer.MAMBA2 not in model.kinds:
        return {}
    sizes = model.mamba2
    wanted: Settings = {"mamba2.norm_groups": sizes.num_groups}
    if family.expansion:
        times = max(round(sizes.inner_size / model.hidden_size), 1)
        wanted["mamba2.num_heads"] = times * model.hidden_size // sizes.head_size
    return wanted
