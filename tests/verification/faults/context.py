"""Faults of sequences that context ranks share. `mutations` says how a fault is planted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.config.layout import ContextAttention
from crosscut.kernels.attention import Attended
from crosscut.model import batch, documents
from crosscut.model.sublayers import attention
from crosscut.parallel import Axis, RandomStreams, seed_of
from crosscut.parallel.context import operators, ring
from crosscut.parallel.state import gradients
from crosscut.training import step as training_step
from tests.verification.mutations import PACKED, Patch, fault, instead_of
from tests.verification.runs import LLAMA

EXCHANGED = Layout(context=2, context_attention=ContextAttention.ALL_TO_ALL)
GATHERED = Layout(context=2, context_attention=ContextAttention.GATHER)
RING = Layout(context=2, context_attention=ContextAttention.RING)
WITH_DATA = Layout(context=2, data=2)
WITHOUT_DROPOUT = {"dropout": 0.0}


@fault("loss normalised by a context rank's own targets", "loss", EXCHANGED)
def own_targets(patch: Patch) -> None:
    reduce = training_step.all_reduce
    patch.setattr(training_step, "all_reduce", lambda x, axis: reduce(x, axis) if x.is_floating_point() else 2 * x)


@fault("loss normalised by the targets of the data ranks alone", "loss", WITH_DATA)
def targets_of_data_ranks(patch: Patch) -> None:
    reduce = training_step.all_reduce
    scales = training_step.Trainer._scales

    def of_data(self: training_step.Trainer, micro_batches: Any) -> Any:
        with patch.context() as inside:
            inside.setattr(training_step, "all_reduce", lambda x, _: 2 * reduce(x, self.mesh.data))
            return scales(self, micro_batches)

    patch.setattr(training_step.Trainer, "_scales", of_data)


@fault("gradients not summed over the context ranks", "gradient reduction", WITH_DATA)
def gradients_not_summed_over_context(patch: Patch) -> None:
    reduce = gradients.start_all_reduce_owned
    send = gradients.GradientReducer._send

    def over_data(self: gradients.GradientReducer, bucket: Any) -> None:
        with patch.context() as inside:
            inside.setattr(gradients, "start_all_reduce_owned", lambda x, _: reduce(x, self.mesh.data))
            send(self, bucket)

    patch.setattr(gradients.GradientReducer, "_send", over_data)


def _places(patch: Patch, changed: Callable[[Tensor, Axis], Tensor]) -> None:
    part_of_rank = batch.Batch.part_of_rank

    def elsewhere(self: batch.Batch, axis: Axis) -> batch.Batch:
        part = part_of_rank(self, axis)
        return part if part.places is None else replace(part, places=changed(part.places, axis))

    patch.setattr(batch.Batch, "part_of_rank", elsewhere)


@fault("learned positions of a rank's late piece off by one", "positions", EXCHANGED)
def late_positions_off_by_one(patch: Patch) -> None:
    _places(patch, lambda places, _: torch.cat((places[: len(places) // 2], places[len(places) // 2 :] - 1)))


@fault("rotary positions count from the start of the rank's part", "blocks.0.attention", EXCHANGED, **LLAMA)
def rotary_positions_of_the_part(patch: Patch) -> None:
    _places(patch, lambda places, _: torch.arange(len(places)))


@fault("a step of the ring is left out", "blocks.0.attention", RING, **WITHOUT_DROPOUT)
def ring_step_left_out(patch: Patch) -> None:
    views = ring._views
    patch.setattr(ring, "_views", lambda *arguments: list(views(*arguments))[:-1])


@fault("the early piece of a later rank's keys is hidden", "blocks.0.attention", RING, **WITHOUT_DROPOUT)
@instead_of(ring, "_views")
def early_keys_of_later_ranks_hidden(views: Any, described: Any, length: int, mask: Tensor | None) -> Any:
    late = slice(length // 2, None)
    for view in views(described, length, mask):
        yield view._replace(keys=late) if view.queries == late else view


@fault(
    "log-sum-exps of blocks merged without the maximum, cut off where exponentials overflow",
    "blocks.0.attention",
    RING,
    **WITHOUT_DROPOUT,
)
def merged_without_the_maximum(patch: Patch) -> None:
    def add(self: ring._Merged, attended: Attended, rows: slice) -> None:
        weight = attended.lse.clamp(-5, 5).exp()
        self._values[:, :, rows] += attended.result * weight.unsqueeze(-1)
        self._total[:, :, rows] += weight
        self._largest = torch.zeros_like(self._largest)

    placed = attention._placed
    patch.setattr(attention, "_placed", lambda *operands: 30 * placed(*operands))  # in the uncut model, too
    patch.setattr(ring._Merged, "add", add)


@fault(
    "the log-sum-exp of a query that sees no key of a block is 0",
    "blocks.0.attention",
    RING,
    training=PACKED,
    **WITHOUT_DROPOUT,
)
@instead_of(ring, "attend_block")
def hidden_rows_count(attend: Any, block: Any) -> Attended:
    attended = attend(block)
    return attended._replace(lse=attended.lse.masked_fill(attended.lse.isneginf(), 0.0))


@fault("the sums of the keys' gradients stay at the last rank", "blocks.1.attention", RING, **WITHOUT_DROPOUT)
def sums_not_sent_home(patch: Patch) -> None:
    shift = ring.start_shift
    sent: list[int] = []

    def not_the_last(x: Tensor, axis: Axis) -> Tensor:
        sent.append(1)
        return x if len(sent) % (3 * axis.size - 2) == 0 else shift(x, axis)  # 2 C - 2 of the keys, C of the sums

    patch.setattr(ring, "start_shift", not_the_last)


@fault("gathered keys are in the order of the ranks", "blocks.0.attention", GATHERED)
def keys_in_the_order_of_ranks(patch: Patch) -> None:
    patch.setattr(operators, "join_zigzag", lambda parts, dim: torch.cat(list(parts), dim))


@fault("gathered keys' gradients are not summed", "blocks.1.attention", GATHERED)
def gathered_gradients_not_summed(patch: Patch) -> None:
    patch.setattr(operators, "reduce_scatter", lambda x, axis, dim: x.chunk(axis.size, dim)[axis.rank])


@fault("results of exchanged heads come back in another order", "blocks.0.attention", EXCHANGED)
def results_of_other_heads(patch: Patch) -> None:
    leave = attention.leave_context
    patch.setattr(attention, "leave_context", lambda heads, *rest: leave(heads, *rest).roll(1, 1))


@fault("context ranks have the halves of the sequence, with the positions of the zigzag", "tokens", EXCHANGED)
@instead_of(batch.Batch, "part_of_rank")
def halves_with_zigzag_positions(part_of_rank: Any, self: batch.Batch, axis: Axis) -> batch.Batch:
    part = part_of_rank(self, axis)
    return part if axis.size == 1 else replace(part, tokens=self.tokens.chunk(axis.size, 1)[axis.rank])


@fault("the targets of a rank's late piece are those of its early piece", "loss", GATHERED)
@instead_of(batch.Batch, "part_of_rank")
def late_targets_of_the_early_piece(part_of_rank: Any, self: batch.Batch, axis: Axis) -> batch.Batch:
    part = part_of_rank(self, axis)
    first = part.targets.chunk(2, 1)[0]
    return part if axis.size == 1 else replace(part, targets=torch.cat((first, first), 1))


@fault("documents are numbered in each rank's part alone", "blocks.0.attention", GATHERED, training=PACKED)
@instead_of(batch.Batch, "part_of_rank")
def documents_of_the_part(part_of_rank: Any, self: batch.Batch, axis: Axis) -> batch.Batch:
    part = part_of_rank(self, axis)
    if axis.size == 1 or part.documents is None:
        return part
    return replace(part, documents=part.documents - part.documents[:, :1] + 100 * axis.rank)


@fault(
    "positions within documents count from the start of a rank's part",
    "blocks.0.attention",
    GATHERED,
    training=PACKED,
    **LLAMA,
)
@instead_of(batch.Batch, "part_of_rank")
def positions_in_documents_of_the_part(part_of_rank: Any, self: batch.Batch, axis: Axis) -> batch.Batch:
    part = part_of_rank(self, axis)
    if axis.size == 1 or part.positions is None:
        return part
    return replace(part, positions=part.positions - part.positions[:, :1].clamp(max=0) + axis.rank)


@fault("the causal mask is that of a rank's own part", "blocks.0.attention", GATHERED)
@instead_of(documents, "_earlier")
def mask_of_own_part(earlier: Any, queries: Tensor, num_keys: int, window: int) -> Tensor:
    return earlier(torch.arange(len(queries)), num_keys, window)


@fault("exchanged keys are those of other heads", "blocks.0.attention", EXCHANGED)
@instead_of(operators, "_heads_of_rank")
def keys_of_other_heads(heads: Any, *arguments: Any) -> Any:
    q, k, v = heads(*arguments)
    return q, k.roll(1, 1), v


@fault("the gradients of exchanged heads come back in another order", "blocks.1.attention", EXCHANGED)
@instead_of(operators, "exchanged")
def gradients_of_other_heads(exchanged: Any, x: Tensor, axis: Axis, *, forward: Any, backward: Any) -> Tensor:
    is_left = forward is operators._tokens_to_heads
    back = (lambda grad, axis: backward(grad.roll(1, 1), axis)) if is_left else backward
    return exchanged(x, axis, forward=forward, backward=back)


@fault("the ring turns the other way", "blocks.0.attention", RING, **WITHOUT_DROPOUT)
@instead_of(ring, "_views")
def ring_turns_the_other_way(views: Any, described: Any, length: int, mask: Tensor | None) -> Any:
    other = replace(described.axis, rank=described.axis.size - 1 - described.axis.rank)
    return views(described._replace(axis=other), length, mask)


@fault("the gradients of keys and values are exchanged", "blocks.1.attention", RING, **WITHOUT_DROPOUT)
@instead_of(ring, "attend_block_backward")
def gradients_of_keys_and_values_exchanged(backward: Any, *arguments: Any) -> Any:
    of_q, of_k, of_v = backward(*arguments)
    return of_q, of_v, of_k


@fault(
    "the backward pass of the ring has the log-sum-exps of the largest block",
    "blocks.1.attention",
    RING,
    **WITHOUT_DROPOUT,
)
@instead_of(ring._Merged, "finish")
def sums_of_the_largest_block(finish: Any, self: ring._Merged, dtype: torch.dtype) -> Attended:
    return finish(self, dtype)._replace(lse=self._largest)


@fault("gradients are summed over the context ranks twice", "gradient reduction", WITH_DATA)
@instead_of(gradients.GradientReducer, "_receive")
def summed_over_context_twice(receive: Any, self: gradients.GradientReducer, bucket: Any) -> None:
    receive(self, bucket)
    for parameter in bucket.parameters:
        gradients._local(parameter.grad).mul_(self.mesh.context.size)


@fault("the same dropout on all context ranks", "dropout", EXCHANGED)
@instead_of(RandomStreams, "_restart")
def same_stream_on_context_ranks(_plain: Any, self: RandomStreams, *layer: object) -> None:
    torch.manual_seed(seed_of("shared", self.seed, *self._started, self.mesh.data.rank, *layer))
