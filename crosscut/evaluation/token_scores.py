"""Scores of each token of a text: the token's loss, and whether the model's likeliest prediction is this token.

This module computes the same loss as `parallel.cross_entropy`, but per token instead of as a sum, and without
gradients. Each rank computes the logits of its own part of the vocabulary, chunk by chunk, and never sends the logits.
Per token, four scalars are reduced across the ranks, in two messages.

Shapes: B batch, S sequence, N tokens, C tokens per chunk, H hidden, V padded vocabulary, T tensor ranks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.config import IGNORED
from crosscut.kernels.products import product_in
from crosscut.kernels.soft_cap import soft_cap_
from crosscut.model import GPT, Batch
from crosscut.model.stages import last_hidden_states
from crosscut.parallel import Axis, LossSettings
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.cross_entropy import local_index, loss_chunk, require_fit
from crosscut.parallel.distillation import VocabularyPart


class TokenScores(NamedTuple):
    """Scores of the target tokens."""

    losses: Tensor
    """Loss of each target, -log softmax(hidden weight^T)[target], in float32 or wider. 0 if the target is ignored."""
    hits: Tensor
    """Whether each target is the likeliest entry of the vocabulary. If several entries are equally likely, only the
    first of these entries counts as the likeliest. False if the target is ignored.
    """


@torch.no_grad()
def score_tokens(model: GPT, batch: Batch) -> TokenScores:
    """Score the targets [B, S] of a batch. The targets are the next tokens or, for a model that predicts masked tokens,
    the original tokens at the masked positions. The losses and hits have shape [B, S], and are the same on all tensor
    ranks. The batch needs a mask of padding only if attention is bidirectional, or if the padding is not at the ends of
    the sequences.

    Logits are computed only for targets that are not ignored. The sequences may have any length. In a pipeline, the
    tokens pass through all stages, and all losses and hits are 0 on all stages except the last. Communication: the
    messages of the forward pass and the collectives of `vocab_parallel_scores`.
    """
    targets = batch.targets
    assert targets is not None, "the batch has no targets"
    kept = targets != IGNORED
    found_hidden = last_hidden_states(model, batch)
    if found_hidden is None:
        wide = torch.promote_types(model.compute_dtype, torch.float32)
        return TokenScores(torch.zeros_like(targets, dtype=wide), torch.zeros_like(kept))
    hidden, weight, settings, _ = model.head.operands(found_hidden[kept])
    found = vocab_parallel_scores(
        hidden,
        weight,
        targets[kept],
        vocab_size=model.config.vocab_size,
        axis=model.mesh.tensor,
        settings=settings,
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
    settings: LossSettings,
) -> TokenScores:
    """Score `targets` [N] given the hidden states [N, H] that predict the targets. The losses and hits have shape [N],
    and are the same on all ranks.

    `hidden` must be the same on all ranks of the axis. `weight` [V/T, H] has this rank's rows of a vocabulary of
    `vocab_size` entries. Padding rows get no probability and are never the likeliest entry. `settings` gives the bias,
    the soft cap and the chunks of the logits; the other settings have no effect. Ignored targets take as much time as
    other targets, so leave them out if speed matters.

    Forward: per chunk, an all-reduce (max) of C elements and an all-reduce (sum) of 3 C elements. There is no backward
    pass. Source: paper, section 3. Raises the same errors as `vocab_parallel_cross_entropy`.
    """
    chunk = loss_chunk(settings.chunk_tokens, hidden, weight)
    require_fit(hidden, weight, targets, vocab_size, axis)
    part = VocabularyPart.of(axis, weight.shape[0], vocab_size)
    rows = weight.to(hidden.dtype)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    losses = torch.zeros(targets.shape, dtype=wide, device=hidden.device)
    hits = torch.zeros(targets.shape, dtype=torch.bool, device=hidden.device)
    buffer = torch.empty((min(chunk, hidden.shape[0]), rows.shape[0]), dtype=wide, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        piece = slice(start, start + chunk)
        logits = product_in(buffer, hidden[piece], rows)
        if logits.dtype != wide:
            logits = buffer[: logits.shape[0]].copy_(logits)  # the narrow logits are freed
        if settings.bias is not None:
            logits += settings.bias
        if settings.soft_cap:
            soft_cap_(logits, settings.soft_cap)
        losses[piece], hits[piece] = _scores_of_chunk(logits, targets[piece], part)
    return TokenScores(losses, hits)


def _scores_of_chunk(logits: Tensor, targets: Tensor, part: VocabularyPart) -> TokenScores:
    """Compute the scores [C] of the targets [C] from logits [C, V/T] in float32 or wider. The logits are
    overwritten.
    """
    logits[:, part.num_real :] = -torch.inf
    index, here = local_index(targets, part)
    target = logits.gather(1, index.unsqueeze(1)).squeeze(1)
    best, row = logits.max(1)  # in a tie, the first
    highest = all_reduce(best, part.axis, "max")
    earlier = (best == highest) & (part.first + row < targets)
    exponentials = logits.sub_(highest.unsqueeze(1)).exp_().sum(1)
    mine = torch.stack([exponentials, target.masked_fill(~here, 0.0), earlier.to(logits.dtype)])
    total, target, num_earlier = all_reduce(mine, part.axis).unbind()
    keep = targets != IGNORED
    losses = (total.log() + highest - target).masked_fill(~keep, 0.0)
    return TokenScores(losses, (target == highest) & (num_earlier == 0) & keep)
