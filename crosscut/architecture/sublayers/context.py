"""Messages of attention between context ranks that share the sequences, in one layer and one micro-batch.

| way          | forward                               | backward                                              |
|--------------|---------------------------------------|-------------------------------------------------------|
| `gather`     | all-gather of keys and values         | reduce-scatter of their gradients                     |
| `all_to_all` | queries, keys and values; the results | gradients of the results; of queries, keys and values |
| `ring`       | C - 1 shifts of keys and values       | C - 1 shifts of keys and values, C of their gradients |

In latent attention, `gather` sends nothing here: the latent vectors are gathered before keys and values are computed.

Legend: `C` context ranks.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from crosscut.architecture.steps import Message, Operation, Overlap, Rows, Step, Value
from crosscut.architecture.target import Kind, Target
from crosscut.config.layout import ContextAttention

if TYPE_CHECKING:
    from crosscut.architecture.sublayers.attention import Core

Messages = tuple[Message, ...]


def context_messages(attention: "Core", target: Target) -> tuple[Messages, Messages]:
    """Messages of the forward pass, and of the backward pass, each in the order in which they are sent."""
    heads, kv_heads = target.own_heads(attention.num_heads), target.own_heads(attention.num_kv_heads)
    of_a_head = target.tokens * attention.padded_size
    both = 2 * kv_heads * of_a_head
    if target.way is ContextAttention.RING:
        others = target.context - 1
        keys, sums = _shifts(both, others), _shifts(both, others, Kind.WIDE)
        last = replace(sums, count=1, overlap=Overlap.NOTHING)
        return (keys,), (keys, sums, last)
    if target.way is ContextAttention.ALL_TO_ALL:
        sent = sum(exchanged_heads(attention, target)) * of_a_head, heads * target.tokens * attention.value_size
        entering, leaving = (Message(Operation.ALL_TO_ALL, elements, axis="context") for elements in sent)
        return (entering, leaving), (leaving, entering)
    if not attention.gathers:
        return (), ()
    gathered = 2 * kv_heads * target.shared_tokens * attention.head_size
    gather = Message(Operation.ALL_GATHER, gathered, axis="context")
    return (gather,), (Message(Operation.REDUCE_SCATTER, gathered, axis="context"),)


def exchanged_heads(attention: "Core", target: Target) -> tuple[int, int, int]:
    """Numbers of query heads, key heads and value heads that a rank sends in an all-to-all. Before the all-to-all, the
    rank has these heads for its own tokens. Afterwards, it has fewer heads, but for all tokens.
    """
    heads, kv_heads = target.own_heads(attention.num_heads), target.own_heads(attention.num_kv_heads)
    repeated = kv_heads * target.repeats_of_heads(heads, kv_heads)
    return heads, repeated, repeated


def _shifts(elements: int, count: int, kind: Kind = Kind.COMPUTE) -> Message:
    """Messages that arrive while the rank attends to an earlier block."""
    return Message(Operation.SHIFT, elements, Overlap.BLOCK, axis="context", kind=kind, count=count)


@dataclass(frozen=True, kw_only=True)
class OverContext(Step):
    """Message between context ranks, if they share the sequences; otherwise nothing."""

    there: Operation = Operation.ALL_TO_ALL
    back: Operation = Operation.ALL_TO_ALL
    """Operation of the forward pass, and of the backward pass."""

    def on(self, target: Target) -> Step:
        """Return the step with its messages."""
        if target.way is None:
            return self
        forward, backward = (Message(each, self.elements(target), axis="context") for each in (self.there, self.back))
        return replace(self, forward=(forward,), backward=(backward,))

    def elements(self, target: Target) -> int:
        """Number of elements of a message: those of the larger side."""
        return max(value.elements(target) for value in (*self.reads, *self.gives))


def over_context(
    x: Value,
    name: str,
    there: Operation = Operation.ALL_TO_ALL,
    back: Operation = Operation.ALL_TO_ALL,
    *,
    gives: Rows = Rows.TOKENS,
) -> tuple[Value, Step]:
    """Describe a message between context ranks. Return the value after it, and the step."""
    y = replace(x, name=f"{x.name}, over context", rows=gives)
    return y, OverContext(reads=(x,), gives=(y,), name=name, there=there, back=back)
