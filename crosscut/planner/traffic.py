"""Collectives of one training step, by axis, phase and purpose.

The list is the account that the tests hold against the collectives that a running step is seen to make. An axis of one
rank sends nothing. Legend: `b` sequences of one micro-batch on one data rank, `s` tokens of a sequence, `h` hidden
size, `L` layers, `M` micro-batches of a step.

A ring moves the same bytes through every rank (Patarasuk and Yuan 2009): with `n` ranks, an all-gather or a
reduce-scatter sends (n - 1) / n of the full tensor, and an all-reduce, which is one of each, twice that.
"""

from collections.abc import Iterable
from functools import partial

from crosscut.config import default_loss_chunk, padded_vocab_size
from crosscut.config.checks import require_at_least
from crosscut.config.conventions import num_pieces
from crosscut.planner.activations import num_recomputed_layers
from crosscut.planner.candidate import Planned
from crosscut.planner.collective import Axis, Collective, Operation, Phase
from crosscut.planner.parameters import (
    known_vocab_size,
    num_replicated_tensors,
    num_tensors,
    parameters_per_rank,
    partial_gradients,
)
from crosscut.planner.sharding import shard_axis, sharded_parameters


def step_traffic(
    run: Planned, *, loss_chunk_tokens: int | None = None, compiled: bool | None = None
) -> list[Collective]:
    """The collectives of one training step of `run`, grouped by purpose.

    `loss_chunk_tokens` is the number of tokens whose logits the loss holds at once, by default the one that training
    takes; it sets how often the loss sends, not how much. `compiled` layers repeat their last collective too when they
    are recomputed; by default they are compiled where `training.compile` is `on`, or `auto` with `training.device`
    cuda. Raises `ConfigError` where `model.vocab_size` is still 0 or `loss_chunk_tokens` is below 1.
    """
    if loss_chunk_tokens is None:
        local_vocab_size = padded_vocab_size(known_vocab_size(run.model), run.layout.tensor) // run.layout.tensor
        num_tokens = run.micro_batch_size * run.training.sequence_length
        loss_chunk_tokens = default_loss_chunk(local_vocab_size, num_tokens, device=run.training.device)
    require_at_least("loss_chunk_tokens", loss_chunk_tokens, 1)
    if compiled is None:
        compiled = run.is_compiled_on_gpus if run.training.device == "cuda" else run.training.compile == "on"
    split = run.layout.sequence_parallel
    collectives = [
        *(_sequence_parallel(run, compiled) if split else _tensor_parallel(run, compiled)),
        *_loss(run, loss_chunk_tokens),
        *_gradients(run),
        *_totals(run),
    ]
    return [collective for collective in collectives if collective.ranks > 1 and collective.count]


def comparison_traffic(run: Planned) -> list[Collective]:
    """The collectives of one comparison of replicas, which comes every `training.compare_replicas_every` steps.

    Two hashes of every parameter tensor over the ranks that hold copies, which is the data axis; two of every
    replicated one, and the verdict of the first, over the tensor axis. Where data ranks share one copy, only the same
    shares of different copies are compared, and the verdict goes to the other shares.
    """
    layout = run.layout
    all_reduce = partial(Collective, operation="all_reduce", phase="comparison", count=1, element_bytes=8)
    tensors, replicated = num_tensors(run.model), num_replicated_tensors(run.model, layout)
    sharded = layout.shard_size > 1
    if layout.tensor == layout.num_replicas == 1:
        return []
    collectives = [
        all_reduce(
            axis="replica" if sharded else "data", purpose="hashes", elements=2 * tensors, ranks=layout.num_replicas
        ),
        all_reduce(axis="tensor", purpose="hashes of what is whole", elements=2 * replicated + 1, ranks=layout.tensor),
        all_reduce(axis=shard_axis(layout), purpose="verdict", elements=1, ranks=layout.shard_size),
    ]
    return [collective for collective in collectives if collective.ranks > 1]


def wire_bytes_per_step(collectives: Iterable[Collective], axis: Axis | None = None) -> float:
    """Bytes that one rank sends in one step along `axis`, or along all of them."""
    return sum(c.wire_bytes for c in collectives if axis is None or c.axis == axis)


def _tensor_parallel(run: Planned, compiled: bool) -> list[Collective]:
    """The paper's f and g (section 3): two all-reduces of b s h per layer forward, two backward, and one more each
    way for the embedding and its tied projection. A layer that is recomputed whole needs its first g again.
    """
    M, L = run.num_micro_batches, run.model.num_layers
    again = M * _layers_sent_again(run)
    all_reduce = partial(
        Collective,
        operation="all_reduce",
        axis="tensor",
        elements=_activation_elements(run),
        element_bytes=run.training.numbers.compute_bytes,
        ranks=run.layout.tensor,
    )
    return [
        all_reduce(phase="forward", purpose="embedding", count=M),
        all_reduce(phase="forward", purpose="attention output", count=M * L),
        all_reduce(phase="forward", purpose="mlp output", count=M * L),
        all_reduce(phase="backward", purpose="output projection input", count=M),
        all_reduce(phase="backward", purpose="attention output again", count=again),
        all_reduce(phase="backward", purpose="mlp output again", count=again * compiled),
        all_reduce(phase="backward", purpose="mlp input", count=M * L),
        all_reduce(phase="backward", purpose="attention input", count=M * L),
    ]


def reason_against_halves(run: Planned) -> str:
    """Why products of a split sequence that are large enough for halves run whole, so that their forward messages run
    beside nothing, in words that follow a colon; empty where they do not.
    """
    is_split = run.layout.sequence_parallel and run.layout.tensor > 1 and not run.layout.symmetric_memory
    sequences, elements = run.micro_batch_size, _activation_elements(run)
    if not is_split or num_pieces(2, elements) == 1:
        return ""
    if run.training.precision == "float8":
        return "products in 8 bits are not cut into halves"
    if num_pieces(sequences, elements) > 1:
        return ""
    more = "s" if sequences > 1 else ""
    return (
        f"a micro-batch of {sequences} sequence{more} has no halves. Two at once have; layout.symmetric_memory=true, "
        "inside a node, needs none"
    )


def _sequence_parallel(run: Planned, compiled: bool) -> list[Collective]:
    """Each all-reduce becomes a reduce-scatter at the end of one cut region and an all-gather at the start of the
    next (Korthikanti et al. 2022, section 4.2.2); the backward pass mirrors both, and gathers each region's input once
    more, which is kept split. Products that run in pieces send pieces (`config.conventions.num_pieces`); those in 8
    bits are never cut.
    """
    M, L = run.num_micro_batches, run.model.num_layers
    again = M * _layers_sent_again(run)
    elements = _activation_elements(run)
    whole = partial(
        Collective,
        axis="tensor",
        elements=elements,
        element_bytes=run.training.numbers.compute_bytes,
        ranks=run.layout.tensor,
    )
    pieces = 1 if run.training.precision == "float8" else num_pieces(run.micro_batch_size, elements)

    def in_pieces(operation: Operation, *, phase: Phase, purpose: str, count: int) -> Collective:
        return whole(
            operation=operation, phase=phase, purpose=purpose, count=pieces * count, elements=elements // pieces
        )

    return [
        whole(operation="reduce_scatter", phase="forward", purpose="embedding", count=M),
        in_pieces("all_gather", phase="forward", purpose="attention input", count=M * L),
        in_pieces("reduce_scatter", phase="forward", purpose="attention output", count=M * L),
        in_pieces("all_gather", phase="forward", purpose="mlp input", count=M * L),
        in_pieces("reduce_scatter", phase="forward", purpose="mlp output", count=M * L),
        whole(operation="all_gather", phase="forward", purpose="output projection input", count=M),
        whole(operation="reduce_scatter", phase="backward", purpose="output projection input", count=M),
        in_pieces("all_gather", phase="backward", purpose="attention input again", count=again),
        in_pieces("reduce_scatter", phase="backward", purpose="attention output again", count=again),
        in_pieces("all_gather", phase="backward", purpose="mlp input again", count=again),
        in_pieces("reduce_scatter", phase="backward", purpose="mlp output again", count=again * compiled),
        in_pieces("all_gather", phase="backward", purpose="mlp output", count=M * L),
        whole(operation="all_gather", phase="backward", purpose="mlp input for its weights", count=M * L),
        whole(operation="reduce_scatter", phase="backward", purpose="mlp input", count=M * L),
        in_pieces("all_gather", phase="backward", purpose="attention output", count=M * L),
        whole(operation="all_gather", phase="backward", purpose="attention input for its weights", count=M * L),
        whole(operation="reduce_scatter", phase="backward", purpose="attention input", count=M * L),
        whole(operation="all_gather", phase="backward", purpose="embedding", count=M),
    ]


def _layers_sent_again(run: Planned) -> int:
    """Layers whose forward collectives the backward pass repeats."""
    return num_recomputed_layers(run) if run.training.recompute == "full" else 0


def _loss(run: Planned, chunk_tokens: int) -> list[Collective]:
    """Three scalars per token, never its logits: in each chunk of tokens the largest logit, then the sum of
    exponentials together with the target's logit (paper, section 3).
    """
    whole_chunks, rest = divmod(run.micro_batch_size * run.training.sequence_length, chunk_tokens)
    all_reduce = partial(
        Collective,
        operation="all_reduce",
        axis="tensor",
        phase="forward",
        element_bytes=run.training.numbers.accumulation_bytes,
        ranks=run.layout.tensor,
    )
    collectives = []
    for chunks, tokens in ((whole_chunks, chunk_tokens), (1, rest)):
        if chunks and tokens:
            count = chunks * run.num_micro_batches
            collectives += [
                all_reduce(purpose="loss maximum", count=count, elements=tokens),
                all_reduce(purpose="loss sums", count=count, elements=2 * tokens),
            ]
    return collectives


def _gradients(run: Planned) -> list[Collective]:
    """Once per step: the gradients of which every tensor rank has a part, over these, since each saw a part of the
    sequence or of the heads; then every local gradient over the data ranks. That one goes in buckets beside the
    backward pass and is counted here as one all-reduce of their sum.
    """
    if run.layout.shard_size > 1:
        return sharded_parameters(run)
    all_reduce = partial(
        Collective,
        operation="all_reduce",
        phase="step",
        count=1,
        element_bytes=run.training.numbers.accumulation_bytes,
    )
    partial_ones = partial_gradients(run.model, run.layout)
    replicated = all_reduce(
        axis="tensor", purpose="replicated gradients", elements=partial_ones, ranks=run.layout.tensor
    )
    local = all_reduce(
        axis="data",
        purpose="gradients",
        elements=parameters_per_rank(run.model, run.layout),
        ranks=run.layout.data,
    )
    return [replicated, local] if partial_ones else [local]


def _totals(run: Planned) -> list[Collective]:
    """Once per step: the squares of the cut gradients, summed, over the tensor ranks, and of all of them over data
    ranks that share one copy, in float64; the number of target tokens and, when the step is done, the loss over the
    data ranks.
    """
    all_reduce = partial(
        Collective,
        operation="all_reduce",
        phase="step",
        count=1,
        element_bytes=run.training.numbers.accumulation_bytes,
    )
    return [
        all_reduce(axis="tensor", purpose="gradient norm", elements=1, ranks=run.layout.tensor, element_bytes=8),
        all_reduce(
            axis=shard_axis(run.layout),
            purpose="gradient norm of all shares",
            elements=1,
            ranks=run.layout.shard_size,
            element_bytes=8,
        ),
        all_reduce(axis="data", purpose="target tokens", elements=1, ranks=run.layout.data, element_bytes=8),
        all_reduce(axis="data", purpose="reported loss", elements=1, ranks=run.layout.data),
    ]


def _activation_elements(run: Planned) -> int:
    """Elements of an activation that the tensor ranks gather or reduce: b s h."""
    return run.micro_batch_size * run.training.sequence_length * run.model.hidden_size
