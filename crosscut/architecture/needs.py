"""Needs of a sublayer besides the residual stream: tensors that all layers share, and tensors that generation keeps of
earlier tokens, so that a model continues a text without reading it again.
"""

from dataclasses import dataclass
from enum import Enum


class Share(Enum):
    """Tensor that all layers of a forward pass share."""

    ROTATION = "cosines and sines of the positions"
    MASK = "tokens that each token may see"


@dataclass(frozen=True)
class PerToken:
    """A tensor [rows, `before`, tokens, `width`] on one rank, in which generation keeps a value of each token of each
    row. A row is a text.
    """

    name: str
    before: int
    """Size of the dimension before the tokens, such as a number of heads."""
    width: int
    """Size of the dimension after the tokens."""
