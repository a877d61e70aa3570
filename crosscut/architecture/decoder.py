"""A model: a list of layers between an embedding and a head.

A layer is a mixer (attention) and a feed-forward part (an MLP). Each of these two parts has a residual sum around it,
and a norm before it (`model.norm_place = "before"`) or after the residual sum ("after", as in the original BERT):

    before    x = x + dropout(mixer(norm(x)));     x = x + dropout(feed_forward(norm(x)))
    after     x = norm(x + dropout(mixer(x)));     x = norm(x + dropout(feed_forward(x)))

Layers may differ from each other (`model.mlp_pattern`). Equal layers are the same object. To sum a quantity over all
layers, the planner computes the quantity once per kind of layer and multiplies it by the number of layers of the kind.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

from crosscut.architecture.adapters import adapted
from crosscut.architecture.parameters import Parameter
from crosscut.architecture.pipeline.cut import Stage
from crosscut.architecture.steps import Rows, Step, Value
from crosscut.architecture.sublayers import gated_mlp, mlp
from crosscut.architecture.sublayers.attention import Attention
from crosscut.architecture.sublayers.embedding import Embedding
from crosscut.architecture.sublayers.gated_mlp import GatedMLP
from crosscut.architecture.sublayers.head import Head, Loss
from crosscut.architecture.sublayers.mlp import MLP
from crosscut.architecture.sublayers.norm import Norm, stream_norm
from crosscut.architecture.sublayers.residual import add_residual
from crosscut.architecture.sublayers.task_head import TaskLoss
from crosscut.config import ModelConfig
from crosscut.config.model import FeedForward, NormPosition

_FEED_FORWARDS: dict[FeedForward, type[MLP] | type[GatedMLP]] = {
    **dict.fromkeys(mlp.KINDS, MLP),
    **dict.fromkeys(gated_mlp.KINDS, GatedMLP),
}
"""Classes that describe feed-forward parts, keyed by the kind of the part."""


class Sublayer(Protocol):
    """A mixer (attention) or a feed-forward part (an MLP)."""

    def steps(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the sublayer's output, and the steps that compute the output from the input `x`."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A mixer and a feed-forward part, with their norms and residual sums."""

    mixer_norm: Norm
    mixer: Attention
    feed_forward_norm: Norm
    feed_forward: Sublayer
    hidden_size: int
    dropout: float
    norm_place: NormPosition

    @cached_property
    def sublayers(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """Steps of the mixer, and steps of the feed-forward part.

        If the norms come before the sublayers, both groups of steps start with a norm and end with a residual sum. If
        the norms come after the residual sums, both groups start with the sublayer and end with a norm.
        """
        x = Value("input", self.hidden_size, Rows.STREAM)
        half, mixing = self._around("attention", x, self.mixer_norm, self.mixer)
        _, feeding = self._around("mlp", half, self.feed_forward_norm, self.feed_forward)
        return mixing, feeding

    def _around(self, name: str, x: Value, norm: Norm, inner: Sublayer) -> tuple[Value, tuple[Step, ...]]:
        if self.norm_place is NormPosition.AFTER:
            y, steps = inner.steps(x)
            out, adding = add_residual(name, y, around=x, dropout=self.dropout)
            normed, normalise = norm.step(f"{name}_norm", out)
            return normed, (*steps, *adding, normalise)
        normed, normalise = norm.step(f"{name}_norm", x)
        y, steps = inner.steps(normed)
        out, adding = add_residual(name, y, around=x, dropout=self.dropout)
        return out, (normalise, *steps, *adding)

    def parameters(self) -> Iterator[Parameter]:
        """Parameters of the layer in the order of their use. The names leave out the layer's prefix `blocks.i.`."""
        return (parameter for steps in self.sublayers for step in steps for parameter in step.parameters)


@dataclass(frozen=True, eq=False)
class Decoder:
    """Description of a model, a decoder or an encoder: an embedding, layers and a head.

    The method `part` describes only some of the pipeline stages. Such a description has the layers of these stages, the
    embedding if they include the first stage, and the head if they include the last stage.
    """

    embedding: Embedding
    layers: tuple[Layer, ...]
    head: Head
    indexes: tuple[int, ...]
    """Index of each layer of `layers` in the whole model."""
    is_first: bool = True
    """Whether the description includes the embedding."""
    is_last: bool = True
    """Whether the description includes the head."""

    def part(self, stages: Sequence[Stage]) -> "Decoder":
        """Return a description of only these stages of the model."""
        return _part(self, tuple(stages))

    @cached_property
    def kinds(self) -> Counter[Layer]:
        """Number of layers of each kind. The kinds are in the order in which they first appear in the model."""
        return Counter(self.layers)

    def recomputed(self, every: int) -> Counter[Layer]:
        """Number of recomputed layers of each kind.

        Every `every`-th layer of the whole model is recomputed, starting with the first layer. If `every` is 0, no
        layer is recomputed.
        """
        pairs = zip(self.indexes, self.layers, strict=True)
        return Counter(layer for i, layer in pairs if i % every == 0) if every else Counter()

    @cached_property
    def root_steps(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """Steps of the embedding, and steps of the head. A stage without the embedding still runs the last step of the
        embedding, which computes the tensors that all layers share.
        """
        x, embedding = self.embedding.steps()
        return tuple(embedding if self.is_first else embedding[-1:]), tuple(self.head.steps(x)) if self.is_last else ()

    @property
    def has_copy(self) -> bool:
        """Whether this part of the model holds a second copy of the token embedding, which the last stage uses as the
        output projection. False for a part that includes the embedding itself.
        """
        return self.is_last and not self.is_first and self.head.output is None and self.head.task is None

    @property
    def loss(self) -> Loss | TaskLoss:
        """The loss, which is the last step of the head. Only the last stage has a loss."""
        loss = self.root_steps[1][-1]
        assert isinstance(loss, Loss | TaskLoss)
        return loss

    def root_parameters(self) -> Iterator[Parameter]:
        """Parameters outside of the layers, in the order of their use."""
        if self.has_copy:
            yield self.embedding.tokens
        yield from (parameter for steps in self.root_steps for step in steps for parameter in step.parameters)

    def parameters(self) -> Iterator[Parameter]:
        """All parameters in the order of their use, with their full names in the model."""
        if self.has_copy:
            yield self.embedding.tokens
        yield from (parameter for step in self.root_steps[0] for parameter in step.parameters)
        for i, layer in zip(self.indexes, self.layers, strict=True):
            yield from (parameter.named(f"blocks.{i}.") for parameter in layer.parameters())
        yield from (parameter for step in self.root_steps[1] for parameter in step.parameters)


@lru_cache(maxsize=4096)
def describe(model: ModelConfig) -> Decoder:
    """Describe a model as a `Decoder`.

    `model.vocab_size` may still be 0, which leaves the size to the tokenizer. Counts that depend on the vocabulary are
    then wrong.
    """
    adapt = partial(adapted, rank=model.lora_rank, alpha=model.lora_alpha) if model.lora_rank else _unchanged
    kinds = {kind: adapt(_layer(model, kind)) for kind in dict.fromkeys(map(model.mlp_of, range(model.num_layers)))}
    embedding = Embedding.of(model)
    layers = tuple(kinds[model.mlp_of(i)] for i in range(model.num_layers))
    return Decoder(adapt(embedding), layers, adapt(Head.of(model, embedding.tokens)), tuple(range(model.num_layers)))


@lru_cache(maxsize=4096)
def _part(decoder: Decoder, stages: tuple[Stage, ...]) -> Decoder:
    indexes = tuple(i for stage in stages for i in stage.layers)
    return replace(
        decoder,
        layers=tuple(decoder.layers[i] for i in indexes),
        indexes=indexes,
        is_first=any(stage.is_first for stage in stages),
        is_last=any(stage.is_last for stage in stages),
    )


def _unchanged(part: Any) -> Any:
    return part


def _layer(model: ModelConfig, kind: FeedForward) -> Layer:
    return Layer(
        mixer_norm=stream_norm(model, "attention_norm"),
        mixer=Attention.of(model),
        feed_forward_norm=stream_norm(model, "mlp_norm"),
        feed_forward=_feed_forward(model, kind),
        hidden_size=model.hidden_size,
        dropout=model.dropout,
        norm_place=model.norm_place,
    )


def _feed_forward(model: ModelConfig, kind: FeedForward) -> Sublayer:
    return _FEED_FORWARDS[kind].of(model, kind)
