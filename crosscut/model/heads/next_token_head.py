"""Head that predicts the next token from each token (paper, section 3).

Shapes: B batch, S sequence, N tokens, H hidden, V vocabulary, T tensor ranks.
"""

from torch import Tensor, nn

from crosscut.architecture.sublayers.heads.next_token_head import NextTokenHead as Part
from crosscut.model.batch import Batch
from crosscut.model.heads.head import HeadBuilder, LogitOperands, Weights
from crosscut.model.heads.projection import OutputProjection, TokenHead


class NextTokenHead(TokenHead[Part]):
    """Head of a decoder: the output projection."""

    def __init__(self, part: Part, builder: HeadBuilder) -> None:
        super().__init__(part, builder)
        self.projection = OutputProjection(part.projection, builder)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The output projection's own weight, unless it is tied."""
        return {} if self.projection.output is None else {"output": self.projection.output}

    def loss_of(self, entered: Tensor, targets: Tensor, batch: Batch, weight: Tensor, how: Weights) -> Tensor:
        """Return the loss of all targets."""
        taught = how.taught(batch)
        return self.projection.loss(entered.flatten(0, 1), targets.flatten(), weight, how, distillation=taught)

    def operands(self, hidden: Tensor) -> LogitOperands:
        """Return the operands of the product that computes the logits of the next tokens."""
        return self.projection.operands(hidden)
