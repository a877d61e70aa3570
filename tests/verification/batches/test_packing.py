"""Packed sequences verified: documents that do not see each other compute what they compute apart, on every layout."""

from typing import Any

import pytest
import torch

from crosscut.config import IGNORED, Layout
from crosscut.model import Batch
from crosscut.verification.batches.packing import pack, separated
from tests.ranks import RankPool
from tests.verification.runs import BERT, LLAMA, proven

CASES = [
    (Layout(tensor=2, sequence_parallel=True), {}, {"recompute": "operators", "micro_batch_size": 1}),
    (Layout(), {}, {}),
    (Layout(tensor=2), {"num_kv_heads": 2}, {"recompute": "selective"}),
    (Layout(tensor=4, sequence_parallel=True), {}, {"recompute": "operators", "micro_batch_size": 1}),
    (Layout(tensor=2, data=2, sharding="zero3"), {}, {"recompute": "full", "offload": ("activations",)}),
    (Layout(data=2, sharding="zero2"), {**LLAMA, "qk_norm": True}, {"micro_batch_size": 1}),
    (Layout(tensor=4, sequence_parallel=True), {**LLAMA, "num_kv_heads": 2}, {"recompute": "full"}),
    (Layout(tensor=2, sequence_parallel=True), {**LLAMA, "dropout": 0.0}, {"compile": "on"}),
    (Layout(tensor=2, sequence_parallel=True), {**BERT, "dropout": 0.0}, {"compile": "on"}),
    (Layout(tensor=2, data=2, sharding="zero3"), BERT, {"recompute": "full"}),
    (Layout(tensor=4), {**BERT, "norm_place": "before"}, {"recompute": "operators", "micro_batch_size": 1}),
]


@pytest.mark.one_in(11)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("layout", "model", "training"), CASES, ids=str)
def test_documents_of_a_packed_sequence_are_as_apart(
    ranks: RankPool, layout: Layout, model: dict[str, Any], training: dict[str, Any]
) -> None:
    report = proven(ranks, layout, training={"document_mask": True, **training}, **model)
    check = next(check for check in report.checks if check.name == "documents")
    assert check.difference < 1e-12
    assert check.told.startswith("4 per sequence, against separate sequences; largest at ")


def test_sequences_are_packed_with_documents_of_several_lengths() -> None:
    tokens = torch.randint(0, 9, (50, 17), generator=torch.Generator().manual_seed(1))
    before = tokens.clone()
    pack(tokens, end_of_text=1, num_free=12, generator=torch.Generator().manual_seed(2))
    assert (tokens == 1).sum(1).tolist() == [3] * 50
    assert {place for row in tokens.tolist() for place in range(17) if row[place] == 1} == set(range(1, 13))
    assert torch.equal(tokens[:, 13:], before[:, 13:].masked_fill(before[:, 13:] == 1, 0))


def test_documents_are_cut_out_with_their_targets() -> None:
    batch = Batch.from_ids(torch.tensor([[4, 5, 1, 6, 7], [1, 5, 1, 6, 1]]))
    first, second = separated(batch, end_of_text=1)
    assert first.tokens.tolist() == [[4, 5, 0, 0], [1, 6, 0, 0]]
    assert first.targets.tolist() == [[5, 1, IGNORED, IGNORED], [6, 7, IGNORED, IGNORED]]
    assert second.tokens.tolist() == [[1, 5, 0, 0], [1, 6, 0, 0]]
    assert second.targets.tolist() == [[5, 1, IGNORED, IGNORED], [6, 1, IGNORED, IGNORED]]
