"""Needs of a sublayer besides the residual stream: tensors that all layers share, and tensors that generation keeps of
earlier tokens, so that a model continues a text without reading it again.
"""

from dataclasses import dataclass
from enum import Enum


class Share(Enum):
    """Tensor that all layers of a forward pass share."""

    ROTATION = "cosines and sines of the positions"
    MASK = "tokens that each token may see"
    WINDOW_ROTATION = "cosines and sines of the positions in layers with a sliding window"
    WINDOW_MASK = "tokens that each token may see through a sliding window"
    DOCUMENTS = "number of the document of each token"
    REAL_TOKENS = "tokens that are not padding"


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


@dataclass(frozen=True)
class Fixed:
    """A tensor [rows, *`shape`] on one rank, in which generation keeps the same number of elements of each row, such as
    a state, however many tokens the row has read. A part can only continue or forget what the tensor holds.
    """

    name: str
    shape: tuple[int, ...]
    is_wide: bool = False
    """Whether the tensor is at least float32, whatever the type of the activations is."""


Memory = PerToken | Fixed
"""A tensor that generation keeps."""
