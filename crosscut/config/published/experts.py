"""Read and write what a `config.json` says about mixtures of experts, and about the layers that have them."""

from operator import attrgetter

from crosscut.config.checks import Settings, listed
from crosscut.config.errors import ConfigError
from crosscut.config.model import MOST_LAYERS, ModelConfig
from crosscut.config.parts.kinds import MLPS, FeedForward
from crosscut.config.published.families import Family
from crosscut.config.published.families.family import ALL_GROUPS, BEST_GROUPS, ExpertLayers
from crosscut.config.published.hybrid import by_period, period_of
from crosscut.config.published.table import PublishedTable, Table

_SECTION = "experts."
_EXPERTS = str(FeedForward.EXPERTS)


def with_experts(table: PublishedTable, family: Family, fields: Settings) -> Settings:
    """Return the fields with experts in the layers that have them, and with the fields of the section `experts` that
    have no keys of their own. In a model without experts, the section has no fields.

    Raises `ConfigError` for a value that does not say which layers have experts, and for a missing number of experts
    per token.
    """
    if "layers" not in fields or fields["num_layers"] > MOST_LAYERS:
        return fields
    layers, sparse = fields["layers"], family.experts
    if sparse is not None:
        flags = _flags(table, sparse, fields["experts.number"], fields["num_layers"])
        pairs = zip(flags, (layers[index % len(layers)] for index in range(len(flags))), strict=True)
        layers = tuple(_with_last(entry, _EXPERTS) if has_experts else entry for has_experts, entry in pairs)
    if not any(_EXPERTS in entry.split() for entry in layers):
        return {name: value for name, value in fields.items() if not name.startswith(_SECTION)}
    if "experts.per_token" not in fields:
        key = family.keys["experts.per_token"]
        raise ConfigError(f"`{key}` in `{table.path}` must be a whole number, but is missing. Correct the file.")
    return {**fields, "layers": layers, **_choice(table, sparse or ExpertLayers(), fields)}


def _flags(table: PublishedTable, sparse: ExpertLayers, number: int, num_layers: int) -> list[bool]:
    """Whether each layer has experts."""
    if sparse.dense_number is not None and number <= sparse.dense_number:
        return [False] * num_layers
    if sparse.period_key:
        return by_period(table, (sparse.period_key, sparse.offset_key), sparse.period, num_layers)
    dense = table.get(sparse.dense_key, [])
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise table.refusal(sparse.dense_key, "a list of indices of layers", dense)
    first, step = (
        table.number(key, table.get(key, default), int)
        for key, default in ((sparse.first_key, sparse.first), (sparse.step_key, 1))
    )
    if step < 1:
        raise table.refusal(sparse.step_key, "at least 1", step)
    return [index >= first and (index + 1) % step == 0 and index not in dense for index in range(num_layers)]


def _choice(table: PublishedTable, sparse: ExpertLayers, fields: Settings) -> Settings:
    """Fields of the experts that have no keys of their own."""
    found: Settings = {}
    if key := sparse.shared_key:
        number = table.number(key, table.get(key, sparse.shared), int)
        if number < 1:
            raise table.refusal(key, "at least 1", number)
        found["experts.shared_size"] = number * fields["experts.size"]
    if key := sparse.method_key:
        method = table.get(key, ALL_GROUPS)
        if method not in (ALL_GROUPS, BEST_GROUPS):
            raise table.refusal(key, listed(map(repr, (ALL_GROUPS, BEST_GROUPS))), method)
        if method == ALL_GROUPS:
            found |= {"experts.groups": 1, "experts.groups_per_token": 1}
    return found


def expert_keys(model: ModelConfig, family: Family) -> Table:
    """Keys of a `config.json` for the experts and their layers that are not those of fields. Empty for a family whose
    layers have experts or none without such keys.
    """
    if (sparse := family.experts) is None:
        return {}
    keys, flags, sizes = Table(), _flags_of(model), model.experts
    if not any(flags) and sparse.dense_number is not None:
        keys[family.keys["experts.number"]] = sparse.dense_number
    if sparse.first_key:
        keys[sparse.first_key] = flags.count(False)
    if sparse.dense_key:
        keys[sparse.dense_key] = [index for index, has_experts in enumerate(flags) if not has_experts]
    if sparse.period_key and any(flags):
        period = period_of(flags)
        assert period is not None, "models without a period are no models of the family"
        keys.update(zip((sparse.period_key, sparse.offset_key), period, strict=True))
    if sparse.shared_key and any(flags):
        keys[sparse.shared_key] = sizes.shared_size // sizes.size
    if sparse.method_key and any(flags):
        keys[sparse.method_key] = BEST_GROUPS if sizes.groups > 1 else ALL_GROUPS
    return keys


def expert_differences(model: ModelConfig, family: Family) -> dict[str, str]:
    """Fields of the experts in which a model differs from a family, with descriptions of the family's values. Empty for
    a model without experts.
    """
    sizes, sparse, flags = model.experts, family.experts, _flags_of(model)
    if not any(flags) or not family.has_experts:
        return {}
    found = {}
    if sizes.shared_size == 0 and "experts.shared_size" in family.keys:
        found["experts.shared_size"] = "at least 1"
    if _shares_size(family) and sizes.size != model.mlp_size and any(kind in MLPS for kind in model.kinds):
        found["experts.size"] = f"{model.mlp_size} (`model.mlp_size`)"
    if sparse is None:
        return found
    if sparse.shared_key and (not sizes.shared_size or sizes.shared_size % sizes.size):
        found["experts.shared_size"] = f"a multiple of {sizes.size} (`model.experts.size`)"
    if sparse.first_key and flags != sorted(flags):
        found["layers"] = "a list in which only the first layers have no experts"
    if sparse.period_key and period_of(flags) is None:
        found["layers"] = "a list with experts in one layer of each period"
    if not (sparse.keys or all(flags)):
        found["layers"] = "a list in which all layers have experts, or none"
    return found


def fields_of(model: ModelConfig, family: Family) -> Settings:
    """Values of the fields that have keys in a family, by the name of the field. Those of experts are left out of a
    model without them.
    """
    names = [name for name in family.keys if model.num_experts or not name.startswith(_SECTION)]
    return {name: attrgetter(name)(model) for name in names}


def fixed_of(model: ModelConfig, family: Family) -> Settings:
    """Fields of a family that have the same value in all of its models, and mean anything in this one."""
    names = set(family.fixed)
    if not model.num_experts:
        names = {name for name in names if not name.startswith(_SECTION)}
    if model.experts.groups == 1:
        names -= {"experts.group_top"}
    return {name: value for name, value in family.fixed.items() if name in names}


def plain_layers(model: ModelConfig, family: Family) -> list[str]:
    """Entries of a model's layers, in their order. A family that says otherwise which layers have experts has an MLP in
    their place.
    """
    entries = [model.layer(index) for index in range(model.num_layers)]
    if family.experts is None:
        return entries
    return [_with_last(entry, "swiglu") if entry.endswith(_EXPERTS) else entry for entry in entries]


def _flags_of(model: ModelConfig) -> list[bool]:
    return [_EXPERTS in model.layer(index).split() for index in range(model.num_layers)]


def _shares_size(family: Family) -> bool:
    """Whether one key has the width of MLPs and of experts."""
    return family.keys.get("mlp_size") == family.keys["experts.size"]


def _with_last(entry: str, kind: str) -> str:
    """Return a layer with another kind of its last part."""
    return " ".join([*entry.split()[:-1], kind])
