"""Block mask of sparse attention: the blocks of tokens to which each block attends.

    window 2, causal      and 1 global block      and every 4th block

    x . . . . . . .       x . . . . . . .         x . . . . . . .
    x x . . . . . .       x x . . . . . .         x x . . . . . .
    . x x . . . . .       x x x . . . . .         x x x . . . . .
    . . x x . . . .       x . x x . . . .         x . x x . . . .
    . . . x x . . .       x . . x x . . .         x . . x x . . .
    . . . . x x . .       x . . . x x . .         x . . x x x . .
    . . . . . x x .       x . . . . x x .         x . . x . x x .
    . . . . . . x x       x . . . . . x x         x . . x . . x x

A row has the queries of a block, a column the keys. Blocks whose queries see equally many keys form groups, so that one
call of a dense kernel computes a group. Only the marked blocks are computed: the planner counts these, and the kernel
reads the same groups.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

_MOST = 2
"""Maximum number of blocks of keys that a group gathers, as a multiple of those of the sequence."""


class BlockGroup(NamedTuple):
    """Blocks of queries that see equally many blocks of keys."""

    queries: tuple[int, ...]
    """Indexes of the blocks of queries."""
    keys: tuple[int, ...]
    """Indexes of the blocks of keys that each block of queries sees, one after the other, in ascending order. In causal
    attention, the last one is the block of the queries."""

    @property
    def num_keys(self) -> int:
        """Number of blocks of keys that each block of queries sees."""
        return len(self.keys) // len(self.queries)


@dataclass(frozen=True)
class BlockMask:
    """Blocks of `block_size` tokens to which each block attends (`SparseAttentionConfig`)."""

    block_size: int
    window: int
    global_blocks: int
    stride: int
    is_causal: bool

    def num_blocks(self, length: int) -> int:
        """Number of blocks of a sequence of `length` tokens. The last block may be shorter."""
        return -(-length // self.block_size)

    def keys_of(self, block: int, num_blocks: int) -> tuple[int, ...]:
        """Return the indexes of the blocks that a block sees, in ascending order."""
        if not self.is_causal and block < self.global_blocks:
            return tuple(range(num_blocks))
        end = block + 1 if self.is_causal else num_blocks
        near = range(max(block - self.window + 1, 0), min(block + self.window, end))
        strided = range(self.stride - 1, end, self.stride) if self.stride else ()
        return tuple(sorted({*range(min(self.global_blocks, end)), *strided, *near}))

    def groups(self, length: int) -> tuple[BlockGroup, ...]:
        """Return the groups of a sequence of `length` tokens. Each block of queries is in one group."""
        return _groups(self, self.num_blocks(length))

    def num_pairs(self, length: int) -> int:
        """Number of pairs of a block of queries and a block of keys that are computed."""
        return sum(len(group.keys) for group in self.groups(length))


@lru_cache(maxsize=256)
def _groups(mask: BlockMask, num_blocks: int) -> tuple[BlockGroup, ...]:
    rows: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for block in range(num_blocks):
        keys = mask.keys_of(block, num_blocks)
        rows[len(keys)].append((block, keys))
    found = []
    for num_keys, group in rows.items():
        step = max(_MOST * num_blocks // num_keys, 1)
        for start in range(0, len(group), step):
            part = group[start : start + step]
            found.append(BlockGroup(tuple(i for i, _ in part), tuple(key for _, keys in part for key in keys)))
    return tuple(found)
