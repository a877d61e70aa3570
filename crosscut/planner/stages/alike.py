"""Ranks of a pipeline that do the same work, so that a forecast of one of them holds for all."""

from functools import lru_cache

from crosscut.architecture import Decoder, describe
from crosscut.architecture.pipeline import stages_of_rank
from crosscut.planner.activations import recomputation_step
from crosscut.planner.candidate import Planned
from crosscut.planner.stages.cut import stage_sizes


def alike_ranks(run: Planned) -> tuple[tuple[int, ...], ...]:
    """Group the ranks of a run's pipeline that do the same work. The ranks of a group have stages with equal layers,
    and recompute equal layers. If one of these ranks has the embedding or the head, all of them have it. The ranks of a
    group and the groups are in ascending order.
    """
    return _alike(describe(run.model), stage_sizes(run), run.layout.pipeline, recomputation_step(run))


@lru_cache(maxsize=1024)
def _alike(whole: Decoder, sizes: tuple[int, ...], num_ranks: int, every: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups for stages with `sizes` layers. Every `every`-th layer of the model is recomputed, or none if
    `every` is 0.
    """
    groups: dict[object, list[int]] = {}
    for rank in range(num_ranks):
        work = tuple(
            (
                stage.is_first,
                stage.is_last,
                tuple((whole.layers[i], bool(every) and i % every == 0) for i in stage.layers),
            )
            for stage in stages_of_rank(sizes, rank=rank, num_ranks=num_ranks)
        )
        groups.setdefault(work, []).append(rank)
    return tuple(map(tuple, groups.values()))
