"""Collectives and memory of gradients that are summed in low rank (`parallel.state.low_rank`).

For a matrix [n, m], ranks that see different tokens sum n r elements and m r elements, in two messages for all matrices
of a plan. Tensor ranks have parts of one dimension. They put the factors of the whole matrix together, in two more
messages.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import NamedTuple

from crosscut.architecture import Decoder, Parameter, Target
from crosscut.architecture.optimizers.low_rank import has_low_rank
from crosscut.config.layouts.ranks import RankPlan
from crosscut.planner.candidate import Planned
from crosscut.planner.messages.collective import Collective, along
from crosscut.planner.stages import part_of


class LowRank(NamedTuple):
    """Elements of the matrices of one plan on one rank whose gradients are summed in low rank."""

    gradients: int = 0
    partial: int = 0
    """Elements of `gradients` of which every tensor rank holds a term."""
    left: int = 0
    """Elements of the factors [n, r] that this rank computes."""
    right: int = 0
    """Elements of the factors [m, r] that this rank computes."""
    whole_left: int = 0
    """Elements of the factors [n, r] of whole matrices."""
    whole_right: int = 0
    """Elements of the factors [m, r] of whole matrices."""


def low_rank(run: Planned, plan: RankPlan) -> LowRank:
    """Elements of the matrices of a plan on one rank whose gradients are summed in low rank."""
    experts = None if len(run.layout.plans) == 1 else plan is run.layout.expert_ranks
    return _low_rank(part_of(run), Target.of(run.layout), run.optimizer.gradient_rank, experts)


@lru_cache(maxsize=4096)
def _low_rank(part: Decoder, target: Target, rank: int, experts: bool | None) -> LowRank:
    found = [
        [count * elements for elements in _elements(parameter, target, rank)]
        for parameter, count in _parameters(part)
        if has_low_rank(parameter, rank) and experts in (None, parameter.stacked > 0)
    ]
    return LowRank(*map(sum, zip(*found, strict=True))) if found else LowRank()


def _parameters(part: Decoder) -> Iterator[tuple[Parameter, int]]:
    yield from ((parameter, 1) for parameter in part.root_parameters())
    yield from ((parameter, count) for layer, count in part.kinds.items() for parameter in layer.parameters())


def _elements(parameter: Parameter, target: Target, rank: int) -> LowRank:
    local = parameter.on(target)
    *_, rows, columns = parameter.padded_shape(target.tensor)
    *_, own_rows, own_columns = local.shape
    factors = rank * (local.shape[0] if parameter.stacked else 1)
    return LowRank(
        gradients=local.size,
        partial=local.size * local.has_partial_gradient,
        left=factors * own_rows,
        right=factors * own_columns,
        whole_left=factors * rows,
        whole_right=factors * columns,
    )


def low_rank_messages(run: Planned, all_reduce: partial[Collective]) -> list[Collective]:
    """All-reduces of the factors, once per step."""
    found = []
    for plan in run.layout.plans:
        sums = low_rank(run, plan)
        over_tokens, over_cuts = along(all_reduce, plan.tokens), along(all_reduce, run.layout.ranks.cuts)
        for name, own, whole in (("left", sums.left, sums.whole_left), ("right", sums.right, sums.whole_right)):
            found += [
                over_tokens(purpose=f"{name} factors of gradients", elements=own),
                over_cuts(purpose=f"{name} factors of whole gradients", elements=whole),
            ]
    return [collective for collective in found if collective.elements]


def low_rank_flops(run: Planned) -> int:
    """FLOPs of one rank in a step for the products of the factors: two for the factors, and one for the gradients."""
    return 6 * run.optimizer.gradient_rank * sum(low_rank(run, plan).gradients for plan in run.layout.plans)


def low_rank_memory(run: Planned) -> int:
    """Elements that one rank keeps for gradients in low rank: an error memory of each matrix, and the right factor of
    the whole matrix. Until it is known whether a step counts, the rank also holds the next ones.
    """
    return sum(sums.gradients + sums.whole_right for sums in (low_rank(run, plan) for plan in run.layout.plans))
