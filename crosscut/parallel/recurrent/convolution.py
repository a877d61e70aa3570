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
    """Parameters of a causal convolution of each channel: `weight` [D, K] and `bias` [D], cut like the outputs of a
    `ColumnParallelLinear` with the output features `channels`; zeros until initialised.

    If there are more ranks than blocks of channels, several ranks hold the parameters of all blocks and use those of
    the same block. Their gradients are then partial.
    """

    def __init__(
        self, channels: int | Blocks, num_taps: int, *, mesh: ParallelMesh, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        size, blocks = (channels, None) if isinstance(channels, int) else (channels.number * channels.width, channels)
        self._own_rows = rows_of_block(size, None if blocks is None else blocks.number, mesh.tensor)
        make = ParameterMaker(mesh, dtype)
        shapes = ((size, num_taps), (size,))
        self.weight, self.bias = (
            make.sharded(*shape, dim=0) if self._own_rows is None else make.replicated(*shape) for shape in shapes
        )

    def own(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the taps [D/T, K] and the bias [D/T] of this rank's channels."""
        if self._own_rows is None:
            return local(self.weight, dtype), local(self.bias, dtype)
        return local_inside(self.weight, dtype)[self._own_rows], local_inside(self.bias, dtype)[self._own_rows]
