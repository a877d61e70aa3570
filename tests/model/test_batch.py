"""Named tensors of a batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from crosscut.architecture.inputs import Inputs
from crosscut.config import IGNORED, ConfigError
from crosscut.model import Batch
from crosscut.parallel import Axis

IDS = torch.arange(20).view(4, 5)


def test_every_token_is_to_be_predicted_from_the_earlier_ones() -> None:
    batch = Batch.from_ids(IDS)
    assert torch.equal(batch.tokens + 1, batch.targets)
    assert batch.tokens.shape == (4, 4)


def test_targets_that_are_ignored_do_not_count() -> None:
    targets = IDS.masked_fill(IDS % 3 == 0, IGNORED)
    assert int(Batch(tokens=IDS, targets=targets).num_targets) == 13


def test_parts_hold_the_sequences_in_their_order_in_every_field() -> None:
    parts = Batch(tokens=IDS, targets=IDS + 1, segments=IDS + 2).chunk(2)
    for name, added in {"tokens": 0, "targets": 1, "segments": 2}.items():
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), IDS + added)
    assert all(part.positions is None for part in parts)


def test_a_rank_has_an_early_and_a_late_piece_in_every_field_and_their_places() -> None:
    ids = torch.arange(32).view(4, 8)
    batch = Batch(tokens=ids, targets=ids + 1).with_documents(3)
    axis = Axis("context", DeviceMesh.__new__(DeviceMesh), 1, 2, "")
    part = batch.part_of_rank(axis)
    assert part.places.tolist() == [2, 3, 4, 5]
    for name in ("tokens", "targets", "documents", "positions"):
        assert torch.equal(getattr(part, name), getattr(batch, name)[:, 2:6])
    alone = replace(axis, rank=0, size=1)
    assert batch.part_of_rank(alone) is batch


def test_all_tensors_move_to_a_device() -> None:
    moved = Batch(tokens=IDS, targets=IDS, mask=IDS > 3).to_device(torch.device("meta"))
    assert [tensor.device.type for tensor in moved.tensors()] == ["meta"] * 3
    assert moved.positions is None


def test_all_tensors_are_recorded_on_a_stream() -> None:
    class Recorded(torch.Tensor):
        streams: list[object]

        def record_stream(self, stream: object) -> None:
            self.streams = [stream]

    tokens, mask = (IDS.clone().as_subclass(Recorded) for _ in range(2))
    stream = object()
    Batch(tokens=tokens, targets=tokens, mask=mask).record_stream(stream)  # type: ignore[arg-type]
    assert tokens.streams == mask.streams == [stream]


def test_the_tokens_to_predict_are_those_with_a_target_and_a_few_to_fill_up() -> None:
    targets = torch.full((4, 50), IGNORED)
    targets[1, 7], targets[3, 2:4] = 5, 6
    few = Batch(tokens=targets, targets=targets).with_predicted(0.15)
    assert few.predicted[:3].tolist() == [57, 152, 153]
    assert len(few.predicted) == len(set(few.predicted.tolist())) == 32  # eight times an eighth of 30, rounded up
    targets[0] = 1
    many = Batch(tokens=targets, targets=targets).with_predicted(0.15)
    assert len(many.predicted) == 56
    assert set(many.predicted.tolist()) >= {*range(50), 57, 152, 153}
    targets[:] = 1
    every = Batch(tokens=targets, targets=targets).with_predicted(0.15)
    assert every.predicted.tolist() == list(range(200))


def test_documents_and_positions_come_together() -> None:
    message = r"^A batch with documents must have positions, too, but has none\. Give both or none\.$"
    with pytest.raises(ConfigError, match=message):
        Batch(tokens=IDS, targets=IDS, documents=IDS)
    with pytest.raises(ConfigError, match=r"^A batch with positions must have documents"):
        Batch(tokens=IDS, targets=IDS, positions=IDS)


@pytest.mark.parametrize("hides", [True, False])
def test_every_field_of_tokens_has_its_own_padding(hides: bool) -> None:
    padded = Batch(tokens=IDS, targets=IDS, segments=IDS % 2, order=IDS[:, 0]).padded(2, hides=hides)
    assert padded.tokens[0].tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert padded.targets[0].tolist() == [0, 1, 2, 3, 4, IGNORED, IGNORED]
    assert padded.segments[0].tolist() == [0, 1, 0, 1, 0, 0, 0]
    assert padded.order is not None and padded.order.tolist() == [0, 5, 10, 15]
    shown = None if padded.mask is None else padded.mask[0].tolist()
    assert shown == ([True] * 5 + [False] * 2 if hides else None)


def test_arrays_become_tensors_that_share_their_memory_and_fields_that_are_not_read_are_left_out() -> None:
    arrays = Inputs(tokens=np.zeros((2, 3), dtype=np.int64), segments=np.ones((2, 3), dtype=np.int64))
    batch = Batch.of(arrays, {"tokens", "mask"})
    assert list(batch.given()) == ["tokens"]
    arrays.tokens[0, 0] = 7
    assert int(batch.tokens[0, 0]) == 7


def test_a_batch_that_context_ranks_share_loses_no_field() -> None:
    axis = Axis("context", DeviceMesh.__new__(DeviceMesh), 1, 2, "")
    with pytest.raises(AssertionError, match="would be lost"):
        Batch(tokens=torch.zeros(4, 8), order=torch.zeros(4)).part_of_rank(axis)


def test_parts_of_a_batch_lose_no_field() -> None:
    with pytest.raises(AssertionError, match="are not those of its parts"):
        Batch(tokens=IDS, targets=IDS).with_predicted(0.5).chunk(2)


def test_parts_divide_the_sequences() -> None:
    message = r"^`num_parts` must divide the batch's number of sequences \(4\), but is 3\. Try 1, 2 or 4\."
    with pytest.raises(ConfigError, match=message):
        Batch(tokens=torch.zeros(4, 2), targets=torch.zeros(4, 2)).chunk(3)
