"""Settings of a run that makes a mixture of experts out of a published model without experts: each expert starts as a
copy of its layer's MLP (Komatsuzaki et al. 2022, arXiv 2212.05055).
"""

from collections.abc import Sequence
from itertools import zip_longest

from crosscut.config.checks import Settings, listed, shown
from crosscut.config.errors import ConfigError
from crosscut.config.loading.building import Override, Table, parsed
from crosscut.config.model import Biases, ModelConfig
from crosscut.config.parts.kinds import MLPS, FeedForward, checked_layers


def settings_of_copies(source: ModelConfig, model: Table, folder: str) -> Settings:
    """Return the settings of `[model.experts]` that follow from the MLPs of `source`, the model in `folder`. Empty if
    the experts of the run are not to be copies: if the section `model` of the run has no `experts` in its `layers`, or
    if `source` has experts of its own.

    Raises `ConfigError` if copies of the MLPs cannot be the experts of the run.
    """
    layers = _layers_of(model)
    if source.num_experts or not any(FeedForward.EXPERTS in layer.split() for layer in layers):
        return {}
    kinds = _replaced_kinds(source, layers, folder)
    if len(kinds) > 1:
        raise ConfigError(
            f"`experts` in `model.layers` must take the place of MLPs of one kind, but takes that of {listed(kinds)} "
            f"in the model in `{folder}` (`training.initialize_from`). Leave all but one kind as they are."
        )
    if source.biases is Biases.ALL:
        raise ConfigError(
            f"`experts` in `model.layers` must take the place of MLPs without biases, but those of the model in "
            f"`{folder}` (`training.initialize_from`) have biases, and experts have none. Choose a model such as a "
            "Llama."
        )
    if rank := parsed(model.get("lora_rank", 0)):
        raise ConfigError(
            "`model.lora_rank` must be 0 for a run whose experts start as copies of the MLPs in "
            f"`training.initialize_from`, but is {shown(rank)}. Adapters leave experts as they are, so that all would "
            "stay equal. Remove `model.lora_rank`."
        )
    return {"mlp": kinds[0], "size": source.mlp_size, "shared_size": 0}


def _layers_of(model: Table) -> tuple[str, ...]:
    """Layers of a run's model; empty if the run does not give them, or if they are wrong."""
    given = model.get("layers", ())
    items = given.items() if isinstance(given, Override) else given
    try:
        return checked_layers(tuple(map(str, items))) if isinstance(items, list | tuple) and items else ()
    except ConfigError:
        return ()


def _replaced_kinds(source: ModelConfig, layers: Sequence[str], folder: str) -> list[str]:
    """Return the kinds of the MLPs in whose place the run has experts. Raises `ConfigError` if the layers differ in
    anything else.
    """
    found: dict[str, None] = {}
    for index in range(source.num_layers):
        ours, theirs = layers[index % len(layers)].split(), source.layer(index).split()
        changed = [(own, kind) for own, kind in zip_longest(ours, theirs) if own != kind]
        if any(own != FeedForward.EXPERTS or kind not in MLPS for own, kind in changed):
            raise ConfigError(
                f"`model.layers` must be the layers of the model in `{folder}` (`training.initialize_from`) with "
                f'`experts` in the place of MLPs, but layer {index} is "{" ".join(ours)}" instead of '
                f'"{" ".join(theirs)}". Write `experts` instead of an MLP, and leave all other parts as they are.'
            )
        found |= dict.fromkeys(kind for _, kind in changed)
    return list(found)
