"""Sizes of the parts of a model on one rank: the layers, and the parameters outside of the layers."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from crosscut.architecture import Decoder, Kept, Layer, Target, layer_parameters, lower, root_parameters
from crosscut.architecture.parameters import LocalParameter
from crosscut.architecture.readings import (
    cheap_inside,
    deferred,
    gathered_parameters,
    gathered_with_layer,
    last_deferred_input,
    last_matrix,
    temporary,
)
from crosscut.architecture.steps import Step
from crosscut.config.training import Recompute
from crosscut.planner.activations import activations_of
from crosscut.planner.candidate import Candidate
from crosscut.planner.parameters import Shares


class RootSizes(NamedTuple):
    """Parameters outside of the layers (the root) on one rank, in elements."""

    size: int
    share: int
    """Elements of the shard that a data rank keeps."""
    trained: int
    """Trainable elements of this shard."""
    vocabulary: int
    """Elements of the matrix of the output projection; 0 for a model that solves a task."""
    vocabulary_gradient: int
    """Elements of the gradient of the output projection's matrix. 0 if the matrix is frozen."""
    last_gradient: int
    """Elements of the gradient that the backward pass of the embedding completes: the gradient of the output
    projection, or, in a model that solves a task, the gradient of the token embedding."""


class LayerMemory(NamedTuple):
    """Parameters of a layer on one rank, in elements, and activations of the layer, in bytes."""

    size: int
    share: int
    """Elements of the shard that a data rank keeps."""
    trained: int
    """Trainable elements of this shard."""
    last_matrix: int
    """Elements of the gradient of the layer's last matrix, which the backward pass computes first."""
    kept: Kept
    """Activations that the layer keeps under `training.recompute`."""
    plain: Kept
    """Activations that the layer keeps without recomputation."""
    again: int
    """Bytes of recomputed activations that the layer holds during its backward pass, in addition to `kept`."""
    temporary: int
    """Bytes of temporary tensors of the layer's backward pass."""


@lru_cache(maxsize=4096)
def root_sizes(decoder: Decoder, target: Target, shares: Shares) -> RootSizes:
    """Sizes of the parameters outside of the layers on one rank. `shares` ranks store slices of them."""
    root = gathered_parameters(decoder, target) if shares.dense > 1 else root_parameters(decoder, target)
    if not decoder.is_last:
        tokens = decoder.embedding.tokens.on(target)
        last = tokens.size if decoder.is_first and not tokens.is_frozen else 0
        return RootSizes(_size(root), *_shares(root, shares), 0, 0, last)
    vocabulary = (decoder.head.vocabulary or decoder.embedding.tokens).on(target)
    gradient = 0 if vocabulary.is_frozen else vocabulary.size
    if decoder.head.vocabulary is None:
        return RootSizes(_size(root), *_shares(root, shares), 0, 0, gradient)
    return RootSizes(_size(root), *_shares(root, shares), vocabulary.size, gradient, gradient)


@lru_cache(maxsize=4096)
def _sizes(layer: Layer, target: Target, shares: Shares) -> tuple[int, int, int, int]:
    """Four numbers of elements for a layer: all parameters on one tensor rank, the shard of these parameters on one
    data rank, the trainable part of this shard, and the gradient of the last matrix.
    """
    parts = gathered_with_layer(layer, target) if shares.dense > 1 else layer_parameters(layer, target)
    return _size(parts), *_shares(parts, shares), last_matrix(layer, target)


def _size(parts: Sequence[LocalParameter]) -> int:
    return sum(part.size for part in parts)


def _shares(parts: Sequence[LocalParameter], shares: Shares) -> tuple[int, int]:
    """Number of elements in a data rank's shard of `parts`, and number of trainable elements in this shard."""
    return sum(map(shares.own, parts)), sum(shares.own(part) for part in parts if not part.is_frozen)


@lru_cache(maxsize=16384)
def count_first(decoder: Decoder, number: int, every: int) -> tuple[Counter[Layer], Counter[Layer]]:
    """Count the recomputed layers of each kind, and the other layers of each kind, among the first `number` layers.

    Every `every`-th layer of the whole model is recomputed, starting with the first layer. If `every` is 0, no layer is
    recomputed.
    """
    layers = decoder.layers[:number]
    repeated = (layer for i, layer in zip(decoder.indexes, layers, strict=False) if every and i % every == 0)
    again = Counter(repeated)
    return again, Counter(layers) - again


def residual_bytes(run: Candidate, target: Target) -> tuple[int, int]:
    """Bytes of the residual stream of all tokens, and of the tokens of one rank."""
    of_token = run.model.hidden_size * run.training.numbers.compute_bytes
    return target.tokens * of_token, target.own_tokens * of_token


def layer_memory(layer: Layer, run: Candidate, target: Target, *, defers: bool) -> LayerMemory:
    """Sizes of a layer on one rank. `defers` says whether the schedule computes weight gradients later."""
    mode = Recompute(run.training.recompute)
    kept = activations_of(layer, run, target, mode)
    plain = activations_of(layer, run, target, Recompute.NONE)
    whole, held = sum(plain, Kept()), sum(kept, Kept())
    again = {Recompute.FULL: whole.total - held.total, Recompute.OPERATORS: cheap_inside(layer, target)}
    # Dropout adds a second tensor to the gradient of the residual stream, and a split sequence the gathered gradient.
    gathered, own = residual_bytes(run, target)
    residual = own * (2 if run.model.dropout else 1) + gathered * run.layout.sequence_parallel
    return LayerMemory(
        *_sizes(layer, target.of_parameters, Shares.of(run.layout)),
        kept=held,
        plain=whole,
        again=again.get(mode, 0),
        temporary=residual + _temporary(lower(layer, target), target, (kept, plain), defers=defers, mode=mode),
    )


def _temporary(
    lowered: Sequence[Sequence[Step]],
    target: Target,
    kept_and_plain: tuple[tuple[Kept, ...], tuple[Kept, ...]],
    *,
    defers: bool,
    mode: Recompute,
) -> int:
    """Largest number of temporary bytes that a sublayer needs in its backward pass.

    The activations that later sublayers have already freed are subtracted. If the schedule computes the weight
    gradients later, these sublayers keep the bytes that the weight gradients need. With selective recomputation,
    the bytes that attention computes again are added.
    """
    needs, given_back = [], 0
    for steps, mine, all_of_it in reversed(list(zip(lowered, *kept_and_plain, strict=True))):
        again = (all_of_it.total - mine.total) * (mode is Recompute.SELECTIVE)
        late = last_deferred_input(steps, target) if defers else 0
        needs.append(again + late + temporary(steps, target, all_of_it.inside) - given_back)
        given_back += all_of_it.total - (deferred(steps, target) if defers else 0)
    return max(needs)
