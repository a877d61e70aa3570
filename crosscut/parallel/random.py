"""Random numbers under tensor parallelism (paper, section 3.1), computed as functions of the seed.

*Weights*: a parameter's initial values depend only on the seed and the parameter's name, so every layout starts with
the same values. The values are drawn in blocks along the dimension that the tensor axis cuts, so a tensor rank draws
only a few more values than it keeps. (Exception: if the tensor axis cuts dimension 1 of a parameter, and data ranks
share one copy of the model, each data rank draws all values of its tensor rank, and keeps only its own rows.) The
matrices of experts are stacked in one parameter, and are drawn one by one.

*Dropout*: outside the parallel regions, all tensor ranks must drop the same elements. Inside a parallel region, each
rank drops different elements. There are therefore two random streams, one shared by the tensor ranks and one per rank.
Both streams restart at every forward pass and at every layer. Their new state depends only on the seed, the step, the
micro-batch, the layer and the rank's position among the ranks that see different tokens. The state of the per-rank
stream also depends on the rank's position on the tensor axis. A resumed run therefore needs no saved random state, and
a pipeline stage needs no random state from earlier stages. Under sequence parallelism, ranks hold different tokens
outside the parallel regions, too, so only the per-rank stream is used.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.state.parameters import cut_dim, local_offsets

_BLOCK = 64
"""Number of indices along the cut dimension whose values are drawn together."""


def seed_of(*parts: object) -> int:
    """Compute a 63-bit seed from `parts`. Equal parts give equal seeds in all processes and on all machines."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def normal_(parameter: nn.Parameter, *, std: float, seed: int, name: str) -> None:
    """Fill a distributed parameter with normally distributed values of mean 0 and standard deviation `std`.

    The values depend only on `seed` and `name`, not on the layout. They are drawn as float32 on the CPU, so they do not
    depend on the parameter's element type and device either.
    """
    assert isinstance(parameter, DTensor)
    _fill(parameter.to_local(), parameter, std=std, words=("weights", seed, name))


@torch.no_grad()
def uniform_(parameter: nn.Parameter, change: Callable[[Tensor], Tensor], *, seed: int, name: str) -> None:
    """Fill a distributed parameter with `change(u)`. The numbers u are float64, uniform between 0 and 1, and depend
    only on `seed` and `name`.
    """
    assert isinstance(parameter, DTensor)
    target = parameter.to_local()
    drawn = torch.zeros(target.shape)
    _fill(drawn, parameter, std=1.0, words=("weights", seed, name))
    target.copy_(change(torch.special.ndtr(drawn.double())))


@torch.no_grad()
def disturb_(parameter: nn.Parameter, *, std: float, seed: int, name: str) -> None:
    """Add normally distributed values of mean 0 and standard deviation `std` to a distributed parameter. The values
    depend only on `seed` and `name`.
    """
    assert isinstance(parameter, DTensor)
    noise = torch.zeros_like(parameter.to_local())
    _fill(noise, parameter, std=std, words=("weights", seed, f"{name} disturbed"))
    parameter.to_local().add_(noise)


def _fill(target: Tensor, parameter: DTensor, *, std: float, words: tuple[object, ...]) -> None:
    """Draw this rank's part of a parameter into `target`. `words` identify the random values. Of stacked matrices, each
    has random values of its own, so that a rank draws only the matrices that it holds.
    """
    if not target.numel() or isinstance(target, FakeTensor):  # a fake tensor has no memory to fill
        return
    dim, offsets, shape = cut_dim(parameter) or 0, local_offsets(parameter), list(parameter.shape)
    if parameter.dim() == 3:
        for number, matrix in enumerate(target, start=offsets[0]):
            _fill_blocks(matrix, shape[1:], max(dim - 1, 0), offsets[1:], std=std, words=(*words, number))
    else:
        target = target if target.dim() else target.view(1)
        _fill_blocks(target, shape or [1], dim, offsets or [0], std=std, words=words)


def _fill_blocks(
    target: Tensor, shape: list[int], dim: int, offsets: list[int], *, std: float, words: tuple[object, ...]
) -> None:
    """Draw a part of a tensor of the shape `shape`, in blocks along dimension `dim`. The part begins at `offsets`."""
    first, last = offsets[dim], offsets[dim] + target.shape[dim]
    block_shape = [*shape[:dim], _BLOCK, *shape[dim + 1 :]]
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
    """Random streams for dropout: one that all tensor ranks share, and one per rank.

    PyTorch's default generator holds the shared stream. Inside the context `per_rank`, the default generator holds the
    rank's own stream. If the tensor axis has only one rank, one stream is enough. One stream is also enough under
    sequence parallelism, because every rank then drops only elements of its own part. With a single stream, the default
    generator is never switched, so a compiler can trace the code.
    """

    def __init__(self, mesh: ParallelMesh, seed: int) -> None:
        self.mesh, self.seed = mesh, seed
        self._are_two = mesh.tensor.size > 1 and not mesh.sequence_parallel
        self._started: tuple[int, int] | None = None
        self._is_started = False  # for compiled layers, which would be compiled again at every change of `_started`
        self._per_rank_state: Tensor | None = None

    def restart(self, *, step: int, micro_batch: int = 0) -> None:
        """Restart the streams for a micro-batch's forward pass. Every rank of the mesh must pass the same arguments."""
        self._started, self._is_started = (step, micro_batch), True
        self._restart()

    @property
    def micro_batch(self) -> int:
        """Index of the micro-batch for which `restart` was last called; 0 before the first call."""
        return 0 if self._started is None else self._started[1]

    def enter_layer(self, index: int) -> None:
        """Restart the streams for layer `index` in the forward pass of the current micro-batch. The numbers that a
        layer draws therefore do not depend on the numbers that were drawn before. If `restart` was never called, this
        method does nothing.
        """
        if self._started is not None:
            self._restart("layer", index)

    def _restart(self, *layer: object) -> None:
        assert self._started is not None
        place = (self.seed, *self._started, self.mesh.tokens.rank, *layer)
        own, shared = seed_of("per rank", *place, self.mesh.tensor.rank), seed_of("shared", *place)
        if self._are_two:
            self._seed(own)
            self._per_rank_state = self._get_state()
        self._seed(own if self.mesh.sequence_parallel else shared)

    def per_rank(self) -> AbstractContextManager[None]:
        """Context in which the default generator holds this rank's own stream, for dropout inside a parallel region.

        Raises `RuntimeError` if `restart` was never called.
        """
        self._require_start()
        return self._lent() if self._are_two else nullcontext()

    def between_regions(self) -> AbstractContextManager[None]:
        """Context in which the default generator holds the stream for dropout outside the parallel regions: the shared
        stream, or, under sequence parallelism, this rank's own stream.

        Raises `RuntimeError` if `restart` was never called.
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
        """Return the current states of the default generator and of the per-rank stream, for `repeated_from`. The
        second state is None if there is only one stream.
        """
        return self._get_state(), self._per_rank_state

    @contextmanager
    def repeated_from(self, place: tuple[Tensor, Tensor | None]) -> Iterator[None]:
        """Context in which the streams start again from `place`, a result of the method `place`. Recomputation inside
        the context therefore draws the same numbers as the first forward pass. On exit, the streams continue from their
        states before the context.
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
        if not self._is_started:  # the default generators of the ranks may differ
            raise RuntimeError(
                "`RandomStreams.restart` must be called before a forward pass with dropout, but was not called. Call "
                "it at the start of every micro-batch."
            )

    def _seed(self, seed: int) -> None:
        if self.mesh.device.type == "cpu":
            torch.default_generator.manual_seed(seed)  # `torch.manual_seed` takes 0.3 ms, as long as a small product
        else:
            torch.manual_seed(seed)

    def _get_state(self) -> Tensor:
        cuda = self.mesh.device.type == "cuda"
        return torch.cuda.get_rng_state(self.mesh.device) if cuda else torch.get_rng_state()

    def _set_state(self, state: Tensor) -> None:
        if self.mesh.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.mesh.device)
        else:
            torch.set_rng_state(state)


class Dropout(nn.Module):
    """Dropout outside the parallel regions, or, with `inside`, inside a parallel region.

    Input and output: [B, S, H]. All tensor ranks drop the same elements, so the residual stream stays identical on all
    tensor ranks. Under sequence parallelism, input and output are [B, S/T, H], and each rank drops elements of its own
    part. With `inside`, input and output are this rank's part of any tensor, and each rank drops different elements.
    Sends nothing. Source: paper, section 3.1.
    """

    def __init__(self, probability: float, *, streams: RandomStreams, inside: bool = False) -> None:
        super().__init__()
        self.probability, self.streams, self.inside = probability, streams, inside

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of `x` in training mode. In evaluation mode, return `x` unchanged."""
        if not self.training or self.probability == 0.0:
            return x
        with self.streams.per_rank() if self.inside else self.streams.between_regions():
            return F.dropout(x, self.probability)
