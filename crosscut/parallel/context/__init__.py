"""Context parallelism: the ranks along one axis share each sequence, and every token still attends to the whole
sequence.

- `zigzag`: division of the sequence over the ranks
- `operators`: attention for which the ranks gather keys and values, or exchange heads for tokens
- `preceding`: the last tokens before each piece of the sequence, for causal convolutions
- `ring`: attention in which keys and values travel around the ranks
"""

from crosscut.parallel.context.operators import enter_context, gather_tokens, leave_context
from crosscut.parallel.context.preceding import preceded_pieces
from crosscut.parallel.context.ring import ring_attention
from crosscut.parallel.context.zigzag import join_zigzag, split_zigzag

__all__ = [
    "enter_context",
    "gather_tokens",
    "join_zigzag",
    "leave_context",
    "preceded_pieces",
    "ring_attention",
    "split_zigzag",
]
