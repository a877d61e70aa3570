"""Read and write what a `config.json` says about gated delta nets, and about the layers without experts beside them."""

from crosscut.config.checks import Settings
from crosscut.config.model import ModelConfig
from crosscut.config.published.families import Family
from crosscut.config.published.table import PublishedTable, Table

_SECTION = "gated_delta"


def delta_fields(table: PublishedTable, family: Family, fields: Settings) -> Settings:
    """Fields of the section `gated_delta` that the file leaves out because they follow from others, and the places of
    the norms. Empty for a family without gated delta nets. `fields` are the other fields.

    Raises `ConfigError` for a model with experts.
    """
    if "layers" not in fields:
        return {}
    if family.dense_list:
        _require_no_experts(table, family.dense_list, fields["num_layers"])
    places = {} if family.layers is None else family.layers.norm_places
    if not places:
        return {}
    heads = fields["num_heads"]
    keys, values = (fields.get(f"{_SECTION}.num_{kind}_heads") or heads for kind in ("key", "value"))
    size = fields.get(f"{_SECTION}.key_head_size") or int(0.75 * fields["hidden_size"] / max(keys, 1))
    of_values = fields.get(f"{_SECTION}.value_head_size") or 2 * size
    sizes = {"num_key_heads": keys, "num_value_heads": values, "key_head_size": size, "value_head_size": of_values}
    return {
        "norm_places": tuple(places[layer] for layer in fields["layers"]),
        **{f"{_SECTION}.{name}": size for name, size in sizes.items()},
    }


def _require_no_experts(table: PublishedTable, key: str, num_layers: int) -> None:
    """Raise `ConfigError` for a model with a layer that has experts: one that the list under `key` does not name, if
    there are experts, and if its number is a multiple of `decoder_sparse_step`.
    """
    dense = table.get(key, [])
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise table.refusal(key, "a list of indices of layers", dense)
    step = table.number("decoder_sparse_step", table.get("decoder_sparse_step", 1), int)
    number = table.number("num_experts", table.get("num_experts", 1), int)
    sparse = {index for index in range(num_layers) if number > 0 and step > 0 and (index + 1) % step == 0}
    if sparse - set(dense):
        must = f"a list of all layers, from 0 to {num_layers - 1}, because Crosscut reads no published experts"
        raise table.refusal(key, must, dense)


def delta_keys(model: ModelConfig, family: Family) -> Table:
    """Keys of a `config.json` for layers without experts, and keys that are null: those of rotary positions, in a model
    without them whose family may have them, and those with an unfit default. Empty for other families.
    """
    keys: Table = {family.dense_list: [*range(model.num_layers)]} if family.dense_list else {}
    has_no_base = family.has_optional_base and model.positions == "none"
    return {**keys, **dict.fromkeys((*family.nulls, *(("rope_parameters", "rope_theta") if has_no_base else ())))}
