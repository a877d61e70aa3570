"""Mamba-2 mixer (SSD), with its heads split over the tensor ranks (Dao and Gu 2024, arXiv 2405.21060).

The products for the gate, the heads' inputs, the vectors B and C of the groups and the step sizes are column-parallel,
cut between heads and groups. The output product is row-parallel. If there are fewer groups than tensor ranks, several
ranks compute the vectors of the same group.

If several context ranks share a sequence, a rank exchanges heads for tokens before the convolution. It then convolves
and scans whole sequences with a part of its heads, and exchanges them back.

Shapes: B batch, S sequence, H hidden, A heads, P elements of a head, G groups, N elements of the state, D = A P, T
tensor ranks, C context ranks.
"""

from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crosscut.architecture.sublayers import mamba2 as architecture
from crosscut.config.conventions import repeats_of_heads
from crosscut.kernels.convolution import convolve
from crosscut.kernels.scan import Operands, Place, ScanShape, scan, scan_on
from crosscut.model.building import Builder
from crosscut.model.cache import PartMemory
from crosscut.model.shared import NOTHING_SHARED, Shared
from crosscut.parallel import Blocks, ColumnParallelLinears
from crosscut.parallel.context.operators import exchange_heads, exchange_tokens
from crosscut.parallel.recurrent import ChannelParallelConvolution, GatedGroupNorm
from crosscut.parallel.state.parameters import ParameterMaker, local


class _Operands(NamedTuple):
    """Channels and parameters of the scan on one rank."""

    inner: Tensor
    """Inputs of the heads: [B, S, D/T]."""
    bc: Tensor
    """Vectors B and C of the groups: [B, S, G/T 2 N]."""
    step: Tensor
    """Step sizes of the heads: [B, S, A/T]."""
    taps: tuple[Tensor, ...]
    """Taps [D/T, K] and bias [D/T] of the channels of the heads."""
    bc_taps: tuple[Tensor, ...]
    """Taps and bias of the channels of the groups."""
    dynamics: tuple[Tensor, ...]
    """Logarithm of the decay rate, skip, and bias of the step size, of each head: [A/T]."""


class Mamba2(nn.Module):
    """Mamba-2 mixer. Maps [B, S, H] to [B, S, H] or, under sequence parallelism, [B, S/T, H] to [B, S/T, H]."""

    def __init__(self, part: architecture.Mamba2, build: Builder) -> None:
        super().__init__()
        self.runner, self.context, sizes = build.runner, build.mesh.context, part.sizes
        self.shape = ScanShape(
            head_size=sizes.head_size,
            state_size=sizes.state_size,
            chunk=sizes.chunk_size,
            least_step=sizes.least_time_step,
            most_step=sizes.most_time_step or inf,
        )
        names = ("gate", "inner", "bc", "step")
        self.inputs = ColumnParallelLinears(**{name: build.columns(getattr(part, name)) for name in names})
        place: Any = {"mesh": build.mesh, "dtype": build.dtype}
        blocks = Blocks(sizes.num_groups, 2 * sizes.state_size)
        self.convolution = ChannelParallelConvolution(sizes.inner_size, sizes.conv_size, **place)
        self.bc_convolution = ChannelParallelConvolution(blocks, sizes.conv_size, **place)
        make = ParameterMaker(build.mesh, build.dtype)
        self.log_rate, self.skip, self.step_bias = (make.sharded(sizes.num_heads, dim=0) for _ in part.dynamics)
        self.norm = GatedGroupNorm(sizes.inner_size, sizes.norm_groups, epsilon=build.epsilon, **place)
        self.output = build.rows(part.output)

    def forward(self, x: Tensor, shared: Shared = NOTHING_SHARED, memory: PartMemory | None = None) -> Tensor:
        """Mix the tokens of each document in their order, after the tokens in `memory`."""
        gate, inner, bc, step = self.inputs(x)
        wide = torch.promote_types(step.dtype, torch.float32)
        dynamics = tuple(local(parameter, wide) for parameter in (self.log_rate, self.skip, self.step_bias))
        taps, bc_taps = (each.own(step.dtype) for each in (self.convolution, self.bc_convolution))
        own, documents = _Operands(inner, bc, step, taps, bc_taps, dynamics), shared.documents
        if memory is not None:
            y = self._scan_on(own, memory)
        elif documents is not None and documents.is_shared:
            slots = self._scan(self._exchanged(own), documents.numbers).unsqueeze(1)  # [B, 1, S, D/T/C]
            y = exchange_tokens(slots, self.context).transpose(1, 2).flatten(2)
        else:
            y = self._scan(own, None if documents is None else documents.numbers)
        mixed: Tensor = self.output(self.norm(y, gate))
        return mixed

    def _scan(self, own: _Operands, documents: Tensor | None) -> Tensor:
        """Convolve and scan whole sequences: [B, S, D/T]."""
        cheap = self.runner.cheap
        make = convolve if documents is None else partial(convolve, documents=documents)
        inner, bc = cheap(make, own.inner, *own.taps), cheap(make, own.bc, *own.bc_taps)
        return self.runner.core(self._core, inner, bc, own.step, *own.dynamics, documents)

    def _core(self, *tensors: Tensor) -> Tensor:
        return scan(Operands(*tensors[:6]), self.shape, Place(*tensors[6:]))

    def _exchanged(self, own: _Operands) -> _Operands:
        """Exchange heads for tokens: of this rank's tokens of all heads, make all tokens of a part of the heads. If
        context ranks scan heads of the same group, they get copies of its vectors.
        """
        axis, width = self.context, 2 * self.shape.state_size
        num_heads, num_groups = own.step.shape[-1], own.bc.shape[-1] // width
        times = repeats_of_heads(num_heads, num_groups, axis.size)
        channels = (own.inner, _repeated(own.bc, times, width, dim=-1), own.step)
        slots = [each.unflatten(-1, (axis.size, -1)) for each in channels]
        sent = torch.cat(slots, -1).transpose(1, 2)  # [B, C, S/C, channels of a context rank]
        received = exchange_heads(sent, axis).squeeze(1).split([each.shape[-1] for each in slots], -1)
        repeated = [_repeated(each, times, width, dim=0) for each in own.bc_taps]
        taps, bc_taps, dynamics = (
            tuple(each.chunk(axis.size)[axis.rank] for each in parameters)
            for parameters in (own.taps, repeated, own.dynamics)
        )
        inner, bc, step = received
        return _Operands(inner, bc, step, taps, bc_taps, dynamics)

    def _scan_on(self, own: _Operands, memory: PartMemory) -> Tensor:
        """Convolve and scan tokens that continue the texts of `memory`, and keep the new inputs and states."""
        inputs, state = memory.kept["inputs"], memory.kept["state"]
        counts, before = memory.reading.counts, inputs.shape[1]
        joined = torch.cat((inputs, torch.cat((own.inner, own.bc), -1)), 1)
        parts = joined.split((own.inner.shape[-1], own.bc.shape[-1]), -1)
        inner, bc = (
            convolve(each, *taps)[:, before:] for each, taps in zip(parts, (own.taps, own.bc_taps), strict=True)
        )
        is_real = torch.arange(own.step.shape[1], device=counts.device) < counts.unsqueeze(1)
        place = Place(state=state, is_real=is_real)
        y, after = scan_on(Operands(inner, bc, own.step, *own.dynamics), self.shape, place)
        last = counts.unsqueeze(1) + torch.arange(before, device=counts.device)
        inputs.copy_(joined.gather(1, last.unsqueeze(-1).expand(-1, -1, joined.shape[-1])))
        state.copy_(after)
        return y


def _repeated(x: Tensor, times: int, width: int, *, dim: int) -> Tensor:
    """Repeat each block of `width` elements of a dimension `times` times."""
    if times == 1:
        return x
    dim = dim % x.dim()
    repeated: Tensor = x.unflatten(dim, (-1, width)).repeat_interleave(times, dim).flatten(dim, dim + 1)
    return repeated
