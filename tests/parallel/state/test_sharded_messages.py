"""The record of a rank lists the messages that `fully_shard` sends, and recording them changes no number."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.flight import RECORD, MessageKind, RunPhase
from crosscut.flight.places import place_name
from crosscut.flight.reading import RankMessage, parse_record
from crosscut.flight.record import DONE
from crosscut.model import GPT
from crosscut.parallel import make_reducer
from crosscut.parallel.recorder import CollectiveRecorder
from crosscut.parallel.state import sharding
from crosscut.parallel.state.parameters import local_part
from tests.model.twins import batch, build
from tests.ranks import RankPool

ZERO_2, ZERO_3 = Layout(data=2, sharding="zero2"), Layout(data=2, sharding="zero3")
COPIES = Layout(data=4, shard_group=2, sharding="zero3")
ROOT = "embedding and output layer"
OPERATIONS = {
    MessageKind.ALL_GATHER: "all_gather",
    MessageKind.REDUCE_SCATTER: "reduce_scatter",
    MessageKind.ALL_REDUCE: "all_reduce",
}


def gradients_of(model: GPT, layout: Layout) -> list[Tensor]:
    """This rank's parts of the gradients of one step, whose data ranks have two micro-batches at most."""
    reducer = make_reducer(model, model.mesh)
    whole = batch(0)
    micro_batches = whole.chunk(layout.data)[model.mesh.data.rank].chunk(min(2, len(whole.tokens) // layout.data))
    for i, own in enumerate(micro_batches):
        if i == len(micro_batches) - 1:
            reducer.arm()
        RECORD.phase(RunPhase.FORWARD, 0)
        loss = model.loss(own, {"tokens": 1.0 / float(whole.num_targets)})
        RECORD.phase(RunPhase.BACKWARD)
        loss.backward()
    reducer.finish()
    return [local_part(parameter.grad) for parameter in model.parameters()]


def messages_of_step(layout: Layout, copy: Any) -> tuple[list[RankMessage], list[tuple[str, str, int]], list[Tensor]]:
    """Messages of one step, as the record of this rank and as the recorder of operators has them, and its gradients."""
    model = build(layout)
    RECORD.open(rank=0, world_size=layout.data)
    path = copy / f"record-{model.mesh.data.rank}"
    try:
        with CollectiveRecorder(model.mesh) as recorder:
            gradients = gradients_of(model, layout)
        RECORD.copy_to(path)
    finally:
        RECORD.close()
    messages = parse_record(path.read_bytes()).messages.values()
    return list(messages), [tuple(sent) for sent in recorder.sent], gradients


def gradients_without_record(layout: Layout) -> list[Tensor]:
    """Gradients of the same step if PyTorch's own objects send the messages."""
    with mock.patch.object(sharding, "record_messages", lambda *_: None):
        return gradients_of(build(layout), layout)


@pytest.mark.parametrize("layout", [ZERO_2, ZERO_3, COPIES], ids=["zero2", "zero3", "copies"])
def test_the_record_lists_every_message(ranks: RankPool, tmp_path: Any, layout: Layout) -> None:
    size = layout.shard_group or layout.data
    for listed, sent, _ in ranks.run(layout.data, messages_of_step, layout, tmp_path):
        assert [
            (OPERATIONS[m.kind], m.axis, m.elements * (size if m.kind is MessageKind.ALL_GATHER else 1)) for m in listed
        ] == sent
        assert all(message.state == DONE for message in listed)
        assert ("replica" in {message.axis for message in listed}) == (layout is COPIES)


def test_a_message_names_the_layer_whose_weights_it_carries(ranks: RankPool, tmp_path: Any) -> None:
    listed, *_ = ranks.run(2, messages_of_step, ZERO_3, tmp_path)[0]
    of_pass = [(m.phase, m.kind, place_name(m.place)) for m in listed[: len(listed) // 2]]  # of the first micro-batch
    assert of_pass[:3] == [(RunPhase.FORWARD, MessageKind.ALL_GATHER, name) for name in (ROOT, "layer 0", "layer 1")]
    assert Counter(of_pass[3:]) == Counter(
        [(RunPhase.BACKWARD, MessageKind.ALL_GATHER, f"layer {i}") for i in (0, 1)]
        + [(RunPhase.BACKWARD, MessageKind.REDUCE_SCATTER, name) for name in ("layer 0", "layer 1", ROOT)]
    )


def test_recording_changes_no_bit(ranks: RankPool, tmp_path: Any) -> None:
    recorded = ranks.run(4, messages_of_step, COPIES, tmp_path)
    for (_, _, after), before in zip(recorded, ranks.run(4, gradients_without_record, COPIES), strict=True):
        assert len(before) == len(after) > 10
        assert all(map(torch.equal, before, after))
        assert any(gradient.any() for gradient in before)
