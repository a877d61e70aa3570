"""The output projection fused with the cross entropy, over a vocabulary cut into parts.

Each rank multiplies by its part of the embedding and keeps its logits to itself. Per token, one scalar of each kind
crosses the wire: the maximum, then the sum of exponentials and the target's logit together, so the loss sends 3 B S
elements where gathering the logits would send B S V (paper, section 3).

It works through the tokens in chunks and computes the gradients of a chunk while its logits are there, so the logits of
all tokens never live at once and are never computed twice. With p = softmax(x W^T) and one-hot target e:

    loss = -log p[target]        d loss / d logits = p - e

Shapes: N tokens, C tokens of a chunk, H hidden, V padded vocabulary, T tensor ranks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.config import IGNORED, LayoutError, default_loss_chunk
from crosscut.config.checks import require_at_least
from crosscut.kernels.loss_passes import LossPasses, error_into, log_softmax_
from crosscut.kernels.products import ORDINARY, add_product, multiply_into, product_in
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.mesh import Axis


class VocabularyPart(NamedTuple):
    """The part of the vocabulary that a rank holds."""

    axis: Axis
    first: int
    """The token id of its first row."""
    num_real: int
    """Its rows that are not padding."""


class _Plan(NamedTuple):
    """Plan for computing the loss: scale, chunks, gradients and kernels."""

    scale: float | Tensor
    chunk: int
    """Number of tokens whose logits are in memory at once."""
    needs_grad: bool
    passes: LossPasses | None
    """Compiled passes over the logits; None for passes in place."""


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    axis: Axis,
    scale: float | Tensor = 1.0,
    chunk_tokens: int | None = None,
    passes: LossPasses | None = None,
) -> Tensor:
    """`scale` times the sum over all tokens of -log softmax(hidden weight^T)[target], as a float32 scalar.

    `hidden` [N, H] is the same on all ranks of the axis and must come through f (or the gather of the sequence), since
    its gradient here is this rank's part. `weight` [V/T, H] is this rank's rows, also as a wider type than `hidden`;
    rows from `vocab_size` on take no probability. `targets` [N], `IGNORED` ones add nothing. `scale` is a number or a
    scalar tensor on the same device. (float64 gives a float64 scalar.) With `passes` what goes over the logits is
    compiled.

    Forward: per chunk an all-reduce (max) of C elements and one (sum) of 2 C. Backward: nothing is sent.
    Source: paper, section 3. Raises `LayoutError` when the shapes do not fit each other, `ConfigError` when
    `chunk_tokens` is below 1, and `RuntimeError` on a target that is not below `vocab_size` (on CUDA when the device
    gets there).
    """
    local_size = weight.shape[0]
    chunk = chunk_tokens
    if chunk is None:
        chunk = default_loss_chunk(local_size, hidden.shape[0], device=hidden.device.type)
    require_at_least("chunk_tokens", chunk, 1)
    require_fit(hidden, weight, targets, vocab_size, axis)
    part = vocabulary_part(weight, vocab_size, axis)
    # A function's own view of what needs a gradient does not know of `torch.no_grad`.
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss: Tensor = _ProjectAndCompare.apply(hidden, weight, targets, part, _Plan(scale, chunk, needs_grad, passes))
    return loss


def vocabulary_part(weight: Tensor, vocab_size: int, axis: Axis) -> VocabularyPart:
    """The part whose rows `weight` [V/T, H] is."""
    local_size = weight.shape[0]
    first = axis.rank * local_size
    return VocabularyPart(axis, first, max(0, min(local_size, vocab_size - first)))


def require_fit(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, axis: Axis) -> None:
    """Raise unless there is a target per row of `hidden` and a row of weight for each target."""
    if hidden.shape[0] != targets.shape[0]:
        raise LayoutError(
            f"`targets` must hold one target for each row of `hidden` ({hidden.shape[0]}), but holds "
            f"{targets.shape[0]}. Under sequence parallelism gather `hidden` first (`enter_tensor_parallel`)."
        )
    if weight.shape[0] * axis.size < vocab_size:
        raise LayoutError(
            f"`weight` must hold at least `vocab_size` rows ({vocab_size}) over the ranks of the {axis.name} axis, but "
            f"holds {weight.shape[0]} x {axis.size}. Pad the vocabulary (`VocabParallelEmbedding` does)."
        )
    torch._assert_async(
        (((targets >= 0) & (targets < vocab_size)) | (targets == IGNORED)).all(),
        f"Targets must be from 0 to {vocab_size - 1}, the last of the vocabulary, or {IGNORED} to be ignored, but one "
        "is not. Tokenize with this model's tokenizer.",
    )


class _ProjectAndCompare(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, part: VocabularyPart, plan: _Plan) -> Tensor:
        rows = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if plan.needs_grad else None
        grad_weight = torch.empty_like(weight) if plan.needs_grad else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        # One buffer for the logits of all chunks: fresh ones would cost more than the passes over them.
        size = (min(plan.chunk, hidden.shape[0]), rows.shape[0])
        buffer = torch.empty(size, dtype=wide, device=hidden.device) if plan.passes is None else None
        for start in range(0, hidden.shape[0], plan.chunk):
            piece = slice(start, start + plan.chunk)
            losses, error = _losses_of_chunk(hidden[piece], rows, targets[piece], part, plan, buffer)
            keep = targets[piece] != IGNORED
            total += losses.masked_fill(~keep, 0.0).sum()
            if error is not None and grad_hidden is not None and grad_weight is not None:
                keep = keep.unsqueeze(1)  # a token that does not count is left out where it is H wide, not V
                multiply_into(grad_hidden[piece], error, rows.t())
                grad_hidden[piece].mul_(keep)
                add_product(grad_weight, error.t(), hidden[piece] * keep, is_first=start == 0)
            del error  # or it would lie beside the next chunk's logits
        scale = plan.scale.to(wide) if isinstance(plan.scale, Tensor) else plan.scale
        if grad_hidden is not None and grad_weight is not None:
            if not hidden.shape[0]:
                grad_weight.zero_()  # no chunk has been there to fill it
            ctx.gradients = (grad_hidden, grad_weight, scale)
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("vocab_parallel_cross_entropy gives its gradients once: call backward once.")
        grad_hidden, grad_weight, scale = ctx.gradients
        ctx.gradients = None  # they are scaled in place, so they may not be given again
        factor = grad * scale
        return grad_hidden.mul_(factor), grad_weight.mul_(factor), None, None, None


def _losses_of_chunk(
    hidden: Tensor, rows: Tensor, targets: Tensor, part: VocabularyPart, plan: _Plan, buffer: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The losses [C] of the tokens of `hidden` [C, H] and, where gradients are asked for, those of the logits
    [C, V/T]; nothing else that is as large outlives it.
    """
    if buffer is None:
        return _compare_compiled(ORDINARY.output(hidden, rows), targets, part, plan)
    product = product_in(buffer, hidden, rows)
    in_place = product if product.dtype == buffer.dtype else buffer[: product.shape[0]].copy_(product)
    log_p, losses = _compare(in_place, targets, part)
    return losses, error_into(product, log_p, *local_index(targets, part)) if plan.needs_grad else None


def _compare(logits: Tensor, targets: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Logarithms of the probabilities [C, V/T], in place of the logits, and the losses [C]."""
    log_p, log_sum = log_softmax_(logits, part.num_real)  # among the entries of this part
    highest = all_reduce(log_sum, part.axis, "max")
    mine = log_sum - highest
    index, here = local_index(targets, part)
    target = log_p.gather(1, index.unsqueeze(1)).squeeze(1)
    sums, target = all_reduce(torch.stack([mine.exp(), (target + mine).masked_fill(~here, 0.0)]), part.axis).unbind()
    if part.axis.size > 1:
        log_p.add_((mine - sums.log()).unsqueeze(1))
    return log_p, sums.log() - target


def _compare_compiled(
    logits: Tensor, targets: Tensor, part: VocabularyPart, plan: _Plan
) -> tuple[Tensor, Tensor | None]:
    """The losses [C] and, where gradients are asked for, probabilities less one at the target [C, V/T]."""
    passes = plan.passes
    assert passes is not None
    wide = torch.promote_types(logits.dtype, torch.float32)
    index = targets - part.first
    highest = all_reduce(passes.highest(logits, part.num_real, wide), part.axis, "max")
    sums, target = all_reduce(passes.sums(logits, highest, index, part.num_real), part.axis).unbind()
    error = passes.error(logits, highest, sums, index, part.num_real) if plan.needs_grad else None
    return sums.log() - target, error


def local_index(targets: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Each target's row on this rank (0 where it is elsewhere), and whether it is here."""
    index = targets - part.first
    here = (index >= 0) & (index < part.num_real)
    return index.masked_fill(~here, 0), here
