"""Documents that do not see each other in a packed sequence: no token attends to another document, and positions
restart at each document.

A packed sequence is a stretch of documents that are laid end to end, each followed by the end-of-text token. An
end-of-text token is the last *target* of its document and the first token that is *read* of the next document:

    read       c  d  <|endoftext|>  e  f  <|endoftext|>  g
    target     d  <|endoftext|>  e  f  <|endoftext|>  g  h
    document   0  0  1              1  1  2              2
    position   0  1  0              1  2  0              1

Every target is therefore predicted from its own document only, and the first token of a document is predicted from the
end-of-text token alone, as when a model writes a text without a prompt.

Shapes: B batch, S sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """Documents of packed sequences. Both tensors are [B, S]."""

    numbers: Tensor
    """Number of the document to which each token belongs, counted from the start of the sequence."""
    positions: Tensor
    """Position of each token in its document, from 0."""


class AttentionMask(NamedTuple):
    """Mask of attention, shared by all layers.

    The mask is inside a tuple so that `training.offload` does not offload it again with the input of every layer.
    """

    added: Tensor
    """Term that is added to the scores, [B, 1, S, S]: 0 where a query (dimension 2) may see a key (dimension 3), and
    minus infinity elsewhere.
    """


def find_documents(tokens: Tensor, *, end_of_text: int) -> Documents:
    """Find the documents in `tokens` [B, S]. `end_of_text` is the id of the end-of-text token. A document begins at the
    first token of each sequence and at each end-of-text token.
    """
    starts = tokens == end_of_text
    places = torch.arange(tokens.shape[1], device=tokens.device)
    first = (places * starts).cummax(1).values  # start of each token's document
    return Documents(numbers=starts.cumsum(1), positions=places - first)


def causal_mask(documents: Tensor, dtype: torch.dtype) -> AttentionMask:
    """Make the mask under which a token sees itself and the earlier tokens of its document.

    `documents` [B, S] are the numbers of the tokens' documents. The mask has the type `dtype`, which must be the type
    of the queries. Its memory grows with S squared, but does not depend on the number of layers or heads.
    """
    hidden = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril_().logical_not_()
    added = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return AttentionMask(added.unsqueeze(1))
