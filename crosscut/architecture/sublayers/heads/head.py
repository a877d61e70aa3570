"""Head of a model: the final norm, and the steps that compute the loss. A head also says which fields of a batch it
reads, which terms its loss has, and what a model with this head can do. A model whose norms come after the residual
sums has no final norm.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from crosscut.architecture.inputs import LossTerm, Read
from crosscut.architecture.parameters import Parameter
from crosscut.architecture.steps import Multiply, Passes, Product, Rows, Step, Value
from crosscut.architecture.sublayers.heads.abilities import Ability
from crosscut.architecture.sublayers.norm import Norm, stream_norm
from crosscut.architecture.target import Target
from crosscut.config import ModelConfig
from crosscut.config.model import NormPosition


@dataclass(frozen=True, kw_only=True)
class LossStep(Step, ABC):
    """Last step of a head, which computes the loss. By default, it computes no logits and sends nothing."""

    @abstractmethod
    def ends_passes(self, target: Target) -> Passes:
        """Bytes that the embedding, the final norm, the head and the loss read and write in one micro-batch."""

    def products(self, target: Target) -> tuple[Product, ...]:
        """Matrix products of the forward pass on one rank in one micro-batch."""
        del target
        return ()

    def flops(self, target: Target) -> int:
        """FLOPs of `products`, without the padding of the vocabulary."""
        del target
        return 0

    def local_vocabulary(self, target: Target) -> int:
        """Number of vocabulary entries on one rank whose logits the loss computes, including padding."""
        del target
        return 0

    def logit_bytes(self, target: Target) -> int:
        """Bytes that the loss holds for each logit of a chunk."""
        del target
        return 0

    def statistics(self) -> tuple[tuple[str, int], ...]:
        """Name of each all-reduce that the loss runs over the tensor ranks, and its size in numbers per token."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Head(ABC):
    """Head of a model."""

    name: str
    """Value of `model.head`."""
    hidden: int
    """Width of the residual stream."""
    norm: Norm | None
    """Norm after the last layer; None if the last layer ends with a norm."""
    abilities: frozenset[Ability]
    """Abilities of a model with this head."""
    hides_padding: bool = False
    """Whether causal attention, too, needs a mask of padding, because the head reads all tokens of a sequence."""

    @property
    @abstractmethod
    def reads(self) -> dict[str, Read]:
        """Fields of a batch that the head and the loss read, by name."""

    @property
    @abstractmethod
    def loss_terms(self) -> tuple[LossTerm, ...]:
        """Terms of the loss."""

    @property
    @abstractmethod
    def vocabulary(self) -> Parameter | None:
        """Weight that computes the logits of the vocabulary; None if the head computes no such logits."""

    @property
    @abstractmethod
    def uses_embedding(self) -> bool:
        """Whether `vocabulary` is the weight of the token embedding."""

    @abstractmethod
    def after_norm(self, x: Value) -> list[Step]:
        """Steps that compute the loss from the normalised hidden states `x`. The last one is a `LossStep`."""

    @property
    def is_frozen(self) -> bool:
        """Whether the weight that computes the logits of the vocabulary does not train."""
        return self.vocabulary is not None and self.vocabulary.is_frozen

    def steps(self, x: Value) -> list[Step]:
        """Steps that compute the loss from the last layer's result `x`."""
        if self.norm is None:
            return self.after_norm(x)
        normed, normalise = self.norm.step("final_norm", x)
        return [normalise, *self.after_norm(normed)]

    def products(self, target: Target) -> list[Product]:
        """Matrix products of the head's forward pass on one rank in one micro-batch. The product that computes the
        logits comes last.
        """
        return [product for step in self._multiplying() for product in step.products(target)]

    def flops(self, target: Target) -> int:
        """FLOPs of the head's forward pass on one rank in one micro-batch, without the padding of the vocabulary."""
        return sum(
            step.flops(target) if isinstance(step, LossStep) else sum(each.flops for each in step.products(target))
            for step in self._multiplying()
        )

    def _multiplying(self) -> Iterator[Multiply | LossStep]:
        steps = self.steps(Value("last hidden states", self.hidden, Rows.STREAM))
        return (step for step in steps if isinstance(step, Multiply | LossStep))


def final_norm(model: ModelConfig) -> Norm | None:
    """Describe the norm after the last layer."""
    return None if model.norm_place is NormPosition.AFTER else stream_norm(model, "final_norm")
