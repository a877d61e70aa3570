"""Layer normalisation between the parallel regions: every rank holds the whole of it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.parameters import local_on_sequence, replicated_parameter


class LayerNorm(nn.Module):
    """Layer normalisation of the last dimension H, with replicated `weight` and `bias` [H].

    Input and output [B, S, H], or [B, S/T, H] under sequence parallelism, where each rank's gradients of the parameters
    are partial and are summed over the tensor ranks after the backward pass (`gradients.GradientReducer`). Sends
    nothing itself. Source: paper, section 3 (duplicated layer norms); Korthikanti et al. 2022, section 4.2.2.
    """

    def __init__(
        self, size: int, *, mesh: ParallelMesh, epsilon: float = 1e-5, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.mesh, self.epsilon = mesh, epsilon
        place: Any = {"dtype": dtype, "device": mesh.parameter_device}
        self.weight = replicated_parameter((size,), mesh.tensor, value=1.0, **place)
        self.bias = replicated_parameter((size,), mesh.tensor, **place)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        weight = local_on_sequence(self.weight, self.mesh, x.dtype)
        bias = local_on_sequence(self.bias, self.mesh, x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)
