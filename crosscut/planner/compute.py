"""Count of the floating-point operations of a token and of a step.

Only matrix products are counted, a multiplication and an addition as two. The products of a layer are read from
`crosscut.architecture`. For GPT-2, the forward pass of a sequence of `S` tokens takes 24 S H^2 + 4 S^2 H in each layer
and 2 S H V in the output projection. The backward pass takes twice that, once for the gradient of the input and once
for that of the weights. Recomputation runs every layer's forward pass a second time, but not the output projection's.
These are the terms of Narayanan et al. 2021 (arXiv 2104.04473):

    without recomputation   72 B S L H^2 (1 + S / 6H + V / 12LH)
    with recomputation      96 B S L H^2 (1 + S / 6H + V / 16LH)

Attention is counted over the full S x S square, not its causal half, and the vocabulary without its padding, so that
the count depends on the model alone and not on a kernel or a layout.
"""

from functools import lru_cache

from crosscut.architecture import Layer, Target, describe
from crosscut.architecture.readings import inner_products, repeated_flops, weight_flops
from crosscut.config import ModelConfig
from crosscut.config.checks import require_at_least
from crosscut.config.training import Recompute
from crosscut.planner.activations import recomputation_step
from crosscut.planner.candidate import Planned
from crosscut.planner.parameters import known_vocab_size

_ONE_TOKEN = Target()


def forward_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of one token's forward pass in a sequence of `sequence_length` tokens.

    Raises `ConfigError` for a sequence length below 1 or if `model.vocab_size` is still 0.
    """
    return _layers(model, sequence_length) + _output_projection(model)


def model_flops_per_token(model: ModelConfig, sequence_length: int, *, recompute: bool = False) -> int:
    """FLOPs of one token's forward and backward pass in a sequence of `sequence_length` tokens.

    Without `recompute` these are the model's FLOPs, by which utilisation is reported; with it, the FLOPs that the
    hardware computes if the backward pass recomputes the activations of every layer (paper, section 4.1.1). Raises
    `ConfigError` for a sequence length below 1 or if `model.vocab_size` is still 0.
    """
    layer_passes = 4 if recompute else 3
    return layer_passes * _layers(model, sequence_length) + 3 * _output_projection(model)


def flops_per_step(run: Planned, *, recompute: bool = False) -> int:
    """FLOPs of one optimizer step over all ranks: `model_flops_per_token` for every token of the batch.

    With `recompute`, the published count of a run that recomputes every layer whole. `recomputed_flops_per_step` counts
    what such a run of Crosscut repeats.
    """
    tokens = run.training.batch_size * run.training.sequence_length
    return tokens * model_flops_per_token(run.model, run.training.sequence_length, recompute=recompute)


def recomputed_flops_per_step(run: Planned, *, compiled: bool = False) -> int:
    """FLOPs that the backward pass of one step repeats, over all ranks, as `training.recompute` says.

    A layer that is recomputed whole repeats the products that some kept value depends on, and `compiled` all of them.
    `selective` repeats scores and values, `operators` no product. Raises as `flops_per_step`.
    """
    length = run.training.sequence_length
    per_token = 0
    for layer, count in describe(run.model).recomputed(recomputation_step(run)).items():
        if run.training.recompute == Recompute.FULL:
            weights = repeated_flops(layer, _ONE_TOKEN, everything=compiled)
            per_token += count * (weights + _inner_flops(layer, length))
        elif run.training.recompute == Recompute.SELECTIVE:
            per_token += count * _inner_flops(layer, length)
    return run.training.batch_size * length * per_token


def hardware_flops_per_rank(run: Planned, *, compiled: bool = False) -> int:
    """FLOPs that one rank computes in one step, with those that the backward pass repeats.

    Ranks divide the products evenly, unless several ranks compute the same head of keys and values. The FLOPs that this
    adds are no work of the model. Raises as `flops_per_step`.
    """
    tensor = run.layout.tensor
    decoder = describe(run.model)
    again = decoder.recomputed(recomputation_step(run) if run.training.recompute == Recompute.FULL else 0)
    repeated = 0
    for layer, count in decoder.kinds.items():
        by_ranks = tensor * weight_flops(layer, Target(tensor=tensor))
        repeated += (3 * count + again[layer]) * (by_ranks - weight_flops(layer, _ONE_TOKEN))
    tokens = run.training.batch_size * run.training.sequence_length
    flops = flops_per_step(run) + recomputed_flops_per_step(run, compiled=compiled) + tokens * repeated
    return flops // run.layout.world_size


@lru_cache(maxsize=4096)
def _layers(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of a token's forward pass through all layers."""
    require_at_least("sequence_length", sequence_length, 1)
    kinds = describe(model).kinds.items()
    return sum(
        count * (weight_flops(layer, _ONE_TOKEN) + _inner_flops(layer, sequence_length)) for layer, count in kinds
    )


def _inner_flops(layer: Layer, sequence_length: int) -> int:
    """FLOPs of a token's scores and weighted values."""
    inner = inner_products(layer, Target(length=sequence_length))
    return sum(product.flops for product in inner) // sequence_length


def _output_projection(model: ModelConfig) -> int:
    known_vocab_size(model)
    return describe(model).head.flops_per_token()
