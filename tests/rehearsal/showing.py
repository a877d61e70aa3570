"""Messages that `crosscut show` lists, beside those of a dry run."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from crosscut.planner.messages.collective import Collective
from crosscut.planner.messages.traffic import step_traffic
from crosscut.planner.showing import Shown, shown
from crosscut.rehearsal import Rehearsal
from tests.rehearsal.cases import Messages, counted, sent_messages

Order = list[tuple[str, str, int]]
"""Operation, axis and elements of messages, in order."""


def check_shown(rehearsal: Rehearsal) -> None:
    """Require that all messages are those of a dry run, and those of a micro-batch also in their order."""
    run = rehearsal.run
    found = shown(run, device=rehearsal.device)
    assert sorted(number for block in found.blocks for number in block.numbers) == list(range(run.model.num_layers))
    assert all_messages(found, run.num_micro_batches) == sent_messages(rehearsal)
    if run.model.sentence_order:
        return  # the loss of the order of segments comes after that of the tokens, and both are one step
    expected = micro_batch(found) * run.num_micro_batches
    sent = ((m.operation, m.axis, m.elements) for m in rehearsal.sent)
    assert all(message in sent for message in expected)  # sums of gradients may come between them


def check_shown_of_stages(stages: Sequence[Rehearsal]) -> None:
    """Require that the messages of all layers are those of the dry runs of all stages, without the messages of a step
    that belong to no layer.
    """
    run = stages[0].run
    layers = replace(shown(run, device=stages[0].device), others=())
    named = {m.purpose for block in layers.blocks for m in (*block.forward, *block.backward)}
    traffic = (m for stage in stages for m in step_traffic(stage.planned, compiled=False))
    others = counted(m for m in traffic if m.purpose not in named)
    sent = sum((sent_messages(stage) for stage in stages), Counter())
    assert all_messages(layers, run.num_micro_batches) + others == sent


def all_messages(found: Shown, num_micro_batches: int) -> Messages:
    """Messages of a step."""
    total: Messages = Counter()
    for block in found.blocks:
        for m in (*block.forward, *block.backward):
            times = num_micro_batches * max(len(block.numbers), 1)
            total[(m.operation, m.axis, m.elements, m.element_bytes)] += m.count * times
    return total + counted(found.others)


def micro_batch(found: Shown) -> Order:
    """Messages of the forward and the backward pass of one micro-batch through all layers."""
    embedding, *kinds, head = found.blocks
    layers = {number: block for block in kinds for number in block.numbers}
    blocks = [embedding, *(layers[number] for number in sorted(layers)), head]
    passes = [*(block.forward for block in blocks), *(block.backward for block in reversed(blocks))]
    return [message for messages in passes for message in one_by_one(messages)]


def one_by_one(messages: Iterable[Collective]) -> Order:
    return [(m.operation, m.axis, m.elements) for m in messages for _ in range(m.count)]
