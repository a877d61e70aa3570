"""Parallel layers inside mixers: the convolution and the norm of groups of mixers that read a sequence from its start,
such as Mamba-2, and the norm of all heads of attention.
"""

from crosscut.parallel.recurrent.convolution import ChannelParallelConvolution
from crosscut.parallel.recurrent.group_norm import GATE_FIRST, GATE_OF_HEADS, GatedGroupNorm, Gating
from crosscut.parallel.recurrent.heads_norm import HeadsNorm, normalise_heads

__all__ = [
    "GATE_FIRST",
    "GATE_OF_HEADS",
    "ChannelParallelConvolution",
    "GatedGroupNorm",
    "Gating",
    "HeadsNorm",
    "normalise_heads",
]
