"""Mamba-1 mixer (S6), with its channels split over the tensor ranks (Gu and Dao 2023, arXiv 2312.00752).

The products for the gate, the channels' inputs and the step sizes are column-parallel. The output product is
row-parallel, and so is the product for the selection: the step vector of each token and its vectors B and C. The sum of
the selection over the ranks stands inside the region, since every rank needs the whole selection.

If several context ranks share a sequence, a rank exchanges channels for tokens before the convolution. It then
convolves and scans whole sequences with a part of its channels, and exchanges them back. The selection is summed over
the context ranks, too: each rank sums and normalises the selection of its own tokens, and all ranks gather the results.

Shapes: B batch, S sequence, H hidden, D channels, N elements of the state, R elements of the step vector, K taps, T
tensor ranks, C context ranks.
"""

from functools import partial

import torch
from torch import Tensor, nn

from crosscut.architecture.sublayers import mamba as architecture
from crosscut.kernels.recurrent.chunks import Place
from crosscut.kernels.recurrent.convolution import convolve, convolve_next
from crosscut.kernels.recurrent.selective_scan import Operands, selective_scan, selective_scan_next
from crosscut.model.building import Builder
from crosscut.model.cache import PartMemory
from crosscut.model.shared import NOTHING_SHARED, Shared
from crosscut.model.sublayers.gated_mlp import swiglu
from crosscut.parallel import (
    ColumnParallelLinears,
    enter_tensor_parallel,
    leave_tensor_parallel,
)
from crosscut.parallel.context.operators import (
    exchange_heads,
    exchange_tokens,
    gather_sequence,
    scatter_sum_of_sequence,
)
from crosscut.parallel.linear import part_of
from crosscut.parallel.recurrent import ChannelParallelConvolution
from crosscut.parallel.state.parameters import ParameterMaker, local


class Mamba(nn.Module):
    """Mamba-1 mixer. Maps [B, S, H] to [B, S, H] or, under sequence parallelism, [B, S/T, H] to [B, S/T, H]."""

    def __init__(self, part: architecture.Mamba, build: Builder) -> None:
        super().__init__()
        self.runner, self.mesh, self.sizes = build.runner, build.mesh, part.sizes
        inner = part.sizes.inner_size
        self.inputs = ColumnParallelLinears(gate=build.columns(part.gate), inner=build.columns(part.inner))
        self.convolution = ChannelParallelConvolution(inner, part.sizes.conv_size, mesh=build.mesh, dtype=build.dtype)
        self.selection = build.rows(part.selection)
        for name, norm in zip(architecture.NORMS, part.norms, strict=False):
            self.add_module(name, build.region_norm(norm))
        self.step = build.columns(part.step)
        make = ParameterMaker(build.mesh, build.dtype).wide
        self.log_rate = make.sharded(inner, part.sizes.state_size, dim=0)
        self.skip, self.step_bias = make.sharded(inner, dim=0), make.sharded(inner, dim=0)
        self.output = build.rows(part.output)

    def forward(self, x: Tensor, shared: Shared = NOTHING_SHARED, memory: PartMemory | None = None) -> Tensor:
        """Mix the tokens of each document in their order, after the tokens in `memory`."""
        gate, inner = self.inputs(x)
        documents = shared.documents
        if memory is not None:
            y = self._scan_on(inner, memory)
        elif documents is not None and documents.is_shared:
            y = self._scan_of_channels(inner, documents.numbers)
        else:
            y = self._scan(inner, None if documents is None else documents.numbers)
        mixed: Tensor = self.output(self.runner.cheap(swiglu, gate, y))
        return mixed

    def _scan_of_channels(self, inner: Tensor, documents: Tensor | None) -> Tensor:
        """Convolve and scan whole sequences of a part of the channels, if context ranks share the sequences: [B, S/C,
        D/T] to [B, S/C, D/T].
        """
        axis = self.mesh.context
        own = inner.shape[-1] // axis.size
        slots = inner.unflatten(-1, (axis.size, own)).transpose(1, 2)  # [B, C, S/C, D/T/C]
        part = slice(axis.rank * own, (axis.rank + 1) * own)
        y = self._scan(exchange_heads(slots, axis).squeeze(1), documents, part)
        return exchange_tokens(y.unsqueeze(1), axis).transpose(1, 2).flatten(2)

    def _scan(self, inner: Tensor, documents: Tensor | None, part: slice | None = None) -> Tensor:
        """Convolve and scan whole sequences: [B, S, D/T], or [B, S, D/T/C] of a part of the channels."""
        make = convolve if documents is None else partial(convolve, documents=documents)
        convolved = self.runner.cheap(make, inner, *(part_of(each, part) for each in self.convolution.own(inner.dtype)))
        operands = self._operands(convolved, part)
        return self.runner.core(self._core, *operands, documents)

    def _core(self, *tensors: Tensor) -> Tensor:
        return selective_scan(Operands(*tensors[:6]), self.sizes.chunk_size, Place(*tensors[6:]))

    def _operands(self, convolved: Tensor, part: slice | None = None) -> Operands:
        """Return the operands of the scan. `convolved` [B, S, D/T] has all channels of this tensor rank, or only
        those in `part`.
        """
        selection = self._selection(convolved, part)
        vector, bc = selection.split((self.sizes.step_rank, 2 * self.sizes.state_size), -1)
        dtype = torch.promote_types(convolved.dtype, torch.float32)
        dynamics = (part_of(local(each, dtype), part) for each in (self.log_rate, self.skip, self.step_bias))
        return Operands(convolved, self.step.inside(vector, part), bc, *dynamics)

    def _selection(self, convolved: Tensor, part: slice | None) -> Tensor:
        """Return the step vector and the vectors B and C of each token: [B, S, R + 2 N]."""
        summed = self.selection.inside(convolved, part)
        if part is not None:
            summed = scatter_sum_of_sequence(summed.unsqueeze(1), self.mesh.context).squeeze(1)
        left = leave_tensor_parallel(summed, self.mesh)
        if self.sizes.vector_norms:
            widths = (self.sizes.step_rank, self.sizes.state_size, self.sizes.state_size)
            parts = zip(architecture.NORMS, left.split(widths, -1), strict=True)
            left = torch.cat([getattr(self, name)(each) for name, each in parts], -1)
        entered = enter_tensor_parallel(left, self.mesh)
        return entered if part is None else gather_sequence(entered.unsqueeze(1), self.mesh.context).squeeze(1)

    def _scan_on(self, inner: Tensor, memory: PartMemory) -> Tensor:
        """Convolve and scan tokens that continue the texts of `memory`, and keep the new inputs and states."""
        joined, before = memory.joined("inputs", inner)
        convolved = convolve_next(joined, *self.convolution.own(inner.dtype), before=before)
        place = Place(state=memory.kept["state"], is_real=memory.reading.is_real)
        return selective_scan_next(self._operands(convolved), self.sizes.chunk_size, place)
