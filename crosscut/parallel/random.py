"""Random numbers under tensor parallelism (paper, section 3.1), as functions of the seed alone.

*Weights*: a parameter's initial values follow from (seed, name). They are drawn in blocks along the dimension that the
tensor axis cuts, so that a tensor rank draws little more than it holds and every layout holds the same. (Data ranks
that share a tensor rank's part each draw all of it, where it is cut along columns.)

*Dropout*: between the parallel regions every tensor rank must drop the same elements, inside them each its own. So
there are two streams, one shared by the tensor ranks and one per rank, both restarted at every forward pass from (seed,
step, micro-batch, rank along the data axis). A run that resumes needs no saved state to continue them. Where the
sequence is split, ranks drop from parts of their own between the regions, too, and the rank's stream is the only one.
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
"""Indices along the cut dimension that are drawn together."""


def seed_of(*parts: object) -> int:
    """A 63-bit seed from any values: the same in every process and on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def normal_(parameter: nn.Parameter, *, std: float, seed: int, name: str) -> None:
    """Fill a distributed parameter with N(0, std) values that depend on `seed` and `name` only, not on the layout.

    Drawn as float32 on the CPU whatever the parameter's type and device, so that all of them start alike.
    """
    assert isinstance(parameter, DTensor)
    _fill(parameter.to_local(), parameter, std=std, words=("weights", seed, name))


@torch.no_grad()
def disturb_(parameter: nn.Parameter, *, std: float, seed: int, name: str) -> None:
    """Add N(0, std) values that depend on `seed` and `name` only to a distributed parameter."""
    assert isinstance(parameter, DTensor)
    noise = torch.zeros_like(parameter.to_local())
    _fill(noise, parameter, std=std, words=("weights", seed, f"{name} disturbed"))
    parameter.to_local().add_(noise)


def _fill(target: Tensor, parameter: DTensor, *, std: float, words: tuple[object, ...]) -> None:
    """Draw this rank's part of a parameter into `target`."""
    if not target.numel() or isinstance(target, FakeTensor):  # of those without memory nothing needs values
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
    """The two streams of dropout: the default generator is the shared one, and `per_rank` lends it the other.

    Where nothing is shared there is one stream, each rank's own: on a tensor axis of one rank, and where the sequence
    is split, so that all dropout is of a rank's own part. Nothing is switched there, and a compiler can trace it.
    """

    def __init__(self, mesh: ParallelMesh, seed: int) -> None:
        self.mesh, self.seed = mesh, seed
        self._are_two = mesh.tensor.size > 1 and not mesh.sequence_parallel
        self._started = False
        self._per_rank_state: Tensor | None = None

    def restart(self, *, step: int, micro_batch: int = 0) -> None:
        """Begin both streams anew for a forward pass; every rank of the mesh calls it alike."""
        place = (self.seed, step, micro_batch, self.mesh.tokens.rank)
        own, shared = seed_of("per rank", *place, self.mesh.tensor.rank), seed_of("shared", *place)
        if self._are_two:
            torch.manual_seed(own)
            self._per_rank_state = self._get_state()
        torch.manual_seed(own if self.mesh.sequence_parallel else shared)
        self._started = True

    def per_rank(self) -> AbstractContextManager[None]:
        """Inside, the default generator is this rank's own stream: for dropout within a parallel region."""
        self._require_start()
        return self._lent() if self._are_two else nullcontext()

    def between_regions(self) -> AbstractContextManager[None]:
        """Inside, the stream for dropout between parallel regions: shared, or per rank where the sequence is split."""
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
        """State of both streams, to be handed to `repeated_from`."""
        return self._get_state(), self._per_rank_state

    @contextmanager
    def repeated_from(self, place: tuple[Tensor, Tensor | None]) -> Iterator[None]:
        """Inside, both streams give again what they gave from `place` on; after it they go on as if nothing had been
        drawn.
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
        if not self._started:  # the ranks' default generators need not agree
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
    """Dropout between the parallel regions: the residual stream stays identical on all tensor ranks.

    Input and output [B, S, H], or [B, S/T, H] under sequence parallelism, where each rank drops elements of its own
    part. Sends nothing. Source: paper, section 3.1.
    """

    def __init__(self, probability: float, *, streams: RandomStreams) -> None:
        super().__init__()
        self.probability, self.streams = probability, streams

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements while training; the identity otherwise."""
        if not self.training or self.probability == 0.0:
            return x
        with self.streams.between_regions():
            return F.dropout(x, self.probability)
