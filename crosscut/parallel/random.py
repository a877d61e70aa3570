"""Random numbers under tensor parallelism (paper, section 3.1), as functions of the seed.

*Weights*: a parameter's initial values depend on (seed, name) only, so every layout starts with the same values. They
are drawn in blocks along the dimension that the tensor axis cuts, so a tensor rank draws little more than it holds.
(Data ranks that share a tensor rank's part may each draw the whole part, if it is cut along columns.)

*Dropout*: outside the parallel regions, all tensor ranks must drop the same elements; inside, each rank drops its own.
There are therefore two streams, one shared by the tensor ranks and one per rank. Both restart at every forward pass
from (seed, step, micro-batch, rank along the token axis), so a resumed run needs no saved random state. Under sequence
parallelism, ranks hold different tokens outside the regions, too, and only the per-rank stream is used.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.state.parameters import cut_dim, local_offsets

_BLOCK = 64
"""Number of indices along the cut dimension that are drawn together."""


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed computed from any values. It is the same in every process and on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def normal_(parameter: nn.Parameter, *, std: float, seed: int, name: str) -> None:
    """Fill a distributed parameter with N(0, std) values that depend on `seed` and `name` only, not on the layout.

    The values are drawn as float32 on the CPU, so they do not depend on the parameter's type and device either.
    """
    assert isinstance(parameter, DTensor)
    _fill(parameter.to_local(), parameter, std=std, words=("weights", seed, name))


@torch.no_grad()
def disturb_(parameter: nn.Parameter, *, std: float, seed: int, name: str) -> None:
    """Add N(0, std) values to a distributed parameter. They depend on `seed` and `name` only."""
    assert isinstance(parameter, DTensor)
    noise = torch.zeros_like(parameter.to_local())
    _fill(noise, parameter, std=std, words=("weights", seed, f"{name} disturbed"))
    parameter.to_local().add_(noise)


def _fill(target: Tensor, parameter: DTensor, *, std: float, words: tuple[object, ...]) -> None:
    """Draw this rank's part of a parameter into `target`."""
    if not target.numel() or isinstance(target, FakeTensor):  # a fake tensor has no memory to fill
        return
    target = target if target.dim() else target.view(1)
    dim = cut_dim(parameter) or 0
    offsets = local_offsets(parameter) or [0]
    first, last = offsets[dim], offsets[dim] + target.shape[dim]
    block_shape = list(parameter.shape) or [1]
    block_shape[dim] = _BLOCK
    generator = torch.Generator()
    for start in range(first // _BLOCK * _BLOCK, last, _BLOCK):
        generator.manual_seed(seed_of(*words, start))
        block = torch.empty(block_shape).normal_(0.0, std, generator=generator)
        begin, end = max(start, first), min(start + _BLOCK, last)
        block = block.narrow(dim, begin - start, end - begin)
        for other, offset in enumerate(offsets):
            if other != dim:
                block = block.narrow(other, offset, target.shape[other])
        target.narrow(dim, begin - first, end - begin).copy_(block)


class RandomStreams:
    """Two random streams for dropout. The default generator is the shared stream; `per_rank` switches it to the rank's
    own.

    There is only one stream if the tensor axis has one rank, or if the sequence is split, so that every rank drops from
    its own part only. Nothing is switched then, which a compiler can trace.
    """

    def __init__(self, mesh: ParallelMesh, seed: int) -> None:
        self.mesh, self.seed = mesh, seed
        self._are_two = mesh.tensor.size > 1 and not mesh.sequence_parallel
        self._started = False
        self._per_rank_state: Tensor | None = None

    def restart(self, *, step: int, micro_batch: int = 0) -> None:
        """Restart both streams for a forward pass. Every rank of the mesh must make the same call."""
        place = (self.seed, step, micro_batch, self.mesh.tokens.rank)
        own, shared = seed_of("per rank", *place, self.mesh.tensor.rank), seed_of("shared", *place)
        if self._are_two:
            torch.manual_seed(own)
            self._per_rank_state = self._get_state()
        torch.manual_seed(own if self.mesh.sequence_parallel else shared)
        self._started = True

    def per_rank(self) -> AbstractContextManager[None]:
        """Inside, the default generator is this rank's own stream. Use it for dropout within a parallel region."""
        self._require_start()
        return self._lent() if self._are_two else nullcontext()

    def between_regions(self) -> AbstractContextManager[None]:
        """Inside, the default generator is the stream for dropout outside the parallel regions: the shared stream, or
        the rank's own if the sequence is split.
        """
        self._require_start()
        return self.per_rank() if self.mesh.sequence_parallel else nullcontext()

    @contextmanager
    def _lent(self) -> Iterator[None]:
        assert self._per_rank_state is not None
        shared = self._get_state()
        self._set_state(self._per_rank_state)
        try:
            yield
        finally:
            self._per_rank_state = self._get_state()
            self._set_state(shared)

    def place(self) -> tuple[Tensor, Tensor | None]:
        """Return the state of both streams, for `repeated_from`."""
        return self._get_state(), self._per_rank_state

    @contextmanager
    def repeated_from(self, place: tuple[Tensor, Tensor | None]) -> Iterator[None]:
        """Inside, both streams repeat the numbers that followed `place`. Afterwards they continue as if nothing had
        been drawn.
        """
        before = self.place()
        shared, self._per_rank_state = place
        self._set_state(shared)
        try:
            yield
        finally:
            shared, self._per_rank_state = before
            self._set_state(shared)

    def _require_start(self) -> None:
        if not self._started:  # the default generators of the ranks may differ
            raise RuntimeError("`RandomStreams.restart` must be called before a forward pass with dropout.")

    def _get_state(self) -> Tensor:
        cuda = self.mesh.device.type == "cuda"
        return torch.cuda.get_rng_state(self.mesh.device) if cuda else torch.get_rng_state()

    def _set_state(self, state: Tensor) -> None:
        if self.mesh.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.mesh.device)
        else:
            torch.set_rng_state(state)


class Dropout(nn.Module):
    """Dropout outside the parallel regions. The residual stream stays identical on all tensor ranks.

    Input and output [B, S, H], or [B, S/T, H] under sequence parallelism, where each rank drops elements of its own
    part. Sends nothing. Source: paper, section 3.1.
    """

    def __init__(self, probability: float, *, streams: RandomStreams) -> None:
        super().__init__()
        self.probability, self.streams = probability, streams

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements in training mode; return `x` unchanged otherwise."""
        if not self.training or self.probability == 0.0:
            return x
        with self.streams.between_regions():
            return F.dropout(x, self.probability)
