"""Texts that are read in pieces, beside other texts, give the hidden states of a whole forward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.model import Batch, GenerationCache
from tests.generation.models import make
from tests.ranks import RankPool

PIECES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (0, (3, 1)),
    (0, (0, 5)),  # the first row reads nothing
    (1, (4, 0)),  # the first row does not take part
    (0, (1, 1, 1)),
    (0, (5, 0, 3)),
)
"""First row and number of tokens of each row in each pass."""


def states_in_pieces(layout: Layout, family: str, **model: Any) -> list[tuple[Tensor, Tensor]]:
    """For each row, hidden states of pieces, and of the whole text."""
    gpt = make(layout, family, **model).eval()
    cache = GenerationCache(gpt.config, mesh=gpt.mesh, dtype=torch.float64, num_rows=3, capacity=4)
    texts = torch.randint(100, (3, 12), generator=torch.Generator().manual_seed(1))
    found: list[list[Tensor]] = [[], [], []]
    for first, counts in PIECES:
        rows = range(first, first + len(counts))
        starts = [cache.lengths[row] for row in rows]
        cache.grow(max(start + max(counts) for start in starts))
        tokens = torch.full((len(counts), max(counts)), 99)
        for place, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            tokens[place, :count] = texts[row, start : start + count]
        hidden = gpt.read(tokens, cache, counts=counts, first_row=first)
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            found[row].append(hidden[place, :count])
    cache.set_length(1, 0)  # another text gets the row
    hidden = gpt.read(texts[:1, :6], cache, counts=[6], first_row=1)
    with torch.no_grad():
        pairs = [
            (torch.cat(states), gpt.hidden_states(Batch(tokens=texts[row : row + 1, : cache.lengths[row]]))[0])
            for row, states in enumerate(found)
            if row != 1
        ]
        return [*pairs, (hidden[0, :6], gpt.hidden_states(Batch(tokens=texts[:1, :6]))[0])]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", ["hybrid", "windows", "blocks", "latent"])
@pytest.mark.parametrize("layout", [Layout(tensor=2, sequence_parallel=True), Layout(), Layout(tensor=4)], ids=str)
def test_states_are_those_of_whole_texts(ranks: RankPool, layout: Layout, family: str) -> None:
    for pairs in ranks.run(layout.world_size, states_in_pieces, layout, family):
        assert [len(pair[0]) for pair in pairs] == [9, 4, 6]
        for pieces, whole in pairs:
            torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)


def forgotten_states() -> None:
    gpt = make(Layout(), "hybrid")
    cache = GenerationCache(gpt.config, mesh=gpt.mesh, dtype=torch.float32, num_rows=1, capacity=8)
    kept = cache.layer(0)["attention"]
    assert {name: (each.dtype, tuple(each.shape)) for name, each in kept.items()} == {
        "inputs": (torch.float32, (1, 3, 32 + 16)),
        "state": (torch.float32, (1, 2, 4, 16)),
    }
    cache.advance([5], first_row=0)
    kept["state"][:] = 1.0
    cache.set_length(0, 9)
    assert kept["state"].min() == 1.0
    with pytest.raises(ValueError, match=r"^a state of 5 tokens cannot become one of 3 tokens$"):
        cache.set_length(0, 3)
    cache.set_length(0, 0)
    assert not kept["state"].any()
    assert (
        GenerationCache(gpt.config, mesh=gpt.mesh, dtype=torch.bfloat16, num_rows=1, capacity=8)
        .layer(0)["attention"]["state"]
        .dtype
        is torch.float32
    )


def test_a_state_is_forgotten_whole_or_not_at_all(ranks: RankPool) -> None:
    ranks.run(1, forgotten_states)
