"""A model: a list of layers between an embedding and a head. A layer is a tuple of parts (`parts`).

Layers may differ from each other (`model.layers`). Equal layers are the same object. To sum a quantity over all
layers, the planner computes the quantity once per kind of layer and multiplies it by the number of layers of the kind.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from crosscut.architecture.adapters import adapted
from crosscut.architecture.inputs import LossTerm, Read
from crosscut.architecture.needs import Share
from crosscut.architecture.parameters import Parameter
from crosscut.architecture.parts import Layer, Part, Sublayer
from crosscut.architecture.pipeline.cut import Stage
from crosscut.architecture.steps import Step
from crosscut.architecture.sublayers import gated_mlp, mlp
from crosscut.architecture.sublayers.attention import Attention
from crosscut.architecture.sublayers.embedding import Embedding
from crosscut.architecture.sublayers.experts import Experts
from crosscut.architecture.sublayers.gated_delta import GatedDelta
from crosscut.architecture.sublayers.gated_mlp import GatedMLP
from crosscut.architecture.sublayers.heads.head import Head, LossStep
from crosscut.architecture.sublayers.heads.masked_head import MaskedHead
from crosscut.architecture.sublayers.heads.next_token_head import NextTokenHead
from crosscut.architecture.sublayers.heads.spans_head import SpansHead
from crosscut.architecture.sublayers.heads.summary_heads import ChoiceHead, ClassesHead, NumberHead
from crosscut.architecture.sublayers.latent_attention import LatentAttention
from crosscut.architecture.sublayers.mamba import Mamba
from crosscut.architecture.sublayers.mamba2 import Mamba2
from crosscut.architecture.sublayers.mlp import MLP
from crosscut.architecture.sublayers.norm import stream_norm
from crosscut.config import ModelConfig
from crosscut.config.model import NormPosition
from crosscut.config.parts.head import HeadKind
from crosscut.config.parts.kinds import ATTENTIONS, FeedForward, Mixer, PartKind, parts_of

_SUBLAYERS: dict[PartKind, Callable[..., Sublayer]] = {
    **{kind: partial(Attention.of, kind=kind) for kind in ATTENTIONS},
    Mixer.MAMBA: Mamba.of,
    Mixer.LATENT_ATTENTION: LatentAttention.of,
    Mixer.MAMBA2: Mamba2.of,
    Mixer.GATED_DELTA: GatedDelta.of,
    **{kind: partial(MLP.of, kind=kind) for kind in mlp.KINDS},
    **{kind: partial(GatedMLP.of, kind=kind) for kind in gated_mlp.KINDS},
    FeedForward.EXPERTS: Experts.of,
}
"""Functions that describe a sublayer of a model, keyed by its kind. Their arguments are the model and the part's name.
"""

_HEADS: dict[HeadKind, Callable[[ModelConfig, Parameter], Head]] = {
    HeadKind.NEXT_TOKEN: NextTokenHead.of,
    HeadKind.MASKED_TOKENS: MaskedHead.of,
    HeadKind.CLASSES: ClassesHead.of,
    HeadKind.NUMBER: NumberHead.of,
    HeadKind.SPANS: SpansHead.of,
    HeadKind.CHOICE: ChoiceHead.of,
}
"""Functions that describe the head of a model, by its kind. Their arguments are the model and the token embedding."""


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
    def num_residual_sums(self) -> int:
        """Number of residual sums of all layers."""
        return sum(len(layer.parts) for layer in self.layers)

    @cached_property
    def shares(self) -> frozenset[Share]:
        """Shared tensors that the layers read."""
        return _shares(self.layers)

    def reads(self, *, document_mask: bool) -> dict[str, Read]:
        """Fields of a batch that the model and its loss read, by name, in the order of their use. With `document_mask`,
        the documents of a sequence do not see each other.
        """
        return self.embedding.reads(document_mask=document_mask) | self.head.reads

    @property
    def reads_without_loss(self) -> dict[str, Read]:
        """Fields of a batch from which the last hidden states and the logits of a task follow, documents included."""
        mask = {name: read for name, read in self.head.reads.items() if name == "mask"}
        return self.embedding.reads(document_mask=True) | mask

    @cached_property
    def layer_terms(self) -> tuple[LossTerm, ...]:
        """Terms of the loss that the layers return beside the residual stream, without repetition."""
        summing = (each for layer in self.kinds for each in layer.summing.values())
        return tuple(dict.fromkeys(term for each in summing for term in each.terms))

    @property
    def loss_terms(self) -> tuple[LossTerm, ...]:
        """All terms of the loss: first those of the head, then those of the layers."""
        return (*self.head.loss_terms, *self.layer_terms)

    @cached_property
    def layer_figures(self) -> dict[tuple[int, str, str], int]:
        """Number of elements of each vector without a gradient that the layers return beside the residual stream. The
        keys are the index of the layer, the name of the part and the name of the vector.
        """
        return {
            (i, part, name): size
            for i, layer in zip(self.indexes, self.layers, strict=True)
            for part, each in layer.summing.items()
            for name, size in each.figures.items()
        }

    @cached_property
    def kinds(self) -> Counter[Layer]:
        """Number of layers of each kind. The kinds are in the order in which they first appear in the model."""
        return Counter(self.layers)

    def recomputed(self, every: int) -> Counter[Layer]:
        """Number of recomputed layers of each kind.

        Every `every`-th layer of the whole model is recomputed, starting with the first layer. If `every` is 0, no
        layer is recomputed.
        """
        return _recomputed(self, every)

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
        return self.is_last and not self.is_first and self.head.uses_embedding

    @property
    def loss(self) -> LossStep:
        """The loss, which is the last step of the head. Only the last stage has a loss."""
        loss = self.root_steps[1][-1]
        assert isinstance(loss, LossStep)
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
    kinds = {entry: adapt(_layer(model, *entry)) for entry in dict.fromkeys(model.entries)}
    layers = tuple(kinds[entry] for entry in model.entries)
    embedding = Embedding.of(model, _shares(kinds.values()))
    head = _HEADS[model.head](model, embedding.tokens)
    embedding = replace(embedding, hides_padding=embedding.hides_padding or head.hides_padding)
    return Decoder(adapt(embedding), layers, adapt(head), tuple(range(model.num_layers)))


@lru_cache(maxsize=4096)
def _recomputed(decoder: Decoder, every: int) -> Counter[Layer]:
    pairs = zip(decoder.indexes, decoder.layers, strict=True)
    return Counter(layer for i, layer in pairs if i % every == 0) if every else Counter()


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


def _shares(layers: Iterable[Layer]) -> frozenset[Share]:
    return frozenset(share for layer in layers for part in layer.parts for share in part.inner.shares)


def _unchanged(part: Any) -> Any:
    return part


def _layer(model: ModelConfig, layer: str, place: NormPosition) -> Layer:
    return Layer(tuple(_part_of(model, *part, place) for part in parts_of(layer)), model.hidden_size)


def _part_of(model: ModelConfig, name: str, kind: PartKind, place: NormPosition) -> Part:
    norm = stream_norm(model, f"{name}_norm")
    return Part(name, norm, _SUBLAYERS[kind](model, name), place, model.dropout, model.residual_multiplier)
