"""The MLP: first matrix by columns, second by rows, what lies between them on each rank alone (paper, Figure 3a).

Shapes: B batch, S sequence, H hidden, F width between the matrices, T tensor ranks.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture import mlp as architecture
from crosscut.config.model import FeedForward
from crosscut.model.building import Builder


class MLP(nn.Module):
    """Y = act(X A) B: [B, S, H] to [B, S, H] through [B, S, F/T]. GeLU is in GPT-2's tanh form."""

    def __init__(self, part: architecture.MLP, build: Builder) -> None:
        super().__init__()
        self.runner = build.runner
        self.expand = build.columns(part.expand)
        self.contract = build.rows(part.contract, is_last=True)
        self._activate = ACTIVATIONS[part.kind]

    def forward(self, x: Tensor) -> Tensor:
        """Expand, activate, contract."""
        y: Tensor = self.contract(self.runner.cheap(self._activate, self.expand(x)))
        return y


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {FeedForward.GELU: _gelu}
"""Functions between the two matrices."""
