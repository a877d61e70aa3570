"""Mamba-2 mixer (SSD), with its heads split over the tensor ranks (Dao and Gu 2024, arXiv 2405.21060)."""

from math import inf

from torch import Tensor

from crosscut.architecture.sublayers import mamba2 as architecture
from crosscut.kernels.recurrent.chunks import Place
from crosscut.kernels.recurrent.scan import Operands, ScanShape, scan, scan_next
from crosscut.model.building import Builder
from crosscut.model.sublayers.recurrent import RecurrentMixer


class Mamba2(RecurrentMixer):
    """Mamba-2 mixer: the vectors of a group are B and C, and the control of a head is its step size."""

    def __init__(self, part: architecture.Mamba2, build: Builder) -> None:
        super().__init__(part, build)
        sizes = part.sizes
        self.shape = ScanShape(
            head_size=sizes.head_size,
            state_size=sizes.state_size,
            chunk=sizes.chunk_size,
            least_step=sizes.least_time_step,
            most_step=sizes.most_time_step or inf,
        )

    def recur(self, operands: tuple[Tensor, ...], place: Place) -> Tensor:
        """Scan the tokens: [B, S, D/T]."""
        return scan(Operands(*operands), self.shape, place)

    def recur_next(self, operands: tuple[Tensor, ...], place: Place) -> Tensor:
        """Scan the tokens, and keep the state after the last token."""
        return scan_next(Operands(*operands), self.shape, place)
