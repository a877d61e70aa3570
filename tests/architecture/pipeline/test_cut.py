from itertools import combinations, pairwise

import pytest

from crosscut.architecture.pipeline.cut import balanced_cut


def test_equal_layers_are_cut_evenly():
    assert balanced_cut([1.0] * 8, 4) == (2, 2, 2, 2)
    assert balanced_cut([1.0] * 8, 1) == (8,)
    assert balanced_cut([1.0] * 3, 3) == (1, 1, 1)


def test_embedding_and_loss_count():
    assert balanced_cut([1.0] * 7, 4, last=1.0) == (2, 2, 2, 1)
    assert balanced_cut([1.0] * 6, 2, last=2.0) == (4, 2)
    assert balanced_cut([1.0] * 6, 2, first=2.0) == (2, 4)
    assert balanced_cut([1.0] * 3, 3, last=50.0) == (1, 1, 1), "every stage has a layer"


def cost(costs, sizes, first, last) -> float:
    stages, start = [], 0
    for size in sizes:
        stages.append(sum(costs[start : start + size]))
        start += size
    stages[0] += first
    stages[-1] += last
    return max(stages)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_other_cut_has_a_cheaper_longest_stage(stages):
    costs, first, last = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], 2.0, 3.5
    found = balanced_cut(costs, stages, first=first, last=last)
    assert sum(found) == len(costs)
    every = []
    for places in combinations(range(1, len(costs)), stages - 1):
        ends = (0, *places, len(costs))
        every.append([end - start for start, end in pairwise(ends)])
    assert cost(costs, found, first, last) == min(cost(costs, sizes, first, last) for sizes in every)
