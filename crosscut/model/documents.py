"""Context of a sequence's tokens: documents, segments and padding, and the attention mask that follows from them.

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

If several context ranks share a sequence, a rank's context describes only the rank's tokens. The attention mask then
needs the documents and the padding of the whole sequence, which the ranks gather once per forward pass.

Shapes: B batch, S sequence, C context ranks.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config.layout import ContextAttention
from crosscut.parallel import Axis
from crosscut.parallel.context import gather_tokens


class Documents(NamedTuple):
    """Documents of packed sequences. Both tensors are [B, S]."""

    numbers: Tensor
    """Number of the document to which each token belongs, counted from the start of the sequence."""
    positions: Tensor
    """Position of each token in its document, from 0."""


class Context(NamedTuple):
    """Information about the tokens of sequences besides their ids. Tensors are [B, S] unless another shape is given;
    None means that the information is not given.
    """

    documents: Documents | None = None
    """Documents that do not see each other. None means that each sequence is one document."""
    segments: Tensor | None = None
    """Type of each token, such as the number of its sentence. None means that all tokens have type 0."""
    mask: Tensor | None = None
    """Whether each token may be attended to; false for padding. None means that there is no padding."""
    predicted: Tensor | None = None
    """Indexes [N] of the tokens whose logits are computed, in the flattened batch. None means all tokens. Only models
    that predict masked tokens use this tensor."""
    order: Tensor | None = None
    """Order of the segments of each sequence [B]: 0 if they are in their original order, 1 if they are swapped,
    `IGNORED` if the sequence has no order to predict. None means that the order is not predicted."""
    labels: Tensor | None = None
    """Labels of a model that solves a task (`Batch.labels`). None means that no labels are given."""
    places: Tensor | None = None
    """Indexes of this rank's tokens in the whole sequences, if several context ranks share the sequences
    (`Batch.places`). None means that the sequences are whole."""

    def padded(self, num_filled: int, like: Tensor) -> "Context":
        """Return the context of the same sequences after `num_filled` padding tokens are appended to each of them.
        `like` [B, S] holds the tokens without this padding.
        """
        if not num_filled:
            return self
        mask = torch.ones_like(like, dtype=torch.bool) if self.mask is None else self.mask
        end = (0, num_filled)
        return self._replace(
            documents=None if self.documents is None else Documents(*(F.pad(each, end) for each in self.documents)),
            segments=None if self.segments is None else F.pad(self.segments, end),
            mask=F.pad(mask, end),
        )


NO_CONTEXT = Context()
"""Context of sequences that have no padding, each with one document and one token type."""


class AttentionMask(NamedTuple):
    """Attention mask, and whether several ranks share the sequences. All layers use the same mask.

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


def find_documents(tokens: Tensor, *, end_of_text: int) -> Documents:
    """Find the documents in `tokens` [B, S]. `end_of_text` is the id of the end-of-text token. A document begins at the
    first token of each sequence and at each end-of-text token.
    """
    starts = tokens == end_of_text
    places = torch.arange(tokens.shape[1], device=tokens.device)
    first = (places * starts).cummax(1).values  # start of each token's document
    return Documents(numbers=starts.cumsum(1), positions=places - first)


def attention_mask(
    context: Context, dtype: torch.dtype, *, is_causal: bool, queries: Tensor | None = None
) -> AttentionMask | None:
    """Make the attention mask. A token may see the tokens of its document that are not padding. `is_causal` restricts
    this to the token itself and earlier tokens. Returns None if the context has neither documents nor padding.

    `queries` [Q] are the indexes of the queries in their sequences; None means that all tokens are queries.

    The mask has the type `dtype`, which must be the type of the queries. With documents, its memory grows with S
    squared, but does not depend on the number of layers or heads. In a sequence without any real token, and for a query
    whose keys are all padding, every key is visible: the output of attention is not used there, but must be finite.
    """
    if context.documents is None and context.mask is None:
        return None
    parts = [] if context.mask is None else [context.mask.unsqueeze(1)]
    if context.documents is not None:
        numbers = context.documents.numbers
        own = numbers if queries is None else numbers[:, queries]
        parts.append(own.unsqueeze(2) == numbers.unsqueeze(1))
    shown = parts[0] if len(parts) == 1 else parts[0] & parts[1]
    if is_causal and queries is None:
        shown = shown.expand(-1, shown.shape[-1], -1).tril()
    elif is_causal and queries is not None:
        shown = shown & _earlier(queries, shown.shape[-1])
    hidden = ~shown & shown.any(-1, keepdim=True)
    return AttentionMask(_added(hidden, dtype).unsqueeze(1))


def shared_mask(
    context: Context, dtype: torch.dtype, *, is_causal: bool, axis: Axis, way: ContextAttention
) -> AttentionMask:
    """Make the attention mask for sequences that the ranks of `axis` share. `context` describes this rank's tokens.

    For `all_to_all`, the queries are all tokens; otherwise, the queries are this rank's tokens. The keys are always all
    tokens, in the order of the sequence. Communication: with documents, an all-gather of their numbers [B, S]; with
    padding, an all-gather of the mask.
    """
    assert context.places is not None
    queries = None if way is ContextAttention.ALL_TO_ALL else context.places
    documents = context.documents
    whole = context._replace(
        documents=None if documents is None else Documents(gather_tokens(documents.numbers, axis), documents.positions),
        mask=None if context.mask is None else gather_tokens(context.mask, axis),
    )
    mask = attention_mask(whole, dtype, is_causal=is_causal, queries=queries)
    if mask is not None:
        return AttentionMask(mask.added, is_shared=True)
    if way is not ContextAttention.GATHER or not is_causal:
        return AttentionMask(None, is_shared=True)
    earlier = _earlier(context.places, len(context.places) * axis.size)
    return AttentionMask(_added(~earlier, dtype).view(1, 1, *earlier.shape), is_shared=True)


def _earlier(queries: Tensor, num_keys: int) -> Tensor:
    """Return a mask [Q, S] that is true where the key's index in the sequence is at most the query's index."""
    return torch.arange(num_keys, device=queries.device) <= queries.unsqueeze(1)


def _added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor with minus infinity where a key is hidden, and 0 elsewhere."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
