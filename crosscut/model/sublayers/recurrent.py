"""Mixers that carry a state through a sequence, such as Mamba-2, with their heads split over the tensor ranks.

The products for the gate, the heads' inputs, the vectors of the groups and the controls of the heads are
column-parallel, cut between heads and groups. The output product is row-parallel. If there are fewer groups than tensor
ranks, several ranks compute the vectors of the same group.

If several context ranks share a sequence, a rank exchanges heads for tokens before the convolution. It then convolves
and mixes whole sequences with a part of its heads, and exchanges them back.

Shapes: B batch, S sequence, H hidden, A heads, P elements of a head, G groups, N elements of a vector, D = A P, T
tensor ranks, C context ranks.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crosscut.architecture import Cut, Parameter
from crosscut.architecture.sublayers.recurrent import Recurrent
from crosscut.config.conventions import repeats_of_heads
from crosscut.kernels.recurrent.chunks import Place
from crosscut.kernels.recurrent.convolution import convolve, convolve_next
from crosscut.model.building import Builder
from crosscut.model.cache import PartMemory
from crosscut.model.shared import NOTHING_SHARED, Shared
from crosscut.parallel import Blocks, ColumnParallelLinears
from crosscut.parallel.context.operators import exchange_heads, exchange_tokens
from crosscut.parallel.recurrent import GATE_FIRST, ChannelParallelConvolution, GatedGroupNorm, Gating
from crosscut.parallel.state.parameters import ParameterMaker, local


class _Channels(NamedTuple):
    """Channels and parameters of the recurrence on one rank."""

    inner: Tensor
    """Inputs of the heads: [B, S, D/T]."""
    vectors: Tensor
    """The two vectors of each group: [B, S, G/T 2 N]."""
    controls: tuple[Tensor, ...]
    """Numbers of the heads, such as the step sizes: [B, S, A/T]."""
    taps: tuple[Tensor, ...]
    """Taps [D/T, K] and, if there is one, bias [D/T] of the channels of the heads."""
    vector_taps: tuple[Tensor, ...]
    """Taps and bias of the channels of the groups."""
    dynamics: tuple[Tensor, ...]
    """Parameters of the heads: [A/T]."""


class RecurrentMixer(nn.Module, ABC):
    """Mixer with a state. Maps [B, S, H] to [B, S, H] or, under sequence parallelism, [B, S/T, H] to [B, S/T, H].

    The names of the submodules and the parameters are those of the description.
    """

    def __init__(self, part: Recurrent, build: Builder, *, gating: Gating = GATE_FIRST) -> None:
        super().__init__()
        self.runner, self.context, self.heads = build.runner, build.mesh.context, part.heads
        self.inputs = ColumnParallelLinears(**{each.weight.module: build.columns(each) for each in part.inputs})
        self._convolutions = tuple(each[0].module for each in (part.convolution, part.vector_convolution))
        for name, parameters in zip(self._convolutions, (part.convolution, part.vector_convolution), strict=True):
            self.add_module(name, _convolution(parameters, build))
        make = ParameterMaker(build.mesh, build.dtype).wide
        self._dynamics = tuple(each.name.rpartition(".")[2] for each in part.dynamics)
        for name in self._dynamics:
            self.register_parameter(name, make.sharded(part.heads.number, dim=0))
        groups = Blocks(part.norm_groups, part.heads.width // part.norm_groups)
        self.norm = GatedGroupNorm(groups, mesh=build.mesh, epsilon=build.epsilon, gating=gating, dtype=build.dtype)
        self.output = build.rows(part.output)

    @abstractmethod
    def recur(self, operands: tuple[Tensor, ...], place: Place) -> Tensor:
        """Mix the tokens: [B, S, D/T]. The operands are convolved inputs and vectors, controls, and parameters."""

    @abstractmethod
    def recur_next(self, operands: tuple[Tensor, ...], place: Place) -> Tensor:
        """Mix the tokens as `recur` does, and overwrite the state of `place` by the state after the last token."""

    def forward(self, x: Tensor, shared: Shared = NOTHING_SHARED, memory: PartMemory | None = None) -> Tensor:
        """Mix the tokens of each document in their order, after the tokens in `memory`."""
        gate, inner, vectors, *controls = self.inputs(x)
        dtype = torch.promote_types(inner.dtype, torch.float32)
        dynamics = tuple(local(getattr(self, name), dtype) for name in self._dynamics)
        taps, vector_taps = (getattr(self, name).own(inner.dtype) for name in self._convolutions)
        own, documents = _Channels(inner, vectors, tuple(controls), taps, vector_taps, dynamics), shared.documents
        if memory is not None:
            y = self._mix_on(own, memory)
        elif documents is not None and documents.is_shared:
            slots = self._mix(self._exchanged(own), documents.numbers).unsqueeze(1)  # [B, 1, S, D/T/C]
            y = exchange_tokens(slots, self.context).transpose(1, 2).flatten(2)
        else:
            y = self._mix(own, None if documents is None else documents.numbers)
        mixed: Tensor = self.output(self.norm(y, gate))
        return mixed

    def _mix(self, own: _Channels, documents: Tensor | None) -> Tensor:
        """Convolve and mix whole sequences: [B, S, D/T]."""
        cheap = self.runner.cheap
        make = convolve if documents is None else partial(convolve, documents=documents)
        inner, vectors = cheap(make, own.inner, *own.taps), cheap(make, own.vectors, *own.vector_taps)
        return self.runner.core(self._core, documents, inner, vectors, *own.controls, *own.dynamics)

    def _core(self, documents: Tensor | None, *operands: Tensor) -> Tensor:
        return self.recur(operands, Place(documents))

    def _exchanged(self, own: _Channels) -> _Channels:
        """Exchange heads for tokens: of this rank's tokens of all heads, make all tokens of a part of the heads. If
        context ranks mix heads of the same group, they get copies of its vectors.
        """
        axis, width = self.context, 2 * self.heads.vector_size
        num_heads, num_groups = own.dynamics[0].shape[0], own.vectors.shape[-1] // width
        times = repeats_of_heads(num_heads, num_groups, axis.size)
        channels = (own.inner, _repeated(own.vectors, times, width, dim=-1), *own.controls)
        slots = [each.unflatten(-1, (axis.size, -1)) for each in channels]
        sent = torch.cat(slots, -1).transpose(1, 2)  # [B, C, S/C, channels of a context rank]
        received = exchange_heads(sent, axis).squeeze(1).split([each.shape[-1] for each in slots], -1)
        repeated = [_repeated(each, times, width, dim=0) for each in own.vector_taps]
        taps, vector_taps, dynamics = (
            tuple(each.chunk(axis.size)[axis.rank] for each in parameters)
            for parameters in (own.taps, repeated, own.dynamics)
        )
        inner, vectors, *controls = received
        return _Channels(inner, vectors, tuple(controls), taps, vector_taps, dynamics)

    def _mix_on(self, own: _Channels, memory: PartMemory) -> Tensor:
        """Convolve and mix tokens that continue the texts of `memory`, and keep the new inputs and states."""
        joined, before = memory.joined("inputs", torch.cat((own.inner, own.vectors), -1))
        parts = joined.split((own.inner.shape[-1], own.vectors.shape[-1]), -1)
        inner, vectors = (
            convolve_next(each, *taps, before=before)
            for each, taps in zip(parts, (own.taps, own.vector_taps), strict=True)
        )
        place = Place(state=memory.kept["state"], is_real=memory.reading.is_real)
        return self.recur_next((inner, vectors, *own.controls, *own.dynamics), place)


def _convolution(parameters: tuple[Parameter, ...], build: Builder) -> ChannelParallelConvolution:
    """Build a convolution of each channel."""
    weight, *bias = parameters
    channels, num_taps = weight.shape
    blocks = Blocks(weight.heads, channels // weight.heads) if weight.cut is Cut.HEADS else channels
    return ChannelParallelConvolution(blocks, num_taps, mesh=build.mesh, bias=bool(bias), dtype=build.dtype)


def _repeated(x: Tensor, times: int, width: int, *, dim: int) -> Tensor:
    """Repeat each block of `width` elements of a dimension `times` times."""
    if times == 1:
        return x
    dim = dim % x.dim()
    repeated: Tensor = x.unflatten(dim, (-1, width)).repeat_interleave(times, dim).flatten(dim, dim + 1)
    return repeated
