"""Count the floating-point operations (FLOPs) per token.

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

from dataclasses import replace
from functools import lru_cache
from math import ceil

from crosscut.architecture import Decoder, Layer, Target, describe
from crosscut.architecture.readings import gradient_flops, inner_products, weight_flops
from crosscut.config import Layout, ModelConfig
from crosscut.config.checks import require_at_least
from crosscut.config.conventions import MASKED_FRACTION
from crosscut.planner.parameters import known_vocab_size

ONE_TOKEN = Target.of(Layout())
"""Target with one token on one rank, and no other tokens to attend to."""


def forward_flops_per_token(model: ModelConfig, sequence_length: int, *, mask_fraction: float = MASKED_FRACTION) -> int:
    """FLOPs of one token's forward pass in a sequence of `sequence_length` tokens.

    A masked language model computes logits for only a fraction of its tokens, `mask_fraction`. The result is a mean
    over all tokens. Raises `ConfigError` for a sequence length below 1 or if `model.vocab_size` is still 0.
    """
    return _layers(describe(model), sequence_length) + head_flops_per_token(model, sequence_length, mask_fraction)


def model_flops_per_token(
    model: ModelConfig, sequence_length: int, *, recompute: bool = False, mask_fraction: float = MASKED_FRACTION
) -> int:
    """FLOPs of one token's forward and backward pass in a sequence of `sequence_length` tokens.

    Without `recompute`, the result is the model FLOPs, from which utilisation is computed. With `recompute`, the result
    is the FLOPs that the hardware computes if every layer is recomputed in the backward pass (paper, section 4.1.1). A
    masked language model computes logits for only a fraction of its tokens, `mask_fraction`. The result is a mean over
    all tokens. Raises `ConfigError` for a sequence length below 1 or if `model.vocab_size` is still 0.
    """
    whole = describe(model)
    return part_flops_per_token(whole, model, sequence_length, recompute=recompute, mask_fraction=mask_fraction)


def part_flops_per_token(
    part: Decoder, model: ModelConfig, sequence_length: int, *, recompute: bool = False, mask_fraction: float
) -> int:
    """FLOPs of one token's forward and backward pass through `part`, which describes stages of the model, or the whole
    model. The other arguments and the errors are the same as for `model_flops_per_token`.
    """
    output = 0
    if part.is_last:
        products = 2 if part.head.is_frozen else 3
        output = products * head_flops_per_token(model, sequence_length, mask_fraction)
    again = 3 if recompute else 2
    return again * _layers(part, sequence_length) + _second_gradients(part, sequence_length) + output


@lru_cache(maxsize=4096)
def _layers(part: Decoder, sequence_length: int) -> int:
    """FLOPs of a token's forward pass through the layers of a part of the model."""
    require_at_least("sequence_length", sequence_length, 1)
    kinds = part.kinds.items()
    return sum(count * layer_flops_per_token(layer, sequence_length) for layer, count in kinds)


def layer_flops_per_token(layer: Layer, sequence_length: int) -> int:
    """FLOPs of one token's forward pass through a layer, in a sequence of `sequence_length` tokens."""
    return weight_flops(layer, ONE_TOKEN) + inner_flops(layer, replace(ONE_TOKEN, length=sequence_length))


def _second_gradients(part: Decoder, sequence_length: int) -> int:
    """FLOPs per token to compute the gradient of the second factor of each product in the layers of `part`. The second
    factors are the trained weights and, in attention, the keys and values.
    """
    kinds, sequence = part.kinds.items(), replace(ONE_TOKEN, length=sequence_length)
    return sum(count * (gradient_flops(layer, ONE_TOKEN) + inner_flops(layer, sequence)) for layer, count in kinds)


def inner_flops(layer: Layer, sequence: Target) -> int:
    """FLOPs of one token's products of two activations on one rank, as a mean over the tokens of one `sequence`: in
    attention, the scores and the weighted values; in a scan, the products inside chunks and between them.
    """
    return sum(product.flops for product in inner_products(layer, sequence)) // sequence.length


def head_flops_per_token(model: ModelConfig, length: int, fraction: float) -> int:
    """FLOPs of the head's forward pass, as a mean over the tokens of a sequence of `length` tokens. A masked language
    model computes logits for only a fraction of its tokens, `fraction`. Raises `ConfigError` if `model.vocab_size` is
    still 0.
    """
    known_vocab_size(model)
    head = describe(model).head
    if "labels" in head.reads:
        return head.flops(replace(ONE_TOKEN, length=length)) // length
    if "predicted" not in head.reads:
        return head.flops(ONE_TOKEN)
    sequences = ceil(1000 / length)  # enough tokens to make the rounding negligible
    target = replace(ONE_TOKEN, sequences=sequences, length=length, predicted=round(fraction * sequences * length))
    return head.flops(target) // target.tokens
