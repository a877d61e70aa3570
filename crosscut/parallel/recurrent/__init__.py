"""Parallel layers of mixers that read a sequence from its start, such as Mamba-2: convolution and norm of groups."""

from crosscut.parallel.recurrent.convolution import ChannelParallelConvolution
from crosscut.parallel.recurrent.group_norm import GatedGroupNorm

__all__ = ["ChannelParallelConvolution", "GatedGroupNorm"]
