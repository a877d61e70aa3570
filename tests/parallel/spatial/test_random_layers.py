"""Random layers on random grids, beside PyTorch's layers on one rank: values and gradients."""

import pytest

from tests.parallel.spatial.cases import GRIDS, compare
from tests.ranks import RankPool

TOLERANCE = 1e-12
QUICK = [((2, 2), range(14)), ((4,), range(6)), ((2, 1, 2), range(6))]


def _assert_equal(ranks: RankPool, sizes: tuple[int, ...], seeds: list[int]) -> None:
    num_ranks = 1
    for size in sizes:
        num_ranks *= size
    for results in ranks.run(num_ranks, compare, sizes, seeds):
        assert [result for result in results if not result[1] < TOLERANCE] == []


@pytest.mark.parametrize(("sizes", "seeds"), QUICK)
def test_outputs_and_gradients_are_those_of_one_rank(ranks: RankPool, sizes: tuple[int, ...], seeds: range) -> None:
    _assert_equal(ranks, sizes, list(seeds))


@pytest.mark.slow  # the quick test has all kinds of layers on three grids
@pytest.mark.parametrize("sizes", GRIDS)
def test_many_outputs_and_gradients_are_those_of_one_rank(ranks: RankPool, sizes: tuple[int, ...]) -> None:
    _assert_equal(ranks, sizes, list(range(100, 126)))
