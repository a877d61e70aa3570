"""Normalisation layers over the last dimension, with parameters that every tensor rank holds whole."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.kernels.functions import Call, call
from crosscut.kernels.rms_norm import rms_norm
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.state.parameters import local_inside, local_on_sequence, replicated_parameter


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimension H, with replicated `weight` and `bias` [H], or without parameters if
    `affine` is false.

    Input and output: [B, S, H], or [B, S/T, H] under sequence parallelism. Sends nothing.

    Under sequence parallelism, each rank computes only a partial gradient of the parameters, from its own tokens.
    `gradients.GradientReducer` sums the partial gradients over the tensor ranks after the backward pass. Set `inside`
    if the norm is used inside a parallel region, for example on a rank's own heads; the gradients are then partial on
    every layout. `call` is the function that runs the computation (see `kernels.functions.Call`).

    Source: paper, section 3 (duplicated layer norms); Korthikanti et al. 2022, section 4.2.2.
    """

    def __init__(
        self,
        size: int,
        *,
        mesh: ParallelMesh,
        epsilon: float = 1e-5,
        affine: bool = True,
        dtype: torch.dtype = torch.float32,
        inside: bool = False,
        call: Call = call,
    ) -> None:
        super().__init__()
        self.size, self.mesh, self.epsilon, self.inside, self._call = (size,), mesh, epsilon, inside, call
        place: Any = {"dtype": dtype, "device": mesh.parameter_device}
        self.weight = replicated_parameter((size,), mesh.tensor, value=1.0, **place) if affine else None
        self.bias = replicated_parameter((size,), mesh.tensor, **place) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x`, then multiply by the weight and add the bias."""
        return self._call(self._normalise, x)

    def _normalise(self, x: Tensor) -> Tensor:
        weight, bias = (_own(p, self.mesh, x.dtype, inside=self.inside) for p in (self.weight, self.bias))
        if not self.inside:
            return F.layer_norm(x, self.size, weight, bias, self.epsilon)
        # Heads [B, A, S, D] are stored as [B, S, A, D]. The result of PyTorch's norm would be stored in another order,
        # and attention would have to copy it.
        return F.layer_norm(x.transpose(1, 2), self.size, weight, bias, self.epsilon).transpose(1, 2)


class RMSNorm(nn.Module):
    """RMS normalisation: x / sqrt(mean(x^2) + epsilon) over the last dimension H, times a replicated `weight` [H], or
    times 1 if `affine` is false.

    Input and output: [B, S, H], or [B, S/T, H] under sequence parallelism. Sends nothing. The arguments `inside` and
    `call` and the partial gradients work as in `LayerNorm`. Source: Zhang and Sennrich 2019 (arXiv 1910.07467),
    equation 4.
    """

    def __init__(
        self,
        size: int,
        *,
        mesh: ParallelMesh,
        epsilon: float = 1e-5,
        affine: bool = True,
        dtype: torch.dtype = torch.float32,
        inside: bool = False,
        call: Call = call,
    ) -> None:
        super().__init__()
        self.size, self.mesh, self.epsilon, self.inside, self._call = (size,), mesh, epsilon, inside, call
        place: Any = {"dtype": dtype, "device": mesh.parameter_device}
        self.weight = replicated_parameter((size,), mesh.tensor, value=1.0, **place) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Divide `x` by the root mean square of its last dimension and multiply by the weight."""
        return self._call(self._scale, x)

    def _scale(self, x: Tensor) -> Tensor:
        weight = _own(self.weight, self.mesh, x.dtype, inside=self.inside)
        if x.is_cuda or not self.training:
            return F.rms_norm(x, self.size, weight, self.epsilon)
        return rms_norm(x, weight, self.epsilon)


def _own(parameter: Tensor | None, mesh: ParallelMesh, dtype: torch.dtype, *, inside: bool) -> Tensor | None:
    """Return this rank's copy of a norm's parameter; None if the norm has no such parameter. The gradient of the copy
    is `Partial` inside a parallel region or on a split sequence.
    """
    if parameter is None:
        return None
    return local_inside(parameter, dtype) if inside else local_on_sequence(parameter, mesh, dtype)
