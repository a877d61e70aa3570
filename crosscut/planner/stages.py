"""Pipeline stages of a run: the layers of each stage, the schedule, the part of the model that a rank holds, and the
ranks that do the same work.
"""

from functools import lru_cache

from crosscut.architecture import Decoder, describe
from crosscut.architecture.pipeline import (
    Schedule,
    Stage,
    balanced_cut,
    interleaved,
    stages_of_rank,
    zero_bubble,
)
from crosscut.config import ModelConfig
from crosscut.config.layout import Layout, PipelineSchedule
from crosscut.config.training import Recompute
from crosscut.planner.candidate import Planned, pipeline_rank_of, recomputation_step
from crosscut.planner.flops import head_flops_per_token, layer_flops_per_token
from crosscut.planner.parameters import known_vocab_size


def stage_sizes(run: Planned) -> tuple[int, ...]:
    """Number of layers of each pipeline stage of a run, in the order of the layers.

    If `layout.stages` is given, it is returned. If each rank has several stages, all stages have the same number of
    layers. Otherwise, the layers are cut so that the stage with the most FLOPs has as few FLOPs as possible. The last
    stage also computes the logits. The embedding is a look-up without products, so it counts as 0 FLOPs. Raises
    `ConfigError` if `model.vocab_size` is still 0.
    """
    layout, number = run.layout, run.model.num_layers
    if layout.stages or layout.num_stages == 1:
        return layout.stages or (number,)
    if layout.stages_per_rank > 1:
        return (number // layout.num_stages,) * layout.num_stages
    known_vocab_size(run.model)
    recomputes = run.training.recompute == Recompute.FULL
    return _balanced(run.model, layout.num_stages, run.training.sequence_length, recomputes, run.mask_fraction)


@lru_cache(maxsize=1024)
def _balanced(
    model: ModelConfig, num_stages: int, length: int, recomputes: bool, mask_fraction: float
) -> tuple[int, ...]:
    passes = 4 if recomputes else 3  # forward, backward (two products for one), again
    costs = [passes * layer_flops_per_token(layer, length) for layer in describe(model).layers]
    return balanced_cut(costs, num_stages, last=3 * head_flops_per_token(model, length, mask_fraction))


def schedule_of(layout: Layout, num_micro_batches: int) -> Schedule:
    """Schedule of a layout's stages for a step of `num_micro_batches` micro-batches."""
    num_ranks = layout.ranks.owners.size
    if layout.schedule is PipelineSchedule.ZERO_BUBBLE:
        return zero_bubble(num_ranks, num_micro_batches)
    return interleaved(num_ranks, num_micro_batches, layout.stages_per_rank)


def separates_weights(layout: Layout) -> bool:
    """Whether the pipeline of a layout computes weight gradients separately from the backward passes."""
    return layout.num_stages > 1 and layout.schedule is PipelineSchedule.ZERO_BUBBLE


def schedule_of_run(run: Planned) -> Schedule:
    """Schedule of the stages of a run with a pipeline."""
    return schedule_of(run.layout, run.num_micro_batches)


def stages_of(run: Planned, rank: int) -> tuple[Stage, ...]:
    """Stages of one rank of a run's pipeline, in the order of the layers. Without a pipeline, one stage has all layers.
    Raises `ConfigError` if the cut depends on `model.vocab_size` and the vocabulary size is still 0.
    """
    return _stages_of_rank(stage_sizes(run), rank, run.layout.ranks.owners.size)


@lru_cache(maxsize=4096)
def _stages_of_rank(sizes: tuple[int, ...], rank: int, num_ranks: int) -> tuple[Stage, ...]:
    return stages_of_rank(sizes, rank=rank, num_ranks=num_ranks)


def part_of(run: Planned) -> Decoder:
    """Describe the part of the model that a rank of `run` holds: the whole model, or, in a pipeline, the stages of rank
    `Candidate.pipeline_rank` (for a `RunConfig`, the stages of the first rank).
    """
    whole = describe(run.model)
    if run.layout.num_stages == 1:
        return whole
    return whole.part(stages_of(run, pipeline_rank_of(run)))


def alike_ranks(run: Planned) -> tuple[tuple[int, ...], ...]:
    """Group the ranks of a run's pipeline that do the same work. The ranks of a group have stages with equal layers,
    and recompute equal layers. If one of these ranks has the embedding or the head, all of them have it. The ranks of a
    group and the groups are in ascending order.
    """
    return _alike(describe(run.model), stage_sizes(run), run.layout.ranks.owners.size, recomputation_step(run))


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
