"""Normalisation layers over the last dimension. Every tensor rank holds all parameters of a layer."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.kernels.functions import Caller, call
from crosscut.kernels.rms_norm import rms_norm
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.state.parameters import ParameterMaker, local_inside, local_on_sequence


class NormPlace(NamedTuple):
    """Place of a norm: inside or outside the parallel regions."""

    inside: bool = False
    """Whether the norm is inside a parallel region, for example if it normalises a rank's own heads. If true, each rank
    computes only a partial gradient of the norm's parameters, with or without sequence parallelism.
    """
    call: Caller = call
    """Function that calls the computation of the norm, for example with recomputation in the backward pass."""


IN_STREAM = NormPlace()
"""Place of a norm outside the parallel regions."""


class _ParallelNorm(nn.Module, ABC):
    """Norm over the last dimension H, with replicated parameters [H], or without parameters if `affine` is false.

    Input and output: [B, S, H], or [B, S/T, H] under sequence parallelism. Sends nothing.

    Under sequence parallelism, each rank computes a partial gradient of the parameters, from its own tokens only.
    `gradients.GradientReducer` sums the partial gradients over the tensor ranks after the backward pass.
    """

    _has_bias: ClassVar[bool]

    def __init__(
        self,
        size: int,
        *,
        mesh: ParallelMesh,
        epsilon: float = 1e-5,
        affine: bool = True,
        dtype: torch.dtype = torch.float32,
        place: NormPlace = IN_STREAM,
    ) -> None:
        super().__init__()
        self.size, self.mesh, self.epsilon, self.place = (size,), mesh, epsilon, place
        make = ParameterMaker(mesh, dtype)
        self.weight = make.replicated(size, value=1.0) if affine else None
        self.bias = make.replicated(size) if affine and self._has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x`, then multiply by the weight and add the bias."""
        return self.place.call(self._normalise, x)

    @abstractmethod
    def _normalise(self, x: Tensor) -> Tensor:
        """Compute the result of `forward`."""

    def _own(self, parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return this rank's copy of a parameter, or None if the norm does not have the parameter. The gradient of the
        copy is `Partial` inside a parallel region or on a split sequence.
        """
        if parameter is None:
            return None
        return local_inside(parameter, dtype) if self.place.inside else local_on_sequence(parameter, self.mesh, dtype)


@final
class LayerNorm(_ParallelNorm):
    """Layer normalisation, with a weight and a bias.

    Source: paper, section 3 (duplicated layer norms); Korthikanti et al. 2022, section 4.2.2.
    """

    _has_bias = True

    def _normalise(self, x: Tensor) -> Tensor:
        weight, bias = (self._own(parameter, x.dtype) for parameter in (self.weight, self.bias))
        if not self.place.inside or x.dim() < 4:
            return F.layer_norm(x, self.size, weight, bias, self.epsilon)
        # Heads [B, A, S, D] are stored as [B, S, A, D]. PyTorch's norm would return them in another order, and
        # attention would have to copy them.
        return F.layer_norm(x.transpose(1, 2), self.size, weight, bias, self.epsilon).transpose(1, 2)


@final
class RMSNorm(_ParallelNorm):
    """RMS normalisation: x / sqrt(mean(x^2) + epsilon), times the weight or 1 + the weight. It has no bias.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4.
    """

    _has_bias, has_offset = False, False

    def from_one(self) -> "RMSNorm":
        """Let the norm multiply by 1 + its weight."""
        self.has_offset = True
        return self

    def _normalise(self, x: Tensor) -> Tensor:
        weight = self._own(self.weight, x.dtype)
        if (x.is_cuda or not self.training) and not self.has_offset:
            return F.rms_norm(x, self.size, weight, self.epsilon)
        return rms_norm(x, weight, self.epsilon, has_offset=self.has_offset)
