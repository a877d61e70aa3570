"""Messages of one rank of a pipeline: hidden states and their gradients, and the gradient of a tied embedding.

Each stage but the last sends its output to the next stage, and each stage but the first sends the gradient of its input
back, whatever the schedule. If the embedding is tied, the first and the last rank both hold the embedding, and sum the
gradients of the two copies once per step.
"""

from functools import partial

from crosscut.architecture import Operation, Target
from crosscut.architecture.messages import Phase
from crosscut.planner.candidate import Planned, pipeline_rank_of
from crosscut.planner.messages.collective import Collective
from crosscut.planner.parameters import Shares
from crosscut.planner.stages import part_of, stages_of


def stage_messages(run: Planned, target: Target) -> list[Collective]:
    """Tensors that a rank of a pipeline sends to other stages in one step. The tensor of a micro-batch is [b, s, h]
    (sequences, tokens, hidden size). If the sequence is split, the rank sends only its own part of this tensor. Empty
    without a pipeline.
    """
    if run.layout.num_stages == 1:
        return []
    stages = stages_of(run, pipeline_rank_of(run))
    to_next, back = sum(not stage.is_last for stage in stages), sum(not stage.is_first for stage in stages)
    send = partial(
        Collective,
        operation=Operation.SEND,
        axis=run.layout.ranks.owners.name,
        elements=target.own_tokens * run.model.hidden_size,
        element_bytes=target.compute_bytes,
        ranks=2,
    )
    return [
        send(phase=Phase.FORWARD, purpose="hidden states", count=run.num_micro_batches * to_next),
        send(phase=Phase.BACKWARD, purpose="gradients of hidden states", count=run.num_micro_batches * back),
    ]


def tied_gradients(run: Planned, all_reduce: partial[Collective]) -> list[Collective]:
    """All-reduce of the gradient of a tied embedding over the first and the last rank of a pipeline. Empty on other
    ranks, and if the embedding is frozen.
    """
    layout, part = run.layout, part_of(run)
    tokens = part.embedding.tokens.on(Target.of(layout))
    if not _holds_tied(run) or tokens.is_frozen:
        return []
    share = Shares.of(layout).own(tokens)
    return [all_reduce(axis=_ends(run), purpose="gradient of the tied embedding", elements=share, ranks=2)]


def compared_ends(run: Planned, all_reduce: partial[Collective]) -> list[Collective]:
    """All-reduce that compares the two copies of a tied embedding on the first and the last rank of a pipeline.
    `all_reduce` creates a message for the comparison of replicas.
    """
    if not _holds_tied(run):
        return []
    return [all_reduce(axis=_ends(run), purpose="hashes of the tied embedding", elements=2 + 1, ranks=2)]


def _holds_tied(run: Planned) -> bool:
    """Whether the rank holds a tied embedding that another rank of the pipeline also holds."""
    part = part_of(run)
    return run.layout.num_stages > 1 and part.head.uses_embedding and (part.is_first or part.is_last)


def _ends(run: Planned) -> str:
    """Name of the line of the first and the last rank of a pipeline. A pipeline of two ranks has no other ranks."""
    owners = run.layout.ranks.owners
    return owners.name if owners.size == 2 else "ends"
