"""Scores of each token of a text: its loss, and whether it is the token that the model finds likeliest.

The scoring twin of `parallel.cross_entropy`: no gradients, and one result per token in place of their sum. Each rank
keeps the logits of its part of the vocabulary to itself, chunk by chunk; per token four scalars cross the wire, in two
messages.

Shapes: B batch, S sequence, N tokens, C tokens of a chunk, H hidden, V padded vocabulary, T tensor ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.config import IGNORED, default_loss_chunk
from crosscut.config.checks import require_at_least
from crosscut.kernels.products import product_in
from crosscut.model import GPT
from crosscut.parallel import Axis, local
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.cross_entropy import VocabularyPart, local_index, require_fit, vocabulary_part


class TokenScores(NamedTuple):
    """The scores of some target tokens."""

    losses: Tensor
    """-log softmax(hidden weight^T)[target] of each, in float32 or wider; 0 where the target is ignored."""
    hits: Tensor
    """Whether the target is the likeliest entry of all, of equally likely ones the first; False where it is ignored."""


@torch.no_grad()
def score_tokens(model: GPT, tokens: Tensor, targets: Tensor) -> TokenScores:
    """Loss and hit of each of `targets` [B, S] given `tokens` [B, S]: [B, S] each, the same on all tensor ranks.

    Only the hidden states of targets that are not ignored meet the vocabulary. Any length will do. Communication: that
    of the forward pass and of `vocab_parallel_scores`.
    """
    kept = targets != IGNORED
    hidden = model.hidden_states(tokens)
    found = vocab_parallel_scores(
        hidden[kept],
        local(model.output_weight, hidden.dtype),
        targets[kept],
        vocab_size=model.config.vocab_size,
        axis=model.mesh.tensor,
    )
    losses = found.losses.new_zeros(targets.shape).masked_scatter_(kept, found.losses)
    return TokenScores(losses, torch.zeros_like(kept).masked_scatter_(kept, found.hits))


@torch.no_grad()
def vocab_parallel_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    axis: Axis,
    chunk_tokens: int | None = None,
) -> TokenScores:
    """Score `targets` [N] given the hidden states [N, H] that are to predict them: [N] each, the same on all ranks.

    `hidden` is the same on all ranks of the axis, `weight` [V/T, H] this rank's rows; rows from `vocab_size` on take no
    probability and win nothing. Ignored targets cost as much as others: leave them out where that matters.

    Forward: per chunk an all-reduce (max) of C elements and one (sum) of 3 C. No backward. Source: paper, section 3.
    Raises as `vocab_parallel_cross_entropy`.
    """
    chunk = chunk_tokens
    if chunk is None:
        chunk = default_loss_chunk(weight.shape[0], hidden.shape[0], device=hidden.device.type)
    require_at_least("chunk_tokens", chunk, 1)
    require_fit(hidden, weight, targets, vocab_size, axis)
    part = vocabulary_part(weight, vocab_size, axis)
    rows = weight.to(hidden.dtype)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    losses = torch.zeros(targets.shape, dtype=wide, device=hidden.device)
    hits = torch.zeros(targets.shape, dtype=torch.bool, device=hidden.device)
    buffer = torch.empty((min(chunk, hidden.shape[0]), rows.shape[0]), dtype=wide, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        piece = slice(start, start + chunk)
        logits = product_in(buffer, hidden[piece], rows)
        if logits.dtype != wide:
            logits = buffer[: logits.shape[0]].copy_(logits)  # and the narrow ones are gone
        losses[piece], hits[piece] = _scores_of_chunk(logits, targets[piece], part)
    return TokenScores(losses, hits)


def _scores_of_chunk(logits: Tensor, targets: Tensor, part: VocabularyPart) -> TokenScores:
    """Scores [C] of the targets [C] from float32 or wider logits [C, V/T], which are overwritten."""
    logits[:, part.num_real :] = -torch.inf
    index, here = local_index(targets, part)
    target = logits.gather(1, index.unsqueeze(1)).squeeze(1)
    best, row = logits.max(1)  # of equal ones the first
    highest = all_reduce(best, part.axis, "max")
    earlier = (best == highest) & (part.first + row < targets)
    exponentials = logits.sub_(highest.unsqueeze(1)).exp_().sum(1)
    mine = torch.stack([exponentials, target.masked_fill(~here, 0.0), earlier.to(logits.dtype)])
    total, target, num_earlier = all_reduce(mine, part.axis).unbind()
    keep = targets != IGNORED
    losses = (total.log() + highest - target).masked_fill(~keep, 0.0)
    return TokenScores(losses, (target == highest) & (num_earlier == 0) & keep)
