"""Documents of packed sequences, and the attention mask that follows from documents and padding.

Documents in a packed sequence do not see each other: no token attends to another document, and positions restart at
each document.

A packed sequence is a section of a list of documents, each followed by the end-of-text token. An end-of-text token is
the last *target* of its document and the first token that is *read* in the next document:

    read       c  d  <|endoftext|>  e  f  <|endoftext|>  g
    target     d  <|endoftext|>  e  f  <|endoftext|>  g  h
    document   0  0  1              1  1  2              2
    position   0  1  0              1  2  0              1

Every target is therefore predicted from its own document only, and the first token of a document is predicted from the
end-of-text token alone, as when a model writes a text without a prompt.

If several context ranks share a sequence, a rank's batch describes only the rank's tokens. The attention mask then
needs the documents and the padding of the whole sequence, which the ranks gather once per forward pass.

Shapes: B batch, S sequence, C context ranks.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.architecture.inputs import Inputs
from crosscut.config.layout import ContextAttention
from crosscut.parallel import Axis
from crosscut.parallel.context import gather_tokens


class Documents(NamedTuple):
    """Documents of packed sequences. Both tensors are [B, S]."""

    numbers: Tensor
    """Number of the document to which each token belongs, counted from the start of the sequence."""
    positions: Tensor
    """Position of each token in its document, from 0."""


class AttentionMask(NamedTuple):
    """Attention mask, and whether several ranks share the sequences. All layers without a window use the same
    mask, and so do all layers with one.

    The mask is inside a tuple so that `training.offload` does not offload it again with the input of every layer.
    """

    added: Tensor | None
    """Term that is added to the scores: 0 where a query (dimension 2) may see a key (dimension 3), and minus infinity
    elsewhere. The shape is [B, 1, S, S], or [B, 1, 1, S] if all queries of a sequence see the same keys. With context
    ranks, the queries may be those of the rank's own tokens. None if attention needs no mask, because only causality
    hides keys.
    """
    is_shared: bool = False
    """Whether several context ranks share the sequences."""


class DocumentNumbers(NamedTuple):
    """Documents of the tokens, and whether several ranks share the sequences."""

    numbers: Tensor | None
    """Number of the document of each token of the whole sequences: [B, S]. None means one document."""
    is_shared: bool = False
    """Whether several context ranks share the sequences."""


class RealTokens(NamedTuple):
    """Tokens that are not padding, and whether several ranks share the sequences."""

    mask: Tensor | None = None
    """Whether each token of the whole sequences is not padding: [B, S]. None means that all tokens are real."""
    is_shared: bool = False
    """Whether several context ranks share the sequences."""


def document_numbers(own: Tensor | None, axis: Axis | None) -> DocumentNumbers:
    """Return the numbers of the documents, from the numbers `own` of this rank's tokens: [B, S/C], or None for one
    document. `axis` is None if no ranks share the sequences.

    Communication: if ranks share the sequences and have documents, an all-gather of their numbers.
    """
    is_shared = axis is not None
    return DocumentNumbers(own if own is None or axis is None else gather_tokens(own, axis), is_shared)


def real_tokens(own: Tensor | None, axis: Axis | None) -> RealTokens:
    """Return the tokens that are not padding, from those `own` of this rank: [B, S/C], or None without padding. `axis`
    is None if no ranks share the sequences.

    Communication: if ranks share the sequences and have padding, an all-gather of its mask.
    """
    is_shared = axis is not None
    return RealTokens(own if own is None or axis is None else gather_tokens(own, axis), is_shared)


def find_documents(tokens: Tensor, *, end_of_text: int) -> Documents:
    """Find the documents in `tokens` [B, S]. `end_of_text` is the id of the end-of-text token. A document begins at the
    first token of each sequence and at each end-of-text token.
    """
    starts = tokens == end_of_text
    places = torch.arange(tokens.shape[1], device=tokens.device)
    first = (places * starts).cummax(1).values  # start of each token's document
    return Documents(numbers=starts.cumsum(1), positions=places - first)


def attention_mask(
    batch: Inputs[Tensor], dtype: torch.dtype, *, is_causal: bool, queries: Tensor | None = None, window: int = 0
) -> AttentionMask | None:
    """Make the attention mask. A token may see the tokens of its document that are not padding. `is_causal` restricts
    this to the token itself and earlier tokens, and a `window` above 0 to the last `window` of these. Returns None if
    the batch has neither documents nor padding, and no window or context ranks (`shared_mask`).

    `queries` [Q] are the indexes of the queries in their sequences; None means that all tokens are queries.

    The mask has the type `dtype`, which must be the type of the queries. With documents, its memory grows with S
    squared, but does not depend on the number of layers or heads. In a sequence without any real token, and for a query
    whose keys are all padding, every key is visible: the output of attention is not used there, but must be finite.
    """
    if batch.documents is None and batch.mask is None:
        if not window or batch.places is not None:
            return None
        places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        return _later_hidden(places, len(places), window, dtype)
    parts = [] if batch.mask is None else [batch.mask.unsqueeze(1)]
    if (numbers := batch.documents) is not None:
        own = numbers if queries is None else numbers[:, queries]
        parts.append(own.unsqueeze(2) == numbers.unsqueeze(1))
    shown = parts[0] if len(parts) == 1 else parts[0] & parts[1]
    if is_causal and queries is None:
        shown = shown.expand(-1, shown.shape[-1], -1).tril()
        shown = shown.triu(1 - window) if window else shown
    elif is_causal and queries is not None:
        shown = shown & _earlier(queries, shown.shape[-1], window)
    hidden = ~shown & shown.any(-1, keepdim=True)
    return AttentionMask(_added(hidden, dtype).unsqueeze(1))


def shared_mask(
    batch: Inputs[Tensor], dtype: torch.dtype, *, is_causal: bool, axis: Axis, way: ContextAttention, window: int = 0
) -> AttentionMask:
    """Make the attention mask for sequences that the ranks of `axis` share. `batch` has this rank's tokens, but the
    documents of the whole sequences. A `window` above 0 is that of a sliding window.

    For `all_to_all`, the queries are all tokens; otherwise, the queries are this rank's tokens. The keys are always all
    tokens, in the order of the sequence. Communication: with padding, an all-gather of its mask.
    """
    assert batch.places is not None
    queries = None if way is ContextAttention.ALL_TO_ALL else batch.places
    whole = replace(batch, mask=None if batch.mask is None else gather_tokens(batch.mask, axis))
    mask = attention_mask(whole, dtype, is_causal=is_causal, queries=queries, window=window)
    if mask is None and is_causal and (way is ContextAttention.GATHER or window):
        length = len(batch.places) * axis.size
        places = torch.arange(length, device=batch.places.device) if queries is None else queries
        mask = _later_hidden(places, length, window, dtype)
    return AttentionMask(None if mask is None else mask.added, is_shared=True)


def _later_hidden(queries: Tensor, num_keys: int, window: int, dtype: torch.dtype) -> AttentionMask:
    """Return the mask [1, 1, Q, S] of causal attention without documents and padding."""
    earlier = _earlier(queries, num_keys, window)
    return AttentionMask(_added(~earlier, dtype).view(1, 1, *earlier.shape))


def _earlier(queries: Tensor, num_keys: int, window: int) -> Tensor:
    """Return a mask [Q, S] that is true where the key's index in the sequence is at most the query's index and, with a
    `window` above 0, above the query's index less the window.
    """
    keys, queries = torch.arange(num_keys, device=queries.device), queries.unsqueeze(1)
    return (keys <= queries) & (keys > queries - window) if window else keys <= queries


def _added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor with minus infinity where a key is hidden, and 0 elsewhere."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
