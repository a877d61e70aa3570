"""Context parallelism: the ranks along one axis share each sequence, and attention is over the whole sequence.

- `zigzag`: how the sequence is divided over the ranks
- `operators`: attention with gathered keys and values, or with heads exchanged for tokens
- `ring`: attention with keys and values that travel around the ranks
"""

from crosscut.parallel.context.operators import enter_context, gather_tokens, leave_context
from crosscut.parallel.context.ring import ring_attention
from crosscut.parallel.context.zigzag import join_zigzag, split_zigzag

__all__ = ["enter_context", "gather_tokens", "join_zigzag", "leave_context", "ring_attention", "split_zigzag"]
