"""Output projection: the product of hidden states with the vocabulary, and the loss (paper, section 3).

The loss works on one chunk of tokens after the other, so the logits of all tokens never exist at the same time. For
each chunk, the forward pass also computes the gradients of the hidden states and of the output projection's weight. The
loss therefore differs from the steps of a layer, and the class `Loss` counts its memory and messages separately.
"""

from abc import ABC
from dataclasses import dataclass

from crosscut.architecture.parameters import Cut, Parameter, Role
from crosscut.architecture.steps import Passes, Product, Value
from crosscut.architecture.sublayers.heads.head import Head, LossStep
from crosscut.architecture.target import Target
from crosscut.config import ModelConfig, default_loss_chunk


@dataclass(frozen=True)
class OutputProjection:
    """Weight that turns hidden states into logits of the vocabulary."""

    weight: Parameter
    """The model's own weight, or the token embedding."""
    is_tied: bool
    """Whether the weight is that of the token embedding."""
    soft_cap: float
    """Soft cap on the absolute value of the logits; 0 means none."""

    @classmethod
    def of(cls, model: ModelConfig, tokens: Parameter) -> "OutputProjection":
        """Describe the output projection of a model whose token embedding is `tokens`."""
        shape = (model.vocab_size, model.hidden_size)
        cut, padded_to = Cut.VOCABULARY, model.vocab_multiple
        own = Parameter(name="output.weight", shape=shape, role=Role.HEAD, cut=cut, padded_to=padded_to)
        return cls(tokens if model.tied else own, model.tied, model.logit_softcap)

    def loss(self, entered: Value, *more: Parameter) -> "Loss":
        """Return the step that computes the loss of hidden states inside the parallel region. `more` are parameters
        that the step reads besides the weight.
        """
        return Loss(
            reads=(entered,),
            gives=(Value("loss", 1),),
            parameters=more if self.is_tied else (self.weight, *more),
            vocabulary=self.weight,
            caps_logits=self.soft_cap > 0,
        )


@dataclass(frozen=True, kw_only=True)
class TokenHead(Head, ABC):
    """Head that predicts tokens with an output projection."""

    projection: OutputProjection

    @property
    def vocabulary(self) -> Parameter:
        """Weight of the output projection."""
        return self.projection.weight

    @property
    def uses_embedding(self) -> bool:
        """Whether the output projection is tied to the token embedding."""
        return self.projection.is_tied


@dataclass(frozen=True, kw_only=True)
class Loss(LossStep):
    """Compute logits and loss of a chunk of tokens, and the gradients of the hidden states and of the output weight."""

    vocabulary: Parameter
    """Weight of the output projection."""
    caps_logits: bool

    def local_vocabulary(self, target: Target) -> int:
        """Number of vocabulary entries on one rank, including padding."""
        return self.vocabulary.on(target).shape[0]

    def product(self, target: Target) -> Product:
        """Matrix product that computes the logits of a micro-batch on one rank."""
        hidden, is_frozen = self.vocabulary.shape[1], self.vocabulary.is_frozen
        return Product(target.predicted_tokens, hidden, self.local_vocabulary(target), is_frozen=is_frozen)

    def products(self, target: Target) -> tuple[Product, ...]:
        """The product that computes the logits."""
        return (self.product(target),)

    def flops(self, target: Target) -> int:
        """FLOPs of the product that computes the logits, without the padding of the vocabulary."""
        rows, hidden = self.vocabulary.shape
        return self.product(target)._replace(k=hidden, n=rows).flops

    def ends_passes(self, target: Target) -> Passes:
        """Bytes that the embedding and the loss read and write in one micro-batch.

        The forward pass reads or writes the residual stream six times. For each logit, a compiled loss reads and writes
        three numbers in the compute type (the data type of matrix products), and an uncompiled loss ten numbers in the
        accumulation type. A soft cap adds ten numbers to an uncompiled loss: two each to divide, to apply tanh, to
        compute the derivatives, to multiply, and to multiply by the derivatives. The backward pass reads or writes the
        residual stream five times. Unless the output weight is frozen, its gradient is read and written to be scaled.
        """
        product = self.product(target)
        stream = target.tokens * product.k * target.compute_bytes
        uncompiled = (20 if self.caps_logits else 10) * target.sums_bytes
        of_logit = 3 * target.compute_bytes if target.compiled else uncompiled
        of_weight = self._weight_passes(target) * product.k
        scaled = 0 if product.is_frozen else 2 * product.n * product.k * target.sums_bytes
        forward = 6 * stream + of_logit * product.m * product.n + of_weight * product.n
        return Passes(forward=forward, backward=5 * stream + scaled)

    def _weight_passes(self, target: Target) -> int:
        """Bytes that the forward pass reads and writes for each element of the output weight: to cast the weight, and
        to add up its gradient over the chunks. A CPU casts the product of each chunk.
        """
        narrow, wide = target.compute_bytes, target.sums_bytes
        cast = narrow + wide if narrow != wide else 0
        if self.vocabulary.is_frozen:
            return cast
        rows, tokens = self.local_vocabulary(target), target.predicted_tokens
        chunks = -(-tokens // default_loss_chunk(rows, tokens, device=target.device, compiled=target.compiled))
        copied = narrow * (narrow != wide and target.device == "cpu")
        return cast + chunks * copied + (2 * chunks - 1) * wide

    def logit_bytes(self, target: Target) -> int:
        """Bytes that the loss holds for each logit of a chunk.

        A compiled loss holds each logit once in the compute type, which is the data type of matrix products: the
        gradients overwrite the logits. An uncompiled loss holds each logit in the accumulation type, and also in the
        compute type if the two types differ. With a soft cap, an uncompiled loss also holds the derivatives in the
        accumulation type.
        """
        is_mixed = target.compute_bytes != target.sums_bytes
        if target.compiled:
            return target.compute_bytes
        return target.sums_bytes * (2 if self.caps_logits else 1) + target.compute_bytes * is_mixed

    def statistics(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each all-reduce that the loss runs over the tensor ranks. The size is in numbers per token.

        The first all-reduce finds the largest logit. The second all-reduce sums two numbers over the ranks: the sum of
        the exponentials, and the target's logit.
        """
        return ("loss maximum", 1), ("loss sums", 2)
