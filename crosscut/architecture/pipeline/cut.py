"""Cut of the layers into stages of similar cost, and the stages of one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


def balanced_cut(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Cut layers into `num_stages` contiguous stages so that the most expensive stage costs as little as possible.
    Return the number of layers of each stage. Every stage gets at least one layer.

    `costs` has the cost of each layer. `first` is an additional cost of the first stage, such as the embedding, and
    `last` an additional cost of the last stage, such as the loss. Among cuts that are equally good, the function
    chooses the cut with the smallest sum of squared stage costs. There must be at least as many layers as stages.
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


@dataclass(frozen=True)
class Stage:
    """One stage: contiguous layers. The first stage also has the embedding, and the last stage also has the head and
    the loss.
    """

    layers: range
    """Indexes of the layers."""
    is_first: bool = True
    """Whether the stage starts with the embedding."""
    is_last: bool = True
    """Whether the stage ends with the head and the loss."""


def stages_of_rank(sizes: Sequence[int], *, rank: int, num_ranks: int) -> tuple[Stage, ...]:
    """Stages of a rank, in the order of the layers. `sizes` has the number of layers of each stage. Rank r of P ranks
    has the stages r, r + P, r + 2 P and so on.
    """
    ends = list(accumulate(sizes))
    last = len(ends) - 1
    return tuple(
        Stage(range(ends[i] - sizes[i], ends[i]), is_first=i == 0, is_last=i == last)
        for i in range(rank, len(ends), num_ranks)
    )
