"""Number of parameters of a model, and the number that one tensor rank holds.

Every parameter is either sharded over the tensor ranks or replicated on every tensor rank, as `crosscut.architecture`
describes. For GPT-2, with `V` vocabulary, `P` positions, `H` hidden size and `L` layers:

    sharded = V H + L (12 H^2 + 7 H)        replicated = P H + L 6 H + 2 H
"""

from functools import lru_cache
from math import prod
from typing import NamedTuple

from crosscut.architecture import Decoder, LocalParameter, Target, describe, layer_parameters, root_parameters
from crosscut.config import ConfigError, Layout, ModelConfig
from crosscut.config.layouts.ranks import RankPlan

_ALONE = Target.of(Layout())


def count_parameters(model: ModelConfig) -> int:
    """Number of parameters of the whole model, without the padding of the vocabulary.

    Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    known_vocab_size(model)
    decoder = describe(model)
    root = sum(prod(parameter.shape) for parameter in decoder.root_parameters())
    layers = decoder.kinds.items()
    return root + sum(count * prod(p.shape) for layer, count in layers for p in layer.parameters())


def count_active_parameters(model: ModelConfig) -> int:
    """Number of parameters that one token uses: all parameters of the model, but of each mixture only as many experts
    as a token chooses. Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    layers = describe(model).kinds.items()
    stacked = [(p, count) for layer, count in layers for p in layer.parameters() if p.stacked]
    unused = sum(count * prod(p.shape[1:]) * (p.stacked - model.experts.per_token) for p, count in stacked)
    return count_parameters(model) - unused


@lru_cache(maxsize=4096)
def _tensors(part: Decoder, target: Target) -> tuple[tuple[LocalParameter, int], ...]:
    """Distinct parameters on one tensor rank, each with the number of times that it occurs. The parameters outside of
    the layers come first, then those of the layers.
    """
    root = [(parameter, 1) for parameter in root_parameters(part, target)]
    layers = [(p, count) for layer, count in part.kinds.items() for p in layer_parameters(layer, target)]
    return (*root, *layers)


class Shares(NamedTuple):
    """Number of ranks that each store a slice of the same parameter."""

    dense: int
    experts: int
    """Number of ranks that store slices of the same experts."""

    @classmethod
    def of(cls, layout: Layout) -> "Shares":
        """Return the numbers of ranks on a layout."""
        return cls(layout.ranks.slices.size, layout.expert_ranks.slices.size)

    def number(self, parameter: LocalParameter) -> int:
        """Number of ranks that store slices of a parameter."""
        return self.experts if parameter.is_expert else self.dense

    def own(self, parameter: LocalParameter) -> int:
        """Elements of a parameter that one of these ranks keeps. The number of rows is rounded up."""
        return -(-parameter.shape[0] // self.number(parameter)) * prod(parameter.shape[1:])


def parameters_per_rank(model: ModelConfig, layout: Layout) -> int:
    """Number of parameters on each tensor rank: its shards, with padding, and all replicated parameters. For a
    pipeline, the result is the sum over one tensor rank of each stage.

    The vocabulary is padded to a multiple of 128 x `layout.tensor` (paper, section 5.1). `layout.tensor` must divide
    the model evenly, which `RunConfig` checks. Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    known_vocab_size(model)
    return sum(count * parameter.size for parameter, count in _tensors(describe(model), Target.of(layout)))


def replicated_parameters(model: ModelConfig, layout: Layout) -> int:
    """Number of parameters that are replicated on every tensor rank."""
    found = _tensors(describe(model), Target.of(layout))
    return sum(count * parameter.size for parameter, count in found if parameter.is_whole)


def trained_parameters_per_rank(part: Decoder, layout: Layout, plan: RankPlan | None = None) -> int:
    """Number of trainable parameters of a part of the model on each tensor rank: all parameters, or only the adapters
    of a model that has adapters. Only these parameters have gradients and optimizer state. With `plan`, only the
    parameters of this plan of the layout's ranks count.
    """
    return _trained_parameters(part, Target.of(layout), _of_experts(layout, plan))


@lru_cache(maxsize=4096)
def _trained_parameters(part: Decoder, target: Target, experts: bool | None) -> int:
    """Number of trainable parameters: all, only experts (True), or all but experts (False)."""
    found = ((p, count) for p, count in _tensors(part, target) if not p.is_frozen)
    return sum(count * p.size for p, count in found if experts in (None, p.is_expert))


def _of_experts(layout: Layout, plan: RankPlan | None) -> bool | None:
    """Whether a plan answers for experts; None if it answers for all parameters."""
    return None if plan is None or len(layout.plans) == 1 else plan is layout.expert_ranks


def trained_share(part: Decoder, layout: Layout) -> float:
    """Number of trainable parameters of a part of the model that each rank stores, as a mean over the ranks."""
    return sum(trained_parameters_per_rank(part, layout, plan) / plan.slices.size for plan in layout.plans)


def partial_gradients(part: Decoder, layout: Layout) -> int:
    """Number of gradient elements of a part of the model that must be summed over the tensor ranks, because each rank
    has only a part of each gradient.
    """
    found = _tensors(part, Target.of(layout))
    return sum(count * parameter.size for parameter, count in found if parameter.has_partial_gradient)


def num_tensors(part: Decoder, layout: Layout, plan: RankPlan) -> int:
    """Number of parameter tensors in a part of the model that belong to a plan of the layout's ranks."""
    experts = _of_experts(layout, plan)
    return sum(count for p, count in _tensors(part, _ALONE) if experts in (None, p.is_expert))


def num_trained_tensors(part: Decoder) -> int:
    """Number of trainable parameter tensors in a part of the model."""
    return sum(count for parameter, count in _tensors(part, _ALONE) if not parameter.is_frozen)


def num_replicated_tensors(part: Decoder, layout: Layout) -> int:
    """Number of parameter tensors of a part of the model that are replicated on every tensor rank."""
    return sum(count for parameter, count in _tensors(part, Target.of(layout)) if parameter.is_whole)


def known_vocab_size(model: ModelConfig) -> int:
    """Return `model.vocab_size`. Raises `ConfigError` for 0, which leaves the size to the tokenizer."""
    if not model.vocab_size:
        raise ConfigError(
            "`model.vocab_size` must be at least 1 for a forecast, but is 0, which leaves the size to the tokenizer. "
            "Set it to the number of tokens of the tokenizer."
        )
    return model.vocab_size
