"""Output projection: from hidden states to the logits of the vocabulary, and to the loss of predicted tokens.

Shapes: B batch, S sequence, N tokens, H hidden, V vocabulary, T tensor ranks.
"""

from abc import abstractmethod
from typing import Generic, TypeVar

from torch import Tensor, nn

from crosscut.architecture.sublayers.heads.head import Head as Description
from crosscut.architecture.sublayers.heads.projection import OutputProjection as Part
from crosscut.flight import ModelPart
from crosscut.flight.places import enter
from crosscut.kernels.products import ORDINARY
from crosscut.model.batch import Batch
from crosscut.model.heads.head import Head, HeadBuilder, LogitOperands, Weights
from crosscut.parallel import (
    Distillation,
    LossSettings,
    VocabParallelOutput,
    enter_tensor_parallel,
    vocab_parallel_cross_entropy,
)
from crosscut.parallel.state.parameters import local

_Part = TypeVar("_Part", bound=Description)


class OutputProjection:
    """Product of hidden states with the vocabulary. The weight is the model's own, or that of the token embedding."""

    def __init__(self, part: Part, builder: HeadBuilder) -> None:
        config, build = builder.config, builder.build
        self.vocab_size, self.soft_cap = config.vocab_size, part.soft_cap
        self.mesh, self.runner = build.mesh, builder.runner
        self.output = None
        if not part.is_tied:
            shape, padded_to = part.weight.shape, part.weight.padded_to
            self.output = VocabParallelOutput(*shape, mesh=build.mesh, dtype=build.dtype, padded_to=padded_to)
        self._tokens = builder.tokens

    @property
    def weight(self) -> nn.Parameter:
        """Weight [V, H] of the projection."""
        if self.output is not None:
            return self.output.weight
        assert self._tokens is not None, "the stage has no embedding"
        return self._tokens.weight

    def operands(self, hidden: Tensor, bias: nn.Parameter | None = None) -> LogitOperands:
        """Return the operands of the product for `hidden` [N, H]. `bias` is added to the logits."""
        own_bias = None if bias is None else local(bias, hidden.dtype)
        settings = LossSettings(bias=own_bias, soft_cap=self.soft_cap)
        products = ORDINARY if self.output is None else self.output.products
        return LogitOperands(hidden, local(self.weight, hidden.dtype), settings, products)

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        weight: Tensor,
        how: Weights,
        *,
        distillation: Distillation | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the targets [N], given the hidden states [N, H] that predict them and this rank's rows of
        the weight [V/T, H]: a scalar. `distillation` is the teacher's part in the loss.
        """
        settings = LossSettings(
            scale=how.scales.get("tokens", 1.0),
            z_loss=how.z_loss,
            bias=bias,
            soft_cap=self.soft_cap,
            chunk_tokens=self.runner.chunk_tokens,
            passes=self.runner.passes,
            distillation=distillation,
        )
        return vocab_parallel_cross_entropy(
            hidden, weight, targets, vocab_size=self.vocab_size, axis=self.mesh.tensor, settings=settings
        )


class TokenHead(Head[_Part], Generic[_Part]):
    """Head that predicts tokens with an output projection."""

    projection: OutputProjection

    def inputs(self, batch: Batch, num_filled: int) -> tuple[Batch, int]:
        """Return the batch itself: training has sequences that the ranks can split."""
        del num_filled
        return batch, 0

    def loss(self, hidden: Tensor, batch: Batch, how: Weights, tied: Tensor | None = None) -> Tensor:
        """Return the loss of the targets of the batch, times its factor, and the other terms."""
        assert batch.targets is not None, "the batch has no targets"
        weight = local(self.projection.weight, self.projection.weight.dtype) if tied is None else tied
        enter(ModelPart.HEAD)
        return self.loss_of(enter_tensor_parallel(hidden, self.mesh), batch.targets, batch, weight, how)

    @abstractmethod
    def loss_of(self, entered: Tensor, targets: Tensor, batch: Batch, weight: Tensor, how: Weights) -> Tensor:
        """Return the loss of the targets [B, S], given the last hidden states [B, S, H] inside the parallel region and
        this rank's rows `weight` [V/T, H] of the output projection's weight.
        """
