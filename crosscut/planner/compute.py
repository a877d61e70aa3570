"""Count the floating-point operations (FLOPs) per token and per training step.

The count covers matrix products only; a multiplication and an addition count as two FLOPs. The products of a layer come
from `crosscut.architecture`. For GPT-2, the forward pass of a sequence of `S` tokens takes 24 S H^2 + 4 S^2 H in each
layer and 2 S H V in the output projection. The backward pass takes twice as many FLOPs as the forward pass, half of
them for the input gradients and half for the weight gradients. Frozen weights have no gradients, so a model with
adapters takes fewer FLOPs. Recomputation runs the forward pass of every layer a second time, but not the output
projection. The totals agree with Narayanan et al. 2021 (arXiv 2104.04473):

    without recomputation   72 B S L H^2 (1 + S / 6H + V / 12LH)
    with recomputation      96 B S L H^2 (1 + S / 6H + V / 16LH)

Here, B is the number of sequences, L the number of layers, H the hidden size and V the vocabulary. Attention counts the
full S x S square of scores, not only the causal half. The vocabulary counts without padding. The count therefore
depends only on the model, not on kernels or the layout.
"""

from functools import lru_cache
from math import ceil

from crosscut.architecture import Layer, Target, describe
from crosscut.architecture.readings import gradient_flops, inner_products, repeated_flops, weight_flops
from crosscut.config import ModelConfig
from crosscut.config.checks import require_at_least
from crosscut.config.conventions import MASKED_FRACTION
from crosscut.config.training import Recompute
from crosscut.planner.activations import recomputation_step
from crosscut.planner.candidate import Planned
from crosscut.planner.muon import muon_flops
from crosscut.planner.parameters import known_vocab_size

_ONE_TOKEN = Target()


def forward_flops_per_token(model: ModelConfig, sequence_length: int, *, mask_fraction: float = MASKED_FRACTION) -> int:
    """FLOPs of one token's forward pass in a sequence of `sequence_length` tokens.

    A masked language model computes logits for a `mask_fraction` of its tokens. The result is a mean over the tokens.
    Raises `ConfigError` for a sequence length below 1 or if `model.vocab_size` is still 0.
    """
    return _layers(model, sequence_length) + head_flops_per_token(model, sequence_length, mask_fraction)


def model_flops_per_token(
    model: ModelConfig, sequence_length: int, *, recompute: bool = False, mask_fraction: float = MASKED_FRACTION
) -> int:
    """FLOPs of one token's forward and backward pass in a sequence of `sequence_length` tokens.

    Without `recompute`, the result is the model FLOPs, from which utilisation is reported. With `recompute`, the result
    is the FLOPs that the hardware computes if every layer is recomputed in the backward pass (paper, section 4.1.1).
    A masked language model computes logits for a `mask_fraction` of its tokens. The result is a mean over the tokens.
    Raises `ConfigError` for a sequence length below 1 or if `model.vocab_size` is still 0.
    """
    head, layers = describe(model).head, _layers(model, sequence_length)
    again = 3 if recompute else 2
    output = (2 if head.vocabulary.is_frozen else 3) * head_flops_per_token(model, sequence_length, mask_fraction)
    return again * layers + _second_gradients(model, sequence_length) + output


def flops_per_step(run: Planned, *, recompute: bool = False) -> int:
    """FLOPs of one optimizer step over all ranks: `model_flops_per_token` times the tokens of the batch.

    With `recompute`, the result is the published count for a run that recomputes whole layers. Crosscut repeats fewer
    products, which `recomputed_flops_per_step` counts. Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    tokens = run.training.batch_size * run.training.sequence_length
    length, fraction = run.training.sequence_length, run.mask_fraction
    return tokens * model_flops_per_token(run.model, length, recompute=recompute, mask_fraction=fraction)


def recomputed_flops_per_step(run: Planned, *, compiled: bool = False) -> int:
    """FLOPs that recomputation repeats in one step, over all ranks.

    The count depends on `training.recompute`. With "full", a `compiled` layer repeats all products, and an uncompiled
    layer repeats only the products on which its saved values depend. "selective" repeats the scores and the weighted
    values. "operators" and "none" repeat no product.
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
    """FLOPs that one rank computes in one step, including recomputation.

    The tensor ranks divide the products evenly, with one exception: if there are fewer key-value heads than tensor
    ranks, several ranks compute the same head. This function includes the duplicated FLOPs, but `flops_per_step` does
    not. This function also includes the products of Muon, which every rank computes. Raises `ConfigError` if
    `model.vocab_size` is still 0.
    """
    tensor = run.layout.tensor
    decoder = describe(run.model)
    again = decoder.recomputed(recomputation_step(run) if run.training.recompute == Recompute.FULL else 0)
    repeated = 0
    for layer, count in decoder.kinds.items():
        of_rank = Target(tensor=tensor)
        inputs = tensor * weight_flops(layer, of_rank) - weight_flops(layer, _ONE_TOKEN)
        weights = tensor * gradient_flops(layer, of_rank) - gradient_flops(layer, _ONE_TOKEN)
        repeated += (2 * count + again[layer]) * inputs + count * weights
    tokens = run.training.batch_size * run.training.sequence_length
    flops = flops_per_step(run) + recomputed_flops_per_step(run, compiled=compiled) + tokens * repeated
    return flops // run.layout.world_size + muon_flops(run)


@lru_cache(maxsize=4096)
def _layers(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of a token's forward pass through all layers."""
    require_at_least("sequence_length", sequence_length, 1)
    kinds = describe(model).kinds.items()
    return sum(count * layer_flops_per_token(layer, sequence_length) for layer, count in kinds)


def layer_flops_per_token(layer: Layer, sequence_length: int) -> int:
    """FLOPs of one token's forward pass through a layer, in a sequence of `sequence_length` tokens."""
    return weight_flops(layer, _ONE_TOKEN) + _inner_flops(layer, sequence_length)


def _second_gradients(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs per token for the gradients of the second factors in the products of all layers. The second factors are the
    trained weights, and the keys and values in attention.
    """
    kinds = describe(model).kinds.items()
    return sum(
        count * (gradient_flops(layer, _ONE_TOKEN) + _inner_flops(layer, sequence_length)) for layer, count in kinds
    )


def _inner_flops(layer: Layer, sequence_length: int) -> int:
    """FLOPs of one token's attention scores and weighted values."""
    inner = inner_products(layer, Target(length=sequence_length))
    return sum(product.flops for product in inner) // sequence_length


def head_flops_per_token(model: ModelConfig, length: int, fraction: float) -> int:
    """FLOPs of the head's forward pass, as a mean over the tokens of a sequence of `length` tokens. A masked language
    model computes logits for a `fraction` of its tokens. Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    known_vocab_size(model)
    if model.solves_task:
        return describe(model).head.flops(Target(length=length)) // length
    if not model.predicts_masked:
        return describe(model).head.flops(_ONE_TOKEN)
    sequences = ceil(1000 / length)  # enough tokens to make the rounding negligible
    target = Target(sequences=sequences, length=length, predicted=round(fraction * sequences * length))
    return describe(model).head.flops(target) // target.tokens
