"""Tensors that all layers of a forward pass read, besides the residual stream."""

from typing import NamedTuple

from crosscut.model.documents import AttentionMask, DocumentNumbers, RealTokens
from crosscut.model.sublayers.rotary import Rotation


class Shared(NamedTuple):
    """Tensors that all layers read. A sublayer uses those that it needs."""

    rotation: Rotation | None = None
    """Cosines and sines of the positions, which rotate queries and keys. None for a model without rotary
    positions."""
    mask: AttentionMask | None = None
    """Tokens that each token may see. None if a token sees all tokens, or all earlier tokens."""
    window_rotation: Rotation | None = None
    """Cosines and sines for layers with a sliding window whose frequencies differ from those of other layers."""
    window_mask: AttentionMask | None = None
    """Tokens that each token may see through a sliding window. None as for `mask`."""
    real: RealTokens | None = None
    """Tokens that are not padding. None if no layer reads them, or if generation continues texts."""
    documents: DocumentNumbers | None = None
    """Numbers of the tokens' documents. None if no layer reads them, or if generation continues texts."""


NOTHING_SHARED = Shared()
"""No shared tensors."""
