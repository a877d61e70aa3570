"""Number of parameters of a model, and the number that one tensor rank holds.

Every parameter is either sharded over the tensor ranks or replicated on every tensor rank, as `crosscut.architecture`
describes. For GPT-2, with `V` vocabulary, `P` positions, `H` hidden size and `L` layers:

    sharded = V H + L (12 H^2 + 7 H)        replicated = P H + L 6 H + 2 H
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from crosscut.architecture import LocalParameter, describe, layer_parameters, root_parameters
from crosscut.config import ConfigError, Layout, ModelConfig


def count_parameters(model: ModelConfig) -> int:
    """Number of parameters of the whole model, without the padding of the vocabulary.

    Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    known_vocab_size(model)
    decoder = describe(model)
    root = sum(prod(parameter.shape) for parameter in decoder.root_parameters())
    layers = decoder.kinds.items()
    return root + sum(count * prod(p.shape) for layer, count in layers for p in layer.parameters())


@lru_cache(maxsize=4096)
def _tensors(model: ModelConfig, tensor: int) -> tuple[tuple[LocalParameter, int], ...]:
    """Parameters on one tensor rank, each with the number of equal parameters: the root first, then the layers."""
    known_vocab_size(model)
    decoder = describe(model)
    root = [(parameter, 1) for parameter in root_parameters(decoder, tensor)]
    layers = [(p, count) for layer, count in decoder.kinds.items() for p in layer_parameters(layer, tensor)]
    return (*root, *layers)


@lru_cache(maxsize=4096)
def _per_rank(model: ModelConfig, tensor: int) -> int:
    return sum(count * parameter.size for parameter, count in _tensors(model, tensor))


def parameters_per_rank(model: ModelConfig, layout: Layout) -> int:
    """Number of parameters on each tensor rank: its shards, with padding, and all replicated parameters.

    The vocabulary is padded to a multiple of 128 x `layout.tensor` (paper, section 5.1). `layout.tensor` must divide
    the model evenly, which `RunConfig` checks. Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    return _per_rank(model, layout.tensor)


def trained_parameters_per_rank(model: ModelConfig, layout: Layout) -> int:
    """Number of parameters on each tensor rank that train: all parameters, or only the adapters of a model that has
    adapters. Only these parameters have gradients and optimizer state.
    """
    return sum(count * part.size for part, count in _tensors(model, layout.tensor) if not part.is_frozen)


def replicated_parameters(model: ModelConfig, layout: Layout) -> int:
    """Number of parameters that are replicated on every tensor rank."""
    return sum(count * parameter.size for parameter, count in _tensors(model, layout.tensor) if parameter.is_whole)


def partial_gradients(model: ModelConfig, layout: Layout) -> int:
    """Number of gradient elements that must be summed over the tensor ranks, because each rank has only a part."""
    return sum(count * parameter.size for parameter, count in _partial(model, layout))


def _partial(model: ModelConfig, layout: Layout) -> Iterator[tuple[LocalParameter, int]]:
    split = layout.sequence_parallel
    found = _tensors(model, layout.tensor)
    return ((p, count) for p, count in found if p.has_partial_gradient(layout.tensor, split=split))


def num_tensors(model: ModelConfig) -> int:
    """Number of parameter tensors of the model."""
    return sum(count for _, count in _tensors(model, 1))


def num_trained_tensors(model: ModelConfig) -> int:
    """Number of parameter tensors of the model that train."""
    return sum(count for parameter, count in _tensors(model, 1) if not parameter.is_frozen)


def num_replicated_tensors(model: ModelConfig, layout: Layout) -> int:
    """Number of parameter tensors that are replicated on every tensor rank."""
    return sum(count for parameter, count in _tensors(model, layout.tensor) if parameter.is_whole)


def known_vocab_size(model: ModelConfig) -> int:
    """Return `model.vocab_size`. Raises `ConfigError` for 0, which leaves the size to the tokenizer."""
    if not model.vocab_size:
        raise ConfigError(
            "`model.vocab_size` must be at least 1 for a forecast, but is 0, which leaves the size to the tokenizer. "
            "Set it to the number of tokens of the tokenizer."
        )
    return model.vocab_size
