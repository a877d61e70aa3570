"""Read and write what a `config.json` says about gated delta nets, and about the layers beside them."""

from crosscut.config.checks import Settings
from crosscut.config.model import ModelConfig
from crosscut.config.published.families import Family
from crosscut.config.published.table import Table

_SECTION = "gated_delta"


def delta_fields(family: Family, fields: Settings) -> Settings:
    """Fields of the section `gated_delta` that the file leaves out because they follow from others, and the places of
    the norms. Empty for a family without gated delta nets. `fields` are the other fields.
    """
    if "layers" not in fields:
        return {}
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


def delta_keys(model: ModelConfig, family: Family) -> Table:
    """Keys of a `config.json` that are null: those of rotary positions, in a model without them whose family may have
    them, and those with an unfit default. Empty for other families.
    """
    has_no_base = family.has_optional_base and model.positions == "none"
    return dict.fromkeys((*family.nulls, *(("rope_parameters", "rope_theta") if has_no_base else ())))
