"""Random layers on random grids, beside PyTorch's layers on one rank: values and gradients."""

from collections.abc import Iterable
from math import prod

import pytest

from tests.parallel.spatial.cases import GRIDS, compare
from tests.ranks import RankPool

TOLERANCE = 1e-12
QUICK = [((2, 2), range(14), True), ((4,), range(14, 20), True), ((2, 1, 2), range(20, 26), False)]
MANY = [(sizes, range(100 * number, 100 * number + 26)) for number, sizes in enumerate(GRIDS, 1)]
"""312 cases: 26 on each grid."""


def _assert_equal(ranks: RankPool, sizes: tuple[int, ...], seeds: Iterable[int], overlaps: bool) -> None:
    for results in ranks.run(prod(sizes), compare, sizes, list(seeds), overlaps):
        assert [result for result in results if not result[1] < TOLERANCE] == []


@pytest.mark.parametrize(("sizes", "seeds", "overlaps"), QUICK)
def test_outputs_and_gradients_are_those_of_one_rank(
    ranks: RankPool, sizes: tuple[int, ...], seeds: range, overlaps: bool
) -> None:
    _assert_equal(ranks, sizes, seeds, overlaps)


@pytest.mark.slow  # the quick test has such layers on three grids
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("sizes", "seeds"), MANY)
def test_many_outputs_and_gradients_are_those_of_one_rank(
    ranks: RankPool, sizes: tuple[int, ...], seeds: range, overlaps: bool
) -> None:
    _assert_equal(ranks, sizes, seeds, overlaps)
