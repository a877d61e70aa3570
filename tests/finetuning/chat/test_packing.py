"""Packed conversations: whole, apart from each other, the same on every layout."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from crosscut.config import IGNORED, DataError, Layout, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from crosscut.finetuning.chat.batches import ChatBatches
from crosscut.finetuning.chat.masking import EncodedConversation
from crosscut.finetuning.chat.packing import PackedChats, pack
from crosscut.model import Batch
from crosscut.parallel import make_mesh
from tests.model.twins import CONFIG, build
from tests.ranks import RankPool

CPU = torch.device("cpu")


def encoded(*sizes: int) -> list[EncodedConversation]:
    """Conversations of `sizes` tokens, each with an answer in its second half."""
    found = []
    for i, size in enumerate(sizes):
        ids = np.arange(size, dtype=np.int64) + 20 * (i + 1)
        found.append(EncodedConversation(f"chats.jsonl:{i + 1}", ids, np.arange(size) >= size // 2))
    return found


def test_a_sequence_holds_whole_conversations_and_targets_of_answers_only():
    packed = pack(encoded(5, 4), length=8, padding=7)
    assert packed.tokens.tolist() == [[20, 21, 22, 23, 40, 41, 42, 7]]
    no = IGNORED
    assert packed.targets.tolist() == [[no, 22, 23, 24, no, 42, 43, no]]
    assert packed.documents.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert packed.places.tolist() == ["chats.jsonl:1\nchats.jsonl:2"]
    assert packed.num_targets == 5


def test_every_conversation_is_packed_once_into_few_sequences():
    sizes = [3, 9, 4, 7, 2, 8, 5, 6, 3, 4]
    packed = pack(encoded(*sizes), length=8, padding=0)
    assert sorted("\n".join(packed.places).split("\n"), key=lambda place: int(place.split(":")[1])) == [
        f"chats.jsonl:{i + 1}" for i in range(len(sizes))
    ]
    assert packed.num_sequences == -(-sum(size - 1 for size in sizes) // 8)


def test_conversations_that_do_not_fit_are_counted():
    message = (
        r"Every conversation must fit into `training.sequence_length` \(8 tokens\), but 2 of 3 do not. The longest, "
        r"chats.jsonl:3, has 11 tokens. Set training.sequence_length=11, or pass --drop-long"
    )
    with pytest.raises(DataError, match=message):
        pack(encoded(10, 9, 12), length=8, padding=0)


def test_sequences_are_stored(tmp_path):
    packed = pack(encoded(5, 4, 8), length=8, padding=7)
    packed.save(tmp_path / "chats.npz")
    again = PackedChats.load(tmp_path / "chats.npz")
    assert again.fingerprint == packed.fingerprint
    assert again.places.tolist() == packed.places.tolist()
    whole = (tmp_path / "chats.npz").read_bytes()
    middle = len(whole) // 4
    for damaged in (b"no", b"", whole[: len(whole) // 2], whole[:middle] + b"\xff" * 40 + whole[middle + 40 :]):
        (tmp_path / "chats.npz").write_bytes(damaged)
        with pytest.raises(DataError, match="must hold the packed conversations of the run, but cannot be read"):
            PackedChats.load(tmp_path / "chats.npz")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", np.zeros(8, dtype=np.int32)),
        ("tokens", np.full((1, 8), -1)),
        ("targets", np.full((1, 8), -5)),
        ("documents", np.zeros((1, 7), dtype=np.int32)),
        ("positions", np.full((1, 8), np.nan)),
        ("places", np.zeros(1)),
        ("places", np.array(["a", "b"])),
    ],
)
def test_arrays_that_contradict_each_other_are_not_read(tmp_path, name, value):
    replace(pack(encoded(5, 4), length=8, padding=7), **{name: value}).save(tmp_path / "chats.npz")
    with pytest.raises(DataError, match="cannot be read: the types, shapes or values of its arrays contradict"):
        PackedChats.load(tmp_path / "chats.npz")


def test_an_epoch_holds_every_sequence_once_in_an_order_of_its_own():
    packed = pack(encoded(*[9] * 6), length=8, padding=0)
    first, second = (packed.indices(6 * epoch, 6, seed=3).tolist() for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second
    assert packed.indices(4, 4, seed=3).tolist() == [*first[4:], *second[:2]]
    assert packed.indices(0, 6, seed=4).tolist() != first


def _batches(layout: Layout, step: int) -> list[tuple[list[list[int]], list[list[int]]]]:
    packed = pack(encoded(*[9] * 5), length=8, padding=0)
    model = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=300, max_sequence_length=8)
    training = TrainingConfig(batch_size=4, sequence_length=8, steps=3, document_mask=True)
    run = RunConfig(model=model, layout=layout, training=training, optimizer=OptimizerConfig(warmup_steps=0))
    batches = ChatBatches(run, packed, packed, make_mesh(layout, CPU))
    sets = (batches.micro_batches(step), batches.validation_batches())
    return [[(each.tokens.tolist(), each.targets.tolist()) for each in batch] for batch in sets]


def test_batches_do_not_depend_on_the_layout(ranks: RankPool) -> None:
    ((alone, validation),) = ranks.run(1, _batches, Layout(), 1)
    halves = ranks.run(2, _batches, Layout(data=2), 1)
    assert [row for ((tokens, _),) in (each[0] for each in halves) for row in tokens] == alone[0][0]
    for training, _ in ranks.run(2, _batches, Layout(tensor=2), 1):
        assert training == alone
    scored = [row for _, part in halves for _, targets in part for row in targets if set(row) != {IGNORED}]
    whole = [row for _, targets in validation for row in targets if set(row) != {IGNORED}]
    assert len(whole) == 5
    assert sorted(scored) == sorted(whole)


def _losses(layout: Layout) -> list[float]:
    """On a rank: the loss of two conversations packed together, and the sum of their losses alone."""
    model = build(layout, config=CONFIG)
    together = pack(encoded(9, 6), length=16, padding=0)
    alone = [pack([each], length=16, padding=0) for each in encoded(9, 6)]

    def loss(packed: PackedChats) -> float:
        return model.loss(Batch.of(packed.rows(np.array([0])))).item()

    return [loss(together), sum(map(loss, alone))]


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, sequence_parallel=True)], ids=str)
def test_packed_conversations_do_not_see_each_other(ranks: RankPool, layout: Layout) -> None:
    for together, alone in ranks.run(layout.world_size, _losses, layout):
        assert together == pytest.approx(alone, rel=1e-12)
