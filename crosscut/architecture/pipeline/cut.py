"""Cut of the layers into stages of similar cost."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate


def balanced_cut(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Cut layers into `num_stages` contiguous stages so that the most expensive stage costs as little as possible.
    Return the number of layers of each stage, at least one.

    `costs` has the cost of each layer. `first` is an additional cost of the first stage, such as the embedding, and
    `last` an additional cost of the last stage, such as the loss. Of several best cuts, the function takes the one with
    the smallest sum of squared costs. There must be at least as many layers as stages.
    """
    assert 1 <= num_stages <= len(costs), "the layout was not checked"
    return _cut(tuple(costs), num_stages, first, last)


@lru_cache(maxsize=1024)
def _cut(costs: tuple[float, ...], num_stages: int, first: float, last: float) -> tuple[int, ...]:
    sums = [0.0, *accumulate(costs)]
    number = len(costs)
    extra = [first, *[0.0] * (num_stages - 1)]
    extra[-1] += last
    # best[end]: (largest cost, sum of squares, layers per stage) of the first `end` layers in the stages so far
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        left = num_stages - stage - 1
        ends = range(stage + 1, number - left + 1) if left else (number,)
        best = {
            end: min(
                (max(largest, cost), squares + cost * cost, (*sizes, end - start))
                for start, (largest, squares, sizes) in best.items()
                if start < end
                for cost in (sums[end] - sums[start] + extra[stage],)
            )
            for end in ends
        }
    return best[number][2]
