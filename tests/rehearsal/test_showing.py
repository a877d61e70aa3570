"""`crosscut show` lists the messages that the program sends, in the order in which it sends them."""

from collections import Counter
from collections.abc import Iterable

import pytest

from crosscut.planner.messages.collective import Collective
from crosscut.planner.showing import Shown, shown
from crosscut.rehearsal import rehearse
from tests.rehearsal.cases import SMALL, Case, Messages, sent_messages

CASES = [case for case in SMALL if case.run.layout.world_size > 1]

Order = list[tuple[str, str, int]]
"""Operation, axis and elements of messages, in order."""


def one_by_one(messages: Iterable[Collective]) -> Order:
    return [(m.operation, m.axis, m.elements) for m in messages for _ in range(m.count)]


def micro_batch(found: Shown) -> Order:
    """Messages of the forward and the backward pass of one micro-batch through all layers."""
    embedding, *kinds, head = found.blocks
    layers = dict(sorted((number, block) for block in kinds for number in block.numbers))
    forward = [embedding, *layers.values(), head]
    blocks = [*(block.forward for block in forward), *(block.backward for block in reversed(forward))]
    return [message for messages in blocks for message in one_by_one(messages)]


def all_messages(found: Shown, case: Case) -> Messages:
    counted: Messages = Counter()
    for block in found.blocks:
        times = case.run.num_micro_batches * max(len(block.numbers), 1)
        for m in (*block.forward, *block.backward):
            counted[(m.operation, m.axis, m.elements, m.element_bytes)] += m.count * times
    for m in found.others:
        counted[(m.operation, m.axis, m.elements, m.element_bytes)] += m.count
    return counted


@pytest.mark.one_in(23)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shown_messages_are_those_of_a_dry_run_in_order(case: Case) -> None:
    found, rehearsal = shown(case.run, device=case.device), rehearse(case.run, device=case.device)
    assert all_messages(found, case) == sent_messages(rehearsal)
    if case.run.model.sentence_order:
        return  # the loss of the order of segments comes after that of the tokens, and both are one step
    expected = micro_batch(found) * case.run.num_micro_batches
    sizes = set(expected)  # so that sums of gradients between them do not count
    sent = [message for message in ((m.operation, m.axis, m.elements) for m in rehearsal.sent) if message in sizes]
    assert any(sent[i : i + len(expected)] == expected for i in range(len(sent) - len(expected) + 1))


def test_every_layer_of_every_case_is_shown_once() -> None:
    for case in SMALL:
        found = shown(case.run, device=case.device)
        numbers = [number for block in found.blocks for number in block.numbers]
        assert sorted(numbers) == list(range(case.run.model.num_layers)), case.name
