"""Table from the description of a head to its class."""

from collections.abc import Callable
from typing import Any

from crosscut.architecture.sublayers.heads import head as described
from crosscut.architecture.sublayers.heads import masked_head, next_token_head, spans_head, summary_heads
from crosscut.model.heads.head import Head, HeadBuilder
from crosscut.model.heads.masked_head import MaskedHead
from crosscut.model.heads.next_token_head import NextTokenHead
from crosscut.model.heads.spans_head import SpansHead
from crosscut.model.heads.summary_heads import ChoosingHead, NumberHead

HEADS: dict[type, Callable[[Any, HeadBuilder], Head[Any]]] = {
    next_token_head.NextTokenHead: NextTokenHead,
    masked_head.MaskedHead: MaskedHead,
    summary_heads.ClassesHead: ChoosingHead,
    summary_heads.NumberHead: NumberHead,
    summary_heads.ChoiceHead: ChoosingHead,
    spans_head.SpansHead: SpansHead,
}
"""Class of each kind of head, by the class that describes it in `architecture`."""


def build_head(part: described.Head, builder: HeadBuilder) -> Head[Any]:
    """Build the head that `part` describes."""
    return HEADS[type(part)](part, builder)
