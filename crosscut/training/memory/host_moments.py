"""Offload of the optimizer's moments: host memory holds the moments, and the device holds each moment only while a
step updates it.

A step updates the moments of AdamW piece by piece. While the device updates piece k, piece k + 1 is copied to the
device and piece k - 1 is copied back. Each direction has its own stream, so both directions of the bus are busy at
once. The device has two buffers per moment, each as large as a piece. AdamW works on each element separately, so
updating in pieces gives the same result as updating everything at once. Muon needs whole matrices, so its momentum is
copied matrix by matrix (`borrowed`).

    device      | update k - 1 | update k     | update k + 1 |
    to device   | copy k       | copy k + 1   | ...
    from device |              | copy k - 1   | copy k       | ...
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.config.conventions import PIECE_ELEMENTS
from crosscut.parallel.state.parameters import local_part, with_local_part
from crosscut.training.optimization.optimizer import AdamCall

_ALIGNMENT = 1 << 10
"""Pieces of a tensor start at multiples of this number of elements, so that vector instructions group the elements as
in the whole tensor.
"""


class _MomentSlice(NamedTuple):
    """Elements `first` to `last` (exclusive) of entry `entry` in the whole `AdamCall`."""

    entry: int
    first: int
    last: int


class InHostMemory:
    """Moments stored in host memory, in pinned memory if the parameters are on a CUDA device.

    If the parameters are on the CPU, the moments are not copied: each piece holds views of the stored moments, so an
    update of the piece changes the stored moments in place.
    """

    def __init__(self, piece_elements: int = PIECE_ELEMENTS) -> None:
        self.piece_elements = max(piece_elements // _ALIGNMENT, 1) * _ALIGNMENT
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def new(self, parameter: Tensor) -> Tensor:
        """Return zeros in host memory with the shape and sharding of `parameter`."""
        part = local_part(parameter)
        return with_local_part(parameter, _host_zeros(part))

    def keep(self, moment: Tensor, parameter: Tensor) -> Tensor:
        """Move a moment loaded from a checkpoint to host memory. Returns `moment` itself if it already has the right
        element type and is in the right kind of host memory.
        """
        part, like = local_part(moment), local_part(parameter)
        if not part.is_cuda and part.dtype == like.dtype and part.is_pinned() == like.is_cuda:
            return moment
        return with_local_part(parameter, _host_zeros(like).copy_(part))

    def pieces(self, whole: AdamCall) -> Iterator[AdamCall]:
        """Split `whole`, the arguments of the fused kernel, into pieces. Yield the pieces, each with its moments on the
        device. The caller must update each piece before it asks for the next piece.
        """
        cuts = cut_in_pieces([p.numel() for p in whole.parameters], self.piece_elements)
        if not cuts:  # with sharded parameters, a rank may hold no elements
            return
        flat = _in_rows(whole)
        device = whole.parameters[0].device
        if device.type != "cuda":
            for cut in cuts:
                yield _of(flat, cut)
            return
        with torch.cuda.device(device):
            yield from self._copied(flat, cuts)

    @contextmanager
    def borrowed(self, moment: Tensor, parameter: Tensor) -> Iterator[Tensor]:
        """Copy this rank's part of a moment to the device, and back at the end of the context. The copies run on the
        current stream, so the host does not wait.
        """
        held = local_part(moment)
        there = held.to(local_part(parameter).device, non_blocking=True)
        yield there
        if there is not held:
            held.copy_(there, non_blocking=True)

    def _copied(self, flat: AdamCall, cuts: list[list[_MomentSlice]]) -> Iterator[AdamCall]:
        """Yield the pieces with their moments on the device."""
        if self._streams is None:
            self._streams = torch.cuda.Stream(), torch.cuda.Stream()
        return _Copies(flat, cuts, self._streams).pieces()


class _Copies:
    """Copies of one step's moments between host memory and two buffers on the device. Each direction has its own
    stream.
    """

    def __init__(
        self, flat: AdamCall, cuts: list[list[_MomentSlice]], streams: tuple[torch.cuda.Stream, torch.cuda.Stream]
    ) -> None:
        self._flat, self._cuts = flat, cuts
        self._main, (self._inward, self._outward) = torch.cuda.current_stream(), streams
        size = max(sum(s.last - s.first for s in cut) for cut in cuts)
        # The buffers are allocated and freed on the main stream, which waits for both other streams before reusing the
        # memory.
        self._places = torch.empty(2, 2, size, dtype=flat.parameters[0].dtype, device=self._main.device)
        for stream in streams:
            stream.wait_stream(self._main)  # the previous step's copies to host memory are complete
        self._loaded = [torch.cuda.Event() for _ in cuts]
        self._stored = [torch.cuda.Event() for _ in cuts]

    def pieces(self) -> Iterator[AdamCall]:
        """Yield the pieces with their moments on the device. Each piece is copied ahead of its use."""
        ahead = self._load(0)
        for number in range(len(self._cuts)):
            piece = ahead
            if number + 1 < len(self._cuts):
                ahead = self._load(number + 1)
            self._main.wait_event(self._loaded[number])
            yield piece
            self._store(number, piece)
        self._main.wait_stream(self._outward)

    def _load(self, number: int) -> AdamCall:
        """Start copying a piece to the device, into the buffer that piece `number` - 2 has used."""
        with torch.cuda.stream(self._inward):
            if number >= 2:
                self._inward.wait_event(self._stored[number - 2])
            piece = _of(self._flat, self._cuts[number])
            averages, squares = self._places[number % 2]
            there = piece._replace(averages=_placed(piece.averages, averages), squares=_placed(piece.squares, squares))
            _copy((there.averages, there.squares), (piece.averages, piece.squares))
            self._loaded[number].record(self._inward)
        return there

    def _store(self, number: int, piece: AdamCall) -> None:
        """Start copying an updated piece back to host memory."""
        self._outward.wait_stream(self._main)
        with torch.cuda.stream(self._outward):
            host = _of(self._flat, self._cuts[number])
            _copy((host.averages, host.squares), (piece.averages, piece.squares))
            self._stored[number].record(self._outward)


def cut_in_pieces(sizes: list[int], piece_elements: int) -> list[list[_MomentSlice]]:
    """Cut tensors of these sizes into slices, in order, and group the slices into pieces of at most `piece_elements`
    elements.
    """
    pieces: list[list[_MomentSlice]] = []
    room = 0
    for entry, size in enumerate(sizes):
        first = 0
        while first < size:
            take = min(size - first, room)
            if take < size - first:  # the tensor continues in the next piece
                take = take // _ALIGNMENT * _ALIGNMENT
            if take == 0:
                pieces.append([])
                room = piece_elements
                continue
            pieces[-1].append(_MomentSlice(entry, first, first + take))
            first, room = first + take, room - take
    return pieces


def _of(flat: AdamCall, cut: list[_MomentSlice]) -> AdamCall:
    def sliced(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[entry][first:last] for entry, first, last in cut]

    steps = [flat.steps[entry] for entry, _, _ in cut]
    return AdamCall(sliced(flat.parameters), sliced(flat.gradients), sliced(flat.averages), sliced(flat.squares), steps)


def _placed(like: list[Tensor], place: Tensor) -> list[Tensor]:
    """Split `place` [elements] into consecutive parts with the sizes of the tensors in `like`."""
    sizes = [tensor.numel() for tensor in like]
    return list(place[: sum(sizes)].split(sizes))


def _copy(targets: tuple[list[Tensor], ...], sources: tuple[list[Tensor], ...]) -> None:
    for into, of in zip(targets, sources, strict=True):
        for target, source in zip(into, of, strict=True):
            target.copy_(source, non_blocking=True)


def _in_rows(whole: AdamCall) -> AdamCall:
    """Flatten each tensor to one dimension. Parameters and moments are views, so that updates reach the originals."""
    return AdamCall(
        [tensor.view(-1) for tensor in whole.parameters],
        [tensor.reshape(-1) for tensor in whole.gradients],
        [tensor.view(-1) for tensor in whole.averages],
        [tensor.view(-1) for tensor in whole.squares],
        whole.steps,
    )


def _host_zeros(part: Tensor) -> Tensor:
    return torch.zeros(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
