"""Gated delta net, with its value heads split over the tensor ranks (Yang et al. 2024, arXiv 2412.06464)."""

from torch import Tensor

from crosscut.architecture.sublayers import gated_delta as architecture
from crosscut.kernels.recurrent.chunks import Place
from crosscut.kernels.recurrent.delta import DeltaOperands, DeltaShape, delta_rule, delta_rule_next
from crosscut.model.building import Builder
from crosscut.model.sublayers.recurrent import RecurrentMixer
from crosscut.parallel.recurrent import GATE_OF_HEADS


class GatedDelta(RecurrentMixer):
    """Gated delta net: the vectors of a group are a query and a key, and the controls of a value head are its step size
    and its strength.
    """

    def __init__(self, part: architecture.GatedDelta, build: Builder) -> None:
        heads, sizes = part.heads, part.sizes
        super().__init__(part, build.with_epsilon(sizes.norm_epsilon or build.epsilon), gating=GATE_OF_HEADS)
        self.shape = DeltaShape(
            value_size=heads.size,
            key_size=heads.vector_size,
            chunk=heads.chunk,
            strongest=2.0 if sizes.negative_eigenvalues else 1.0,
        )

    def recur(self, operands: tuple[Tensor, ...], place: Place) -> Tensor:
        """Apply the delta rule to the tokens: [B, S, D/T]."""
        return delta_rule(DeltaOperands(*operands), self.shape, place)

    def recur_next(self, operands: tuple[Tensor, ...], place: Place) -> Tensor:
        """Apply the delta rule to the tokens, and keep the state after the last token."""
        return delta_rule_next(DeltaOperands(*operands), self.shape, place)
