"""A cut by PyTorch's own styles that looks right, and whose mistake `crosscut verify` names.

    crosscut verify --module examples.wrong_cut:build --cut examples.wrong_cut:cut --layout tensor=2

The norm is the same for all heads, and each rank has only some of the heads. So outputs and loss are right, but each
rank's gradient of the norm's weight comes from its own heads alone, and nobody adds the two up. Training goes on, a
little worse. Query norms, as in Qwen3, stand in this place.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from crosscut.parallel import ParallelMesh

HEAD = 16


class Model(nn.Module):
    """Four heads with a norm: [N, 8] to [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm, self.contract = nn.Linear(8, 4 * HEAD), nn.RMSNorm(HEAD), nn.Linear(4 * HEAD, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of three classes."""
        heads = self.norm(self.expand(x).unflatten(1, (-1, HEAD)))
        scores: Tensor = self.contract(heads.flatten(1))
        return scores


def build() -> tuple[Model, dict[str, Tensor], Callable[[Tensor], Tensor]]:
    """The module, its inputs, and a function that makes a scalar loss of its output."""
    return Model(), {"x": torch.randn(32, 8)}, lambda scores: scores.square().mean()


def cut(module: nn.Module, mesh: ParallelMesh) -> None:
    """Cut the first matrix by columns and the second by rows."""
    plan = {"expand": ColwiseParallel(), "contract": RowwiseParallel()}
    parallelize_module(module, mesh.tensor.device_mesh, plan)
