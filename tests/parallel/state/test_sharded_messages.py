"""The record of a rank lists the messages that `fully_shard` sends, and recording them changes no number."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.flight import RECORD, Kind, Phase
from crosscut.flight.reading import Message, parse_record, place_name
from crosscut.flight.record import DONE
from crosscut.parallel import make_reducer
from crosscut.parallel.recorder import CollectiveRecorder
from crosscut.parallel.state import sharding
from tests.model.twins import IGNORED, batch, build, train
from tests.ranks import RankPool

ZERO_2, ZERO_3 = Layout(data=2, sharding="zero2"), Layout(data=2, sharding="zero3")
COPIES = Layout(data=4, shard_group=2, sharding="zero3")
ROOT = "embedding and output layer"
OPERATIONS = {Kind.ALL_GATHER: "all_gather", Kind.REDUCE_SCATTER: "reduce_scatter", Kind.ALL_REDUCE: "all_reduce"}


def messages_of_step(layout: Layout, copy: Any) -> tuple[list[Message], list[tuple[str, str, int]]]:
    """Messages of one step, as the record of this rank and as the recorder of operators has them."""
    model = build(layout)
    reducer = make_reducer(model, model.mesh)
    tokens, targets = batch(0)
    own = [x.chunk(layout.data)[model.mesh.data.rank].chunk(2) for x in (tokens, targets)]
    RECORD.open(rank=0, world_size=layout.data)
    path = copy / f"record-{model.mesh.data.rank}"
    try:
        with CollectiveRecorder(model.mesh) as recorder:
            for i, (x, y) in enumerate(zip(*own, strict=True)):
                if i == len(own[0]) - 1:
                    reducer.arm()
                RECORD.phase(Phase.FORWARD, 0)
                loss = model.loss(x, y, scale=1.0 / float((targets != IGNORED).sum()))
                RECORD.phase(Phase.BACKWARD)
                loss.backward()
            reducer.finish()
        RECORD.copy_to(path)
    finally:
        RECORD.close()
    return list(parse_record(path.read_bytes()).messages.values()), [tuple(sent) for sent in recorder.sent]


@pytest.mark.parametrize("layout", [ZERO_2, ZERO_3, COPIES], ids=["zero2", "zero3", "copies"])
def test_the_record_lists_every_message(ranks: RankPool, tmp_path: Any, layout: Layout) -> None:
    size = layout.shard_group or layout.data
    for listed, sent in ranks.run(layout.data, messages_of_step, layout, tmp_path):
        assert [
            (OPERATIONS[m.kind], m.axis, m.elements * (size if m.kind is Kind.ALL_GATHER else 1)) for m in listed
        ] == sent
        assert all(message.state == DONE for message in listed)
        assert ("replica" in {message.axis for message in listed}) == (layout is COPIES)


def test_a_message_names_the_layer_whose_weights_it_carries(ranks: RankPool, tmp_path: Any) -> None:
    listed, _ = ranks.run(2, messages_of_step, ZERO_3, tmp_path)[0]
    of_pass = [(m.phase, m.kind, place_name(m.place)) for m in listed[: len(listed) // 2]]  # of the first micro-batch
    assert of_pass[:3] == [(Phase.FORWARD, Kind.ALL_GATHER, name) for name in (ROOT, "layer 0", "layer 1")]
    assert Counter(of_pass[3:]) == Counter(
        [(Phase.BACKWARD, Kind.ALL_GATHER, f"layer {i}") for i in (0, 1)]
        + [(Phase.BACKWARD, Kind.REDUCE_SCATTER, name) for name in ("layer 0", "layer 1", ROOT)]
    )


def train_recorded(layout: Layout, recorded: bool) -> list[Tensor]:
    """Losses, gradients and parameters of a step. Without the record, PyTorch's own objects send the messages."""
    with pytest.MonkeyPatch.context() as patch:
        if recorded:
            RECORD.open(rank=0, world_size=layout.data)
        else:
            patch.setattr(sharding, "record_messages", lambda *_: None)
        try:
            result = train(layout, torch.float32, 1, 4 // layout.data)
        finally:
            RECORD.close()
    numbers = [torch.tensor(result["losses"]), torch.tensor(result["norms"])]
    return [*numbers, *result["gradients"].values(), *result["parameters"].values()]


def test_recording_changes_no_bit(ranks: RankPool) -> None:
    plain, recorded = (ranks.run(4, train_recorded, COPIES, is_on)[0] for is_on in (False, True))
    assert len(plain) == len(recorded) > 10
    assert all(torch.equal(before, after) for before, after in zip(plain, recorded, strict=True))
