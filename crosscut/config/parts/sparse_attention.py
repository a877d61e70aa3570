"""Settings of attention with a block mask, the kind `sparse_attention`."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from crosscut.config.checks import MOST, require_at_least
from crosscut.config.parts.section import MixerSection

_BLOCKS = 8
"""Minimum number of blocks of the shortened sequences of `in_length`."""


@dataclass(frozen=True, kw_only=True)
class SparseAttentionConfig(MixerSection):
    """Attention of the kind `sparse_attention`, in which a block of tokens attends to some blocks only: those near it,
    the first ones, and every n-th one (Child et al. 2019, arXiv 1904.10509; Zaheer et al. 2020, arXiv 2007.14062). Only
    a model with `sparse_attention` in `model.layers` uses this section. All other settings are those of `attention`,
    except that no attention weights are dropped.
    """

    why_whole: ClassVar[str] = "blocks are counted from the start of the sequence"

    block_size: int = 64
    """Number of tokens of a block. The last block of a sequence may be shorter."""

    window: int = 4
    """Number of blocks of the window: a block attends to itself and to the `window` - 1 blocks before it. In
    bidirectional attention, it also attends to as many blocks after it."""

    global_blocks: int = 1
    """Number of blocks at the start of a sequence to which all blocks attend. In bidirectional attention, these blocks
    also attend to all blocks."""

    stride: int = 0
    """If above 0, all blocks also attend to every `stride`-th block: the last one of each `stride` blocks, as in the
    fixed pattern of Child et al."""

    def __post_init__(self) -> None:
        for name, least in (("block_size", 1), ("window", 1), ("global_blocks", 0), ("stride", 0)):
            require_at_least(f"model.sparse_attention.{name}", getattr(self, name), least, maximum=MOST)

    def in_length(self, length: int) -> Self:
        """Return the settings with blocks that are short enough to hide tokens in sequences of `length` tokens."""
        return replace(self, block_size=min(self.block_size, max(length // _BLOCKS, 1)))


SPARSE_ATTENTION = SparseAttentionConfig()
"""Defaults of the section [model.sparse_attention]."""
