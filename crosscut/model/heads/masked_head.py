"""BERT's head for masked tokens, and the loss for the order of two segments. The head runs inside the parallel region
that f (`enter_tensor_parallel`) enters.

Shapes: N tokens to predict, B sequences, S tokens of a sequence, H hidden, V vocabulary, T tensor ranks.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture.sublayers.heads import masked_head as architecture
from crosscut.config import IGNORED
from crosscut.model.batch import Batch
from crosscut.model.building import Builder
from crosscut.model.heads.head import HeadBuilder, LogitOperands, Weights
from crosscut.model.heads.pooled_head import PooledHead
from crosscut.model.heads.projection import OutputProjection, TokenHead
from crosscut.parallel import ReplicatedLinear, sharded_parameter
from crosscut.parallel.state.parameters import local


class MaskedHead(TokenHead[architecture.MaskedHead]):
    """Head of an encoder that predicts masked tokens and, if its description says so, the order of two segments."""

    def __init__(self, part: architecture.MaskedHead, builder: HeadBuilder) -> None:
        super().__init__(part, builder)
        self.projection = OutputProjection(part.projection, builder)
        self.prediction = MaskedPrediction(part.prediction, builder.build)
        self.order = None if part.order is None else PooledHead(part.order, builder.build)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The output projection's own weight, unless it is tied; the layers before it; and the head of the order."""
        found = {"output": self.projection.output, "prediction": self.prediction, "order": self.order}
        return {name: module for name, module in found.items() if module is not None}

    def loss_of(self, entered: Tensor, targets: Tensor, batch: Batch, weight: Tensor, how: Weights) -> Tensor:
        """Return the loss of the masked tokens and, if the batch has it, the loss of the order of segments."""
        rows, targets = entered.flatten(0, 1), targets.flatten()
        if batch.predicted is not None:
            rows, targets = rows[batch.predicted], targets[batch.predicted]
        bias = local(self.prediction.bias, self.prediction.bias.dtype)
        loss = self.projection.loss(
            self.prediction(rows), targets, weight, how, distillation=how.taught(batch), bias=bias
        )
        if self.order is None or batch.order is None:
            return loss
        of_order = how.scales.get("order", 1.0) * order_loss(self.order(entered[:, 0]), batch.order)
        return loss + of_order.to(loss.dtype)

    def operands(self, hidden: Tensor) -> LogitOperands:
        """Return the operands of the product that computes the logits of masked tokens."""
        return self.projection.operands(self.prediction(hidden), self.prediction.bias)


class MaskedPrediction(nn.Module):
    """Dense layer, GeLU and norm before the output projection, and the bias of the logits. Maps [N, H] to [N, H]."""

    def __init__(self, part: architecture.MaskedPrediction, build: Builder) -> None:
        super().__init__()
        place: Any = {"mesh": build.mesh, "dtype": build.dtype}
        self.dense = ReplicatedLinear(part.dense.in_features, part.dense.out_features, **place)
        self.norm = build.region_norm(part.norm)
        shape, axis = part.bias.padded_shape(build.mesh.tensor.size), build.mesh.tensor
        self.bias = sharded_parameter(shape, axis, dim=0, dtype=build.dtype, device=build.mesh.parameter_device)

    def forward(self, entered: Tensor) -> Tensor:
        """Compute the hidden states to which the output projection is applied."""
        y: Tensor = self.norm(F.gelu(self.dense(entered)))
        return y


def order_loss(logits: Tensor, order: Tensor) -> Tensor:
    """Return the sum of the cross entropies of `order` [B] given `logits` [B, 2], in float32 or wider. Sequences whose
    order is `IGNORED` add nothing.
    """
    wide = logits.float() if logits.element_size() < 4 else logits
    return F.cross_entropy(wide, order, reduction="sum", ignore_index=IGNORED)
