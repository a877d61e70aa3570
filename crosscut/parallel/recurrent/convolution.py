"""Causal convolution of each channel, with the channels divided over the tensor ranks. Sends nothing.

Shapes: B batch, S sequence, D channels, K taps, T tensor ranks.
"""

from typing import final

import torch
from torch import Tensor, nn

from crosscut.parallel.linear import Blocks, rows_of_block
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.state.parameters import ParameterMaker, local, local_inside


@final
class ChannelParallelConvolution(nn.Module):
    """Parameters of a causal convolution of each channel: `weight` [D, K] and, unless `bias` is false, `bias` [D], cut
    like the outputs of a `ColumnParallelLinear` with the output features `channels`; zeros until initialised.

    If there are more ranks than blocks of channels, several ranks hold the parameters of all blocks and use those of
    the same block. Their gradients are then partial.
    """

    def __init__(
        self,
        channels: int | Blocks,
        num_taps: int,
        *,
        mesh: ParallelMesh,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        size, blocks = (channels, None) if isinstance(channels, int) else (channels.number * channels.width, channels)
        self._own_rows = rows_of_block(size, None if blocks is None else blocks.number, mesh.tensor)
        self._maker = ParameterMaker(mesh, dtype)
        self.weight = self._made(size, num_taps)
        self.bias = self._made(size) if bias else None

    def own(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the taps [D/T, K] and, if there is one, the bias [D/T] of this rank's channels."""
        taps = self._own(self.weight, dtype)
        return (taps,) if self.bias is None else (taps, self._own(self.bias, dtype))

    def _made(self, *shape: int) -> nn.Parameter:
        return self._maker.sharded(*shape, dim=0) if self._own_rows is None else self._maker.replicated(*shape)

    def _own(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if self._own_rows is None:
            return local(parameter, dtype)
        return local_inside(parameter, dtype)[self._own_rows]
