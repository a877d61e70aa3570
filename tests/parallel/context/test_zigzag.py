"""The part of a sequence that each context rank has."""

import pytest
import torch

from crosscut.config import LayoutError
from crosscut.parallel.context import join_zigzag, split_zigzag


def test_each_rank_has_an_early_and_a_late_piece() -> None:
    parts = split_zigzag(torch.arange(16), 4, 0)
    assert [part.tolist() for part in parts] == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_every_rank_has_the_same_number_of_causal_pairs() -> None:
    parts = split_zigzag(torch.arange(24), 3, 0)
    assert len({int(part.add(1).sum()) for part in parts}) == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_joined_parts_are_the_sequence(num_ranks: int) -> None:
    x = torch.randn(2, 12, 3)
    assert torch.equal(join_zigzag(split_zigzag(x, num_ranks, 1), 1), x)


def test_pieces_must_be_equal() -> None:
    with pytest.raises(LayoutError, match=r"must be a multiple of 8 \(two equal pieces for each rank\), but is 12"):
        split_zigzag(torch.arange(12), 4, 0)
