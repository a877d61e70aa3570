"""Output projection fused with the cross entropy loss, for a vocabulary that is cut over the tensor ranks.

Each rank multiplies by its part of the output weight and keeps its logits local. The ranks send only three numbers per
token: first the largest logit, then the sum of exponentials and the target's logit. The loss of N tokens therefore
sends 3 N elements. Gathering the logits would send N V elements (paper, section 3).

The loss is computed in chunks of tokens. The gradients of a chunk are computed while its logits exist, so the logits of
all tokens are never in memory at once and are never computed twice. With p = softmax(x W^T) and one-hot target e:

    loss = -log p[target]        d loss / d logits = p - e

The z-loss keeps the logarithm of the softmax's denominator, log Z, near 0 (PaLM, arXiv 2204.02311, section 5). The
z-loss needs no additional message, because log Z follows from the numbers that the ranks already send:

    z-loss = c (log Z)^2         d z-loss / d logits = 2 c (log Z) p

With a teacher, each token's loss is a mixture of the cross entropy and of the divergence from the teacher's
distribution (`parallel.distillation`), and both use the same logits. The z-loss is added to the mixture.

A bias of the logits is cut along the vocabulary, like the output weight. Each rank adds its own part of the bias to its
own logits, so the bias needs no message.

Shapes: N tokens, C tokens of a chunk, H hidden, V padded vocabulary, T tensor ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from crosscut.config import IGNORED, LayoutError, default_loss_chunk
from crosscut.config.checks import require_at_least
from crosscut.kernels.loss_passes import Logits, LossPasses, error_into, log_softmax_
from crosscut.kernels.products import ORDINARY, add_product, multiply_into, product_in
from crosscut.kernels.soft_cap import soft_cap_
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.distillation import Distillation, VocabularyPart, distil
from crosscut.parallel.mesh import Axis


@dataclass(frozen=True, kw_only=True, eq=False)
class LossSettings:
    """Settings of the loss: its terms, its use of memory and its kernels."""

    scale: float | Tensor = 1.0
    """Factor by which the sum over all tokens is multiplied: a number, or a scalar tensor on the device of the hidden
    states.
    """
    z_loss: float = 0.0
    """Coefficient c of the z-loss, which is added to each token's loss. 0 means no z-loss."""
    bias: Tensor | None = None
    """This rank's part [V/T] of a bias that is added to the logits, in the element type of the weight. None means no
    bias.
    """
    soft_cap: float = 0.0
    """Soft cap on the absolute value of the logits: each logit becomes cap x tanh(logit / cap). 0 means no cap."""
    chunk_tokens: int | None = None
    """Number C of tokens whose logits are in memory at once. None chooses a default."""
    passes: LossPasses | None = None
    """Compiled passes over the logits. None uses PyTorch's own operators, which work in place."""
    distillation: Distillation | None = None
    """Teacher whose distributions are targets, too, in place of the compiled passes. None means no teacher."""


_NUM_LOSSES = 3
"""Losses that are summed with a teacher: the mixture, the data's loss and the teacher's loss."""

PLAIN_LOSS_SETTINGS = LossSettings()
"""Settings for the plain sum of the tokens' cross entropies, in chunks of the default size, without compiled passes."""


class _LossPlan(NamedTuple):
    """Settings and derived values that are the same for all chunks of a loss."""

    settings: LossSettings
    part: VocabularyPart
    chunk: int
    """Number of tokens whose logits are in memory at once."""
    needs_grad: bool
    needs_weight: bool
    """Whether the weight needs a gradient. False for a frozen weight."""

    @property
    def teaches(self) -> bool:
        """Whether a teacher has a part of the loss."""
        return self.settings.distillation is not None

    @property
    def passes(self) -> LossPasses | None:
        """Compiled passes to use; None for PyTorch's own operators."""
        return None if self.teaches else self.settings.passes


class _Chunk(NamedTuple):
    """Tokens of one chunk: their places among all tokens, their hidden states [C, H] and their targets [C]."""

    piece: slice
    hidden: Tensor
    targets: Tensor


class _OutputRows(NamedTuple):
    """This rank's rows of the output projection."""

    weight: Tensor
    """Weight [V/T, H], in the element type of the products."""
    bias: Tensor | None
    """Bias [V/T], or None."""


class _Buffers(NamedTuple):
    """Memory for one chunk [C, V/T], which all chunks of a loss reuse. Allocating new memory for each chunk would take
    longer than the passes over the chunk.
    """

    logits: Tensor
    slopes: Tensor | None
    """Derivatives of the soft cap; None without a soft cap or without gradients."""


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    axis: Axis,
    settings: LossSettings = PLAIN_LOSS_SETTINGS,
) -> Tensor:
    """Return the sum over all tokens of -log softmax(hidden weight^T)[target], times `settings.scale`.

    - `hidden` [N, H] is the same on all ranks of the axis. This function computes only this rank's term of the gradient
      of `hidden`. `hidden` must therefore be a result of `enter_tensor_parallel`, whose backward pass sums the terms of
      all ranks.
    - `weight` [V/T, H] holds this rank's rows and may have a wider element type than `hidden`. Rows from `vocab_size`
      on are padding and get no probability.
    - `targets` [N] are token ids, or `IGNORED` for tokens that add nothing to the loss.

    The result is a float32 scalar (float64 if `hidden` is float64). Call `backward` at most once on the result.

    Forward: for each chunk of C tokens, an all-reduce (max) of C elements and an all-reduce (sum) of 2 C elements, and
    with a teacher the messages of `distil`. Backward: nothing is sent. Source: paper, section 3.

    Raises `LayoutError` if the shapes do not match, `ConfigError` if `settings.chunk_tokens` is below 1, and
    `RuntimeError` if a target is not a valid token id (on CUDA, when the device reaches the check).
    """
    compiled = settings.passes is not None and settings.distillation is None
    chunk = loss_chunk(settings.chunk_tokens, hidden, weight, compiled=compiled)
    require_fit(hidden, weight, targets, vocab_size, axis)
    part = VocabularyPart.of(axis, weight.shape[0], vocab_size)
    # `Function.forward` runs without gradients, so `torch.is_grad_enabled()` must be read here.
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    plan = _LossPlan(settings, part, chunk, needs_grad, needs_grad and weight.requires_grad)
    loss, parts = _ProjectAndCompare.apply(hidden, weight, settings.bias, targets, plan)
    if settings.distillation is not None:
        settings.distillation.sums.append(parts)
    return loss  # type: ignore[no-any-return]


def loss_chunk(chunk_tokens: int | None, hidden: Tensor, weight: Tensor, *, compiled: bool = False) -> int:
    """Return the number of tokens per chunk: `chunk_tokens`, or, if it is None, the default for `hidden` [N, H] and
    `weight` [V/T, H], if the loss is `compiled` or not. Raises `ConfigError` if `chunk_tokens` is below 1.
    """
    if chunk_tokens is None:
        return default_loss_chunk(weight.shape[0], hidden.shape[0], device=hidden.device.type, compiled=compiled)
    require_at_least("chunk_tokens", chunk_tokens, 1)
    return chunk_tokens


def require_fit(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, axis: Axis) -> None:
    """Check that the shapes of the loss's arguments match and that the targets are valid.

    Raises `LayoutError` if `hidden` and `targets` have different numbers of rows, or if the weights of all ranks
    together have fewer than `vocab_size` rows. Raises `RuntimeError` if a target is neither a valid token id nor
    `IGNORED` (on CUDA, when the device reaches the check).
    """
    if hidden.shape[0] != targets.shape[0]:
        raise LayoutError(
            f"`targets` must hold one target for each row of `hidden` ({hidden.shape[0]}), but holds "
            f"{targets.shape[0]}. Under sequence parallelism, gather `hidden` first (`enter_tensor_parallel`)."
        )
    if weight.shape[0] * axis.size < vocab_size:
        raise LayoutError(
            f"`weight` must hold at least {vocab_size} rows (`vocab_size`) on all ranks of the {axis.name} axis "
            f"together, but holds {weight.shape[0]} rows on each of {axis.size} ranks. Pad the vocabulary "
            "(`VocabParallelEmbedding` does)."
        )
    torch._assert_async(
        (((targets >= 0) & (targets < vocab_size)) | (targets == IGNORED)).all(),
        f"Targets must be token ids from 0 to {vocab_size - 1}, or {IGNORED} for tokens that add nothing to the loss, "
        "but a target is another number. Tokenize with this model's tokenizer.",
    )


def starts_of_chunks(num_tokens: int, chunk: int) -> Iterable[int]:
    """First token of each chunk of a loss. A dry run replaces this function, because it runs equal chunks once."""
    return range(0, num_tokens, chunk)


_Gradients = tuple[Tensor, Tensor | None, Tensor | None, None, None]
"""Gradients of the hidden states, the weight and the bias; None for the other arguments of the loss."""


class _LossContext(Protocol):
    needs_input_grad: tuple[bool, ...]
    gradients: tuple[Tensor, Tensor | None, Tensor | None, Tensor | float] | None
    """Gradients of the hidden states, the weight and the bias, and the scale of the loss. None after the backward
    pass.
    """

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _ProjectAndCompare(Function):
    @staticmethod
    def forward(
        ctx: _LossContext, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _LossPlan
    ) -> tuple[Tensor, Tensor | None]:
        rows = _OutputRows(weight.to(hidden.dtype), bias)
        grad_hidden = torch.empty_like(hidden) if plan.needs_grad else None
        grad_weight = torch.empty_like(weight) if plan.needs_weight else None
        needs_bias = plan.needs_grad and ctx.needs_input_grad[2]
        grad_bias = None if bias is None or not needs_bias else torch.zeros_like(bias)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros(_NUM_LOSSES if plan.teaches else (), dtype=wide, device=hidden.device)
        buffers = _buffers(hidden, rows.weight, plan, wide) if plan.passes is None else None
        for start in starts_of_chunks(hidden.shape[0], plan.chunk):
            piece = slice(start, start + plan.chunk)
            losses, error = _losses_of_chunk(_Chunk(piece, hidden[piece], targets[piece]), rows, plan, buffers)
            keep = targets[piece] != IGNORED
            total += losses.masked_fill(~keep, 0.0).sum(-1)
            if error is not None and grad_hidden is not None:
                keep = keep.unsqueeze(1)  # mask ignored tokens in tensors of width H, because the logits are wider
                multiply_into(grad_hidden[piece], error, rows.weight.t())
                grad_hidden[piece].mul_(keep)
                if grad_weight is not None:
                    add_product(grad_weight, error.t(), hidden[piece] * keep, is_first=start == 0)
                if grad_bias is not None:
                    add_product(grad_bias.unsqueeze(1), error.t(), keep.to(error.dtype))
            del error  # free this memory before the next chunk's logits are computed
        scale = plan.settings.scale
        scale = scale.to(wide) if isinstance(scale, Tensor) else scale
        if grad_hidden is not None:
            if grad_weight is not None and not hidden.shape[0]:
                grad_weight.zero_()  # without a token, no chunk has filled the gradient
            ctx.gradients = (grad_hidden, grad_weight, grad_bias, scale)
        if not plan.teaches:
            return total * scale, None
        ctx.mark_non_differentiable(parts := total[1:].clone())
        return total[0] * scale, parts

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _LossContext, grad: Tensor, _parts: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError(
                "The loss of `vocab_parallel_cross_entropy` allows one backward pass, but a second backward pass has "
                "begun. Call `backward` once per loss."
            )
        grad_hidden, grad_weight, grad_bias, scale = ctx.gradients
        ctx.gradients = None  # the gradients are scaled in place, so a second backward pass would get wrong values
        factor = grad * scale
        grad_weight = None if grad_weight is None else grad_weight.mul_(factor)
        grad_bias = None if grad_bias is None else grad_bias.mul_(factor)
        return grad_hidden.mul_(factor), grad_weight, grad_bias, None, None


def _buffers(hidden: Tensor, rows: Tensor, plan: _LossPlan, wide: torch.dtype) -> _Buffers:
    logits = torch.empty((min(plan.chunk, hidden.shape[0]), rows.shape[0]), dtype=wide, device=hidden.device)
    return _Buffers(logits, torch.empty_like(logits) if plan.settings.soft_cap and plan.needs_grad else None)


def _losses_of_chunk(
    chunk: _Chunk, rows: _OutputRows, plan: _LossPlan, buffers: _Buffers | None
) -> tuple[Tensor, Tensor | None]:
    """Return the losses of the tokens of a chunk, [C] or, with a teacher, [3, C], and, if gradients are needed, the
    gradients of the logits [C, V/T]. Without a teacher, no other tensor as large as the logits stays in memory.
    """
    if buffers is None:
        product = ORDINARY.output(chunk.hidden, rows.weight)
        return _compare_compiled(product if rows.bias is None else product.add_(rows.bias), chunk.targets, plan)
    product = product_in(buffers.logits, chunk.hidden, rows.weight)
    in_place = product if product.dtype == buffers.logits.dtype else buffers.logits[: product.shape[0]].copy_(product)
    if rows.bias is not None:
        in_place.add_(rows.bias)
    slopes = None if buffers.slopes is None else buffers.slopes[: product.shape[0]]
    if plan.settings.soft_cap:
        soft_cap_(in_place, plan.settings.soft_cap, slopes)
    log_p, losses, log_z = _compare(in_place, chunk.targets, plan.part)
    taught = _taught(chunk, log_p, losses, plan)
    losses, growth = _with_z_loss(taught.mixture, log_z, plan.settings.z_loss, share=taught.share)
    losses = torch.stack([losses, *taught.parts]) if taught.parts else losses
    if not plan.needs_grad:
        return losses, None
    index, here = local_index(chunk.targets, plan.part)
    error = error_into(product, log_p, index, taught.share * here.to(log_p.dtype), growth=growth, slopes=slopes)
    return losses, taught.added_to(error, slopes)


class _Taught(NamedTuple):
    """Losses of a chunk's tokens, and the teacher's part of the gradients of the logits."""

    mixture: Tensor
    """Mixture of the data's losses and the teacher's losses, [C]."""
    share: float = 1.0
    """Share of the data's losses in the mixture."""
    parts: tuple[Tensor, ...] = ()
    """The data's losses and the teacher's losses, each [C]; empty without a teacher."""
    error: Tensor | None = None
    """Gradients [C, V/T] of the teacher's losses with respect to the capped logits; None without a teacher."""

    def added_to(self, error: Tensor, slopes: Tensor | None) -> Tensor:
        """Add the teacher's share of the gradients in place, and return the sum."""
        if self.error is None:
            return error
        own = self.error if slopes is None else self.error.mul_(slopes)
        return error.add_(own, alpha=1.0 - self.share)


def _taught(chunk: _Chunk, log_p: Tensor, losses: Tensor, plan: _LossPlan) -> _Taught:
    """Mix the teacher's losses with the data's losses [C], given the student's log probabilities [C, V/T]. Where no
    target is, the teacher may say anything, NaN included.
    """
    teaching = plan.settings.distillation
    if teaching is None:
        return _Taught(losses)
    alpha = teaching.mixture.alpha
    distances, error = distil(log_p, teaching.logits(chunk.piece), plan.part, teaching.mixture)
    error.masked_fill_((chunk.targets == IGNORED).unsqueeze(1), 0.0)
    return _Taught(torch.lerp(losses, distances, alpha), 1.0 - alpha, (losses, distances), error)


def _compare(logits: Tensor, targets: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor, Tensor]:
    """Replace the logits by log probabilities [C, V/T], in place. Return the log probabilities, the cross entropies
    [C], and log Z [C], the logarithm of each softmax's denominator.
    """
    log_p, log_sum = log_softmax_(logits, part.num_real)  # normalised over this rank's part only
    highest = all_reduce(log_sum, part.axis, "max")
    mine = log_sum - highest
    index, here = local_index(targets, part)
    target = log_p.gather(1, index.unsqueeze(1)).squeeze(1)
    sums, target = all_reduce(torch.stack([mine.exp(), (target + mine).masked_fill(~here, 0.0)]), part.axis).unbind()
    if part.axis.size > 1:
        log_p.add_((mine - sums.log()).unsqueeze(1))
    return log_p, sums.log() - target, highest + sums.log()


def _compare_compiled(product: Tensor, targets: Tensor, plan: _LossPlan) -> tuple[Tensor, Tensor | None]:
    """Compute the same as `_losses_of_chunk`, with compiled passes. `product` [C, V/T] holds the logits before the soft
    cap. If gradients are needed, they overwrite it.
    """
    passes, part = plan.settings.passes, plan.part
    assert passes is not None
    wide = torch.promote_types(product.dtype, torch.float32)
    logits = Logits(product, part.num_real, plan.settings.soft_cap)
    index = targets - part.first
    own, sums, target = passes.sums(logits, index, wide).unbind()
    highest = all_reduce(own, part.axis, "max")
    sums, target = all_reduce(torch.stack([sums * (own - highest).exp(), target]), part.axis).unbind()
    losses, growth = _with_z_loss(sums.log() - (target - highest), highest + sums.log(), plan.settings.z_loss)
    if not plan.needs_grad:
        return losses, None
    return losses, passes.error(logits, highest, sums, index, growth)


def _with_z_loss(losses: Tensor, log_z: Tensor, z_loss: float, *, share: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """Add the z-loss to the losses [C]. It is a term of the student's logits and has no share, whatever the teacher's.
    Also return the factor [C] of each token's probabilities in the gradient, in which the cross entropy has the share
    `share`; None if the factor is 1.
    """
    if not z_loss:
        return losses, None if share == 1.0 else torch.full_like(log_z, share)
    return losses + z_loss * log_z.square(), share + 2.0 * z_loss * log_z


def local_index(targets: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Return two tensors of the shape of `targets`: each target's row in this rank's weight, and whether this rank
    holds the target. If this rank does not hold the target, the row is 0.
    """
    index = targets - part.first
    here = (index >= 0) & (index < part.num_real)
    return index.masked_fill(~here, 0), here
