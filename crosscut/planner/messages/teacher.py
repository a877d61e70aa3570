"""Messages of a run's teacher: those of its forward passes, and the exchange of its inputs and results.

They are sent once for each micro-batch, on the ranks that compute the loss.
"""

from collections.abc import Iterator
from functools import partial

from crosscut.architecture import Operation, Overlap, flat, lower, lower_root
from crosscut.architecture.messages import Phase, forward_messages
from crosscut.config.teachers import TEACHER, TEACHER_SHARES, TEACHER_TOKENS
from crosscut.planner.candidate import Planned
from crosscut.planner.messages.collective import Collective, along
from crosscut.planner.teacher import (
    fields_of_teacher,
    learns_labels,
    parts_of_teacher,
    result_of_teacher,
    teacher_target,
)

DIVERGENCES = (("largest logits of both models", 2), ("sums of both models", 2), ("divergences", 2))
"""Name of each all-reduce of the teacher's part in the loss over the tensor ranks, and its size in numbers per token
(`parallel.distillation`)."""
_ID_BYTES = 8


def teacher_messages(run: Planned) -> Iterator[Collective]:
    """Yield the collectives of the teacher in a step, except those of the loss."""
    ranks, number = run.teacher_ranks, run.num_micro_batches
    target, sequences = teacher_target(run), run.micro_batch_size
    gather = partial(Collective, operation=Operation.ALL_GATHER, phase=Phase.FORWARD, count=number)
    tokens, shares = ranks.lines[TEACHER_TOKENS], ranks.lines[TEACHER_SHARES]
    own = len(fields_of_teacher(run)) * sequences * run.training.sequence_length // run.layout.context
    yield along(gather, tokens)(purpose="teacher's tokens", elements=tokens.size * own, element_bytes=_ID_BYTES)
    (trunk, _), *_ = parts_of_teacher(run)
    embedding, head = lower_root(trunk, target)
    ends = (*embedding, *(head if learns_labels(run) else ()))
    passes = [(ends, 1), *((flat(lower(layer, target)), count) for layer, count in trunk.kinds.items())]
    for steps, count in passes:
        for sent in forward_messages(steps):
            message = sent.message
            yield Collective(
                operation=message.operation,
                axis=TEACHER,
                phase=Phase.FORWARD,
                purpose=f"teacher's {sent.label}",
                count=message.pieces * message.count * count * number,
                elements=message.elements // message.pieces,
                element_bytes=target.bytes_of(message.kind),
                ranks=ranks.lines[TEACHER].size,
                overlap=Overlap.NOTHING,
            )
    results = shares.size * result_of_teacher(run).elements(target)
    yield along(gather, shares)(purpose="teacher's results", elements=results, element_bytes=target.compute_bytes)
