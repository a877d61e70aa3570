"""Collectives of one training step, by axis, phase and purpose.

Tests compare this list with the collectives that are recorded in a running step. An axis of size 1 sends nothing.
Legend: `b` sequences of one micro-batch on one data rank, `s` tokens of a sequence, `h` hidden size, `L` layers, `M`
micro-batches of a step.

In a ring, every rank sends the same number of bytes (Patarasuk and Yuan 2009). With `n` ranks, an all-gather or a
reduce-scatter sends (n - 1) / n of the full tensor. An all-reduce is a reduce-scatter followed by an all-gather, so it
sends twice as much.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple

from crosscut.architecture import (
    Decoder,
    Layer,
    Operation,
    Overlap,
    Product,
    Target,
    describe,
    flat,
    lower,
    lower_root,
)
from crosscut.architecture.messages import (
    Phase,
    Sent,
    backward_messages,
    forward_messages,
    products_at,
    repeated_messages,
)
from crosscut.architecture.optimizers.low_rank import has_low_rank
from crosscut.config import default_loss_chunk
from crosscut.config.checks import require_at_least
from crosscut.config.conventions import num_pieces
from crosscut.config.training import Recompute
from crosscut.planner.candidate import Planned, is_compiled, recomputation_step, target_of
from crosscut.planner.messages.collective import Collective, along, at_once
from crosscut.planner.messages.low_rank import low_rank, low_rank_messages
from crosscut.planner.messages.sharding import sharded_parameters
from crosscut.planner.messages.staged import compared_ends, stage_messages, tied_gradients
from crosscut.planner.messages.teacher import DIVERGENCES, teacher_messages
from crosscut.planner.muon import muon_messages
from crosscut.planner.parameters import (
    known_vocab_size,
    num_replicated_tensors,
    num_tensors,
    partial_gradients,
    trained_parameters_per_rank,
)
from crosscut.planner.stages import part_of


def step_traffic(
    run: Planned, *, loss_chunk_tokens: int | None = None, compiled: bool | None = None, target: Target | None = None
) -> list[Collective]:
    """Collectives of one training step of `run`, grouped by purpose.

    In a pipeline, the result is for one rank of the pipeline: rank `Candidate.pipeline_rank` for a candidate, and the
    first rank for a `RunConfig`. `loss_chunk_tokens` is the number of tokens whose logits the loss holds at once, by
    default the number that training uses. A smaller chunk means more messages of the loss, but the same total bytes.
    `compiled` says whether layers are compiled: a compiled layer that is fully recomputed also repeats its last
    collective. By default, layers count as compiled if `training.compile` is "on", or "auto" with `training.device`
    "cuda". `target` is the target of `run`, if the caller has it: messages are the same on all devices. Raises
    `ConfigError` if `model.vocab_size` is still 0 or `loss_chunk_tokens` is below 1.
    """
    known_vocab_size(run.model)
    part, size = part_of(run), run.training.numbers.accumulation_bytes
    target = target or target_of(run, device="cpu")
    if loss_chunk_tokens is None:
        loss_chunk_tokens = _default_chunk(run, target)
    require_at_least("loss_chunk_tokens", loss_chunk_tokens, 1)
    if compiled is None:
        compiled = is_compiled(run, run.training.device)
    repeats = Repeats(Recompute(run.training.recompute), recomputation_step(run), compiled)
    all_reduce = partial(Collective, operation=Operation.ALL_REDUCE, phase=Phase.STEP, count=1, element_bytes=size)
    collectives = [
        *_of_layers(part, target, run.num_micro_batches, repeats),
        *(_loss(run, loss_chunk_tokens, run.num_micro_batches) if part.is_last else []),
        *stage_messages(run, target),
        *(teacher_messages(run) if part.is_last and run.teacher.is_computed else []),
        *_gradients(run, all_reduce),
        *low_rank_messages(run, all_reduce),
        *tied_gradients(run, all_reduce),
        *_totals(run, all_reduce),
        *muon_messages(run),
    ]
    return [collective for collective in collectives if collective.ranks > 1 and collective.count]


def comparison_traffic(run: Planned) -> list[Collective]:
    """Collectives of one comparison of replicas, which runs every `training.compare_replicas_every` steps.

    The ranks of the data axis compare two hashes of every parameter tensor. The ranks of the tensor axis compare two
    hashes of every replicated parameter tensor, and send the result of the data axis in the same message. If data ranks
    shard the model, the ranks with the same shard of different copies compare this shard, and one more all-reduce sends
    the result to the ranks with other shards. In a pipeline, the first and the last rank compare the tied embedding,
    and one more all-reduce sends the result to all stages.
    """
    layout, part = run.layout, part_of(run)
    all_reduce = partial(Collective, operation=Operation.ALL_REDUCE, phase=Phase.COMPARISON, count=1, element_bytes=8)
    ranks, replicated = layout.ranks, num_replicated_tensors(part, layout)
    copies = [(plan.copies, num_tensors(part, layout, plan)) for plan in layout.plans]
    if max(line.size for line in (ranks.cuts, ranks.owners, *(line for line, _ in copies))) == 1:
        return []
    (line, tensors), *of_experts = copies
    compared = [along(all_reduce, held)(purpose="hashes of experts", elements=2 * n) for held, n in of_experts if n]
    also = any(collective.ranks > 1 for collective in compared)
    collectives = [
        *compared,
        along(all_reduce, line)(purpose="hashes", elements=2 * tensors + also),
        along(all_reduce, ranks.cuts)(purpose="hashes of replicated parameters", elements=2 * replicated + 1),
        *compared_ends(run, all_reduce),
        along(all_reduce, ranks.slices)(purpose="verdict", elements=1),
        along(all_reduce, ranks.owners)(purpose="verdict", elements=1),
    ]
    return [collective for collective in collectives if collective.ranks > 1]


def wire_bytes_per_step(collectives: Iterable[Collective], axis: str | None = None) -> float:
    """Bytes that one rank sends in one step along `axis`, or along all axes if `axis` is None."""
    return sum(c.wire_bytes for c in collectives if axis is None or c.axis == axis)


def reason_against_halves(run: Planned) -> str:
    """Return the reason why the micro-batch is not split into halves, as a clause that fits after "because".

    Without halves, the forward messages overlap with no product. The result is empty if the micro-batch is split. The
    result is also empty if the run needs no halves: the sequence is not split, symmetric memory is on, or the tensors
    are too small.
    """
    is_split = run.layout.splits_sequence and not run.layout.symmetric_memory
    sequences = run.micro_batch_size
    elements = target_of(run, device="cpu").tokens * run.model.hidden_size
    if not is_split or num_pieces(2, elements) == 1:
        return ""
    if run.training.precision == "float8":
        return "float8 products are not split into halves"
    if num_pieces(sequences, elements) > 1:
        return ""
    more = "s" if sequences > 1 else ""
    return (
        f"a micro-batch of {sequences} sequence{more} cannot be split into halves. Use an even micro-batch size, or "
        "layout.symmetric_memory=true if the tensor ranks are in one node"
    )


class Repeats(NamedTuple):
    """Recomputation that repeats messages in the backward pass."""

    mode: Recompute
    every: int
    """Every `every`-th layer is recomputed. 0 if no layer is recomputed."""
    compiled: bool
    """Whether layers are compiled. Under full recomputation, compiled layers repeat all their messages. Under selective
    recomputation, compiled layers repeat no messages."""

    @property
    def has_messages(self) -> bool:
        """Whether a recomputed layer repeats messages."""
        return self.mode is Recompute.FULL or (self.mode is Recompute.SELECTIVE and not self.compiled)


@lru_cache(maxsize=4096)
def _of_layers(decoder: Decoder, target: Target, M: int, repeats: Repeats) -> tuple[Collective, ...]:
    """Collectives of f and g (paper, section 3) in layers, embedding and output projection, and of attention over
    context ranks, in order of execution.

    Each layer has two all-reduces of b s h elements in the forward pass and two in the backward pass. The embedding
    adds one all-reduce to the forward pass, and the output projection adds one to the backward pass. With a split
    sequence, a reduce-scatter ends each parallel region and an all-gather starts the next one (Korthikanti et al. 2022,
    section 4.2.2); the backward pass swaps the two and gathers the input of each region once more. With full
    recomputation, the recomputed layers repeat their forward messages. Compiled layers also repeat their last message.
    With selective recomputation, uncompiled layers repeat the messages of attention.
    """
    again = decoder.recomputed(repeats.every if repeats.has_messages else 0)
    embedding, head = lower_root(decoder, target)
    found: list[Collective] = []

    def add(messages: Iterable[Sent], count: int = 1, layer: Layer | None = None) -> None:
        products = products_at(layer, target) if layer else {}
        found.extend(collective_of(target, sent, M * count, products) for sent in messages)

    add(forward_messages(embedding))
    for layer, count in decoder.kinds.items():
        add(forward_messages(flat(lower(layer, target))), count, layer)
    add((*forward_messages(head), *backward_messages(head)))
    for layer, count in decoder.kinds.items():
        core = repeats.mode is Recompute.SELECTIVE
        if again[layer]:
            add(repeated_messages(layer, target, everything=repeats.compiled, core=core), again[layer], layer)
        add(backward_messages(tuple(flat(lower(layer, target)))), count, layer)
    add(backward_messages(embedding))
    return tuple(found)


def collective_of(
    target: Target, sent: Sent, count: int = 1, products: Mapping[str, tuple[Product, ...]] = MappingProxyType({})
) -> Collective:
    """Collective for `count` equal messages of a step.

    `products` maps the name of a message to the products of the parallel region that the message can overlap with.
    """
    message = sent.message
    return Collective(
        operation=message.operation,
        axis=message.axis,
        phase=sent.phase,
        purpose=sent.label,
        count=message.pieces * message.count * count,
        elements=message.elements // message.pieces,
        element_bytes=target.bytes_of(message.kind),
        ranks=target.ranks_of(message.axis),
        overlap=message.overlap,
        beside=products.get(sent.name, ()),
        pieces=message.pieces,
    )


def loss_messages(run: Planned, target: Target) -> list[Collective]:
    """Collectives of the loss of one micro-batch, in chunks of as many tokens as training uses."""
    return _loss(run, _default_chunk(run, target), 1)


def _default_chunk(run: Planned, target: Target) -> int:
    rows, device = describe(run.model).loss.local_vocabulary(target), run.training.device
    compiled = is_compiled(run, device) and not run.teacher.teaches
    return default_loss_chunk(max(rows, 1), run.predicted_tokens, device=device, compiled=compiled)


def _loss(run: Planned, chunk_tokens: int, M: int) -> list[Collective]:
    """Collectives of the loss: three scalars per token, never the logits (paper, section 3).

    For each chunk of tokens, the ranks reduce the largest logit, then the sum of exponentials together with the
    target's logit, and with a teacher the numbers from which the divergence follows.
    """
    statistics = (*describe(run.model).loss.statistics(), *(DIVERGENCES if run.teacher.teaches else ()))
    whole_chunks, rest = divmod(run.predicted_tokens, chunk_tokens)
    element_bytes = run.training.numbers.accumulation_bytes
    of_chunk = partial(Collective, operation=Operation.ALL_REDUCE, phase=Phase.FORWARD, element_bytes=element_bytes)
    all_reduce = along(of_chunk, run.layout.ranks.cuts)
    collectives = []
    for chunks, tokens in ((whole_chunks, chunk_tokens), (1, rest)):
        if chunks and tokens:
            collectives += [
                all_reduce(purpose=name, count=chunks * M, elements=width * tokens) for name, width in statistics
            ]
    return collectives


def _norm_of_experts(run: Planned, norm: partial[Collective]) -> list[Collective]:
    """All-reduces of the squared gradients of experts: over the ranks that share experts, and over those that store
    slices of the same experts. If other ranks store slices of all other parameters, the squares are also summed over
    the tensor ranks in a message of their own. Empty if experts are arranged like all other parameters.
    """
    layout = run.layout
    if layout.expert_ranks is layout.ranks or not trained_parameters_per_rank(
        part_of(run), layout, layout.expert_ranks
    ):
        return []
    again = layout.ranks.slices.size > 1
    return [
        along(norm, layout.line("expert"))(purpose="gradient norm of all experts"),
        *([along(norm, layout.expert_ranks.cuts)(purpose="gradient norm of experts")] if again else []),
        along(norm, layout.expert_ranks.slices)(purpose="gradient norm of all shares of experts"),
    ]


def _gradients(run: Planned, all_reduce: partial[Collective]) -> list[Collective]:
    """Collectives that sum gradients, once per step.

    First, the tensor ranks sum the partial gradients of replicated parameters, because each rank saw only its part of
    the sequence or of the heads. Then the data ranks sum all gradients. The second sum is sent in buckets that overlap
    with the backward pass; it counts here as one all-reduce of all buckets together.
    """
    if run.layout.shard_size > 1:
        return sharded_parameters(run)
    layout, part = run.layout, part_of(run)
    in_low_rank = {plan: low_rank(run, plan) for plan in layout.plans}
    partial_ones = partial_gradients(part, layout) - sum(sums.partial for sums in in_low_rank.values())
    replicated = along(all_reduce, layout.ranks.cuts)(purpose="replicated gradients", elements=partial_ones)
    target, rank = Target.of(layout), run.optimizer.gradient_rank
    root = (p for p in part.root_parameters() if not p.is_frozen and not has_low_rank(p, rank))
    last = sum(parameter.on(target).size for parameter in root)
    local = [
        along(all_reduce, plan.tokens)(
            purpose="gradients" if plan is layout.ranks else "gradients of experts",
            overlap=Overlap.BUCKETS,
            elements=trained_parameters_per_rank(part, layout, plan) - in_low_rank[plan].gradients,
            last_elements=last if plan is layout.ranks else 0,
        )
        for plan in layout.plans
    ]
    summed = at_once(*(collective for collective in local if collective.elements))
    return [*([replicated] if partial_ones else []), *summed]


def _totals(run: Planned, all_reduce: partial[Collective]) -> list[Collective]:
    """All-reduces of single numbers, once per step.

    The tensor ranks sum the squared gradients of sharded parameters for the gradient norm; data ranks that shard one
    copy sum the squares of their shards. Both sums are float64. The data ranks sum the number of target tokens (and, if
    the model predicts the order of segments, the number of pairs in the same message). The ranks of a pipeline sum the
    squares of all stages. At the end of the step, the data ranks sum the loss, and a verdict that tells whether every
    rank's gradients are finite. The ranks of a pipeline also sum the loss and the verdict, because only the last stage
    has the loss. If layers return sums beside the residual stream, such as the loads of experts, the data ranks and the
    ranks of a pipeline sum them. With a teacher, they sum the two parts of the loss.
    """
    ranks = run.layout.ranks
    norm = partial(all_reduce, elements=1, element_bytes=8)
    over_tokens = along(all_reduce, ranks.tokens)
    whole = describe(run.model)
    sums = sum(whole.layer_figures.values()) + len(whole.layer_terms) if whole.layer_figures else 0
    return [
        along(norm, ranks.cuts)(purpose="gradient norm"),
        along(norm, ranks.slices)(purpose="gradient norm of all shares"),
        *_norm_of_experts(run, norm),
        over_tokens(purpose="target tokens", elements=len(describe(run.model).loss_terms), element_bytes=8),
        over_tokens(purpose="reported loss and verdict", elements=2),
        over_tokens(purpose="sums of the layers", elements=sums, element_bytes=8, count=int(sums > 0)),
        *(
            along(norm, line)(purpose="parts of the loss", elements=2, count=int(run.teacher.teaches))
            for line in (ranks.tokens, ranks.owners)
        ),
        along(norm, ranks.owners)(purpose="gradient norm of all stages"),
        along(all_reduce, ranks.owners)(purpose="loss of the last stage and verdict", elements=2),
        along(all_reduce, ranks.owners)(
            purpose="sums of the layers", elements=sums, element_bytes=8, count=int(sums > 0)
        ),
    ]
