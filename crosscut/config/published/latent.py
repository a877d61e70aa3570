"""Read and write what a `config.json` says about latent attention."""

from crosscut.config.checks import Settings
from crosscut.config.model import ModelConfig
from crosscut.config.published.families import Family
from crosscut.config.published.rotary import score_coefficient
from crosscut.config.published.table import PublishedTable, Table

_QUERY_RANK = "latent_attention.query_rank"


def latent_fields(table: PublishedTable, family: Family) -> Settings:
    """Fields of the section `latent_attention` that do not have keys of their own. Empty for a family without latent
    attention.
    """
    return {"latent_attention.mscale_all_dim": score_coefficient(table)} if _QUERY_RANK in family.keys else {}


def latent_keys(model: ModelConfig, family: Family) -> Table:
    """Keys of a `config.json` for latent attention whose values are not those of fields. Null is the published form of
    a rank of 0. Empty for a family without latent attention.
    """
    if _QUERY_RANK not in family.keys:
        return {}
    return {family.keys[_QUERY_RANK]: model.latent_attention.query_rank or None}
