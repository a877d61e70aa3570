"""Layouts and training settings that a search tries."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from crosscut.config import Layout, TrainingConfig, ZeroStage
from crosscut.config.axes import arrangements
from crosscut.config.checks import divisors
from crosscut.config.training import Device, Offload, Recompute
from crosscut.planner.candidate import Candidate, Planned
from crosscut.planner.hardware import Hardware
from crosscut.planner.search.reasons import reason_against_asked_compiling

CHOSEN = frozenset({
    "layout.tensor", "layout.data", "layout.pipeline", "layout.schedule", "layout.stages_per_rank", "layout.stages",
    "layout.expert", "layout.sequence_parallel", "layout.sharding", "layout.shard_group",
    "training.micro_batch_size", "training.recompute", "training.recompute_every",
})  # fmt: skip
"""Settings that the search chooses. The search ignores their values in the run, except that the run's layout gives the
default number of devices."""


def candidates(run: Candidate, hardware: Hardware, layouts: list[Layout]) -> Iterator[Candidate]:
    """Yield a candidate for each combination of a layout and training settings. All of the layouts have the same data
    axis.
    """
    settings = list(trainings(run, hardware, divisors(layouts[0].share_of(run.training.smallest_batch[1]))))
    for layout in layouts:
        if not reason_against_asked_compiling(run, layout):
            yield from (candidate_of(run, layout, training) for training in settings)


def candidate_of(run: Candidate, layout: Layout, training: TrainingConfig | None = None) -> Candidate:
    """Return the candidate with this layout, and with everything else of the run."""
    return Candidate(
        run.model,
        layout,
        training or run.training,
        run.optimizer,
        run.teacher,
        run.mask_fraction,
        expert_skew=run.expert_skew,
    )


def trainings(run: Planned, hardware: Hardware, micro_batches: Iterable[int]) -> Iterator[TrainingConfig]:
    """Yield the training settings of the run with each kind of recomputation and each of these micro-batch sizes."""
    sizes = list(micro_batches)
    for recompute, every in _recomputations(run, hardware):
        for micro in sizes:
            yield replace(
                run.training,
                micro_batch_size=micro,
                recompute=Recompute(recompute),
                recompute_every=every,
                device=Device(hardware.device),
                offload=kept_offload(run.training, recompute),
            )


def _recomputations(run: Planned, hardware: Hardware) -> list[tuple[str, int]]:
    """Pairs of `training.recompute` and `training.recompute_every` that the search tries.

    Recomputing the attention core ("selective") saves memory only on CPUs, where a kernel may keep the scores. The
    search leaves "selective" out if layers must be compiled and the model has dropout.
    """
    keeps_scores = hardware.device == "cpu" and not (run.training.compile == "on" and run.model.dropout)
    core = [("selective", 1)] if keeps_scores else []
    return [("none", 1), *core, ("operators", 1), ("full", 2), ("full", 1)]


def plain_layouts(run: Planned, num_ranks: int) -> Iterator[Layout]:
    """Layouts for all arrangements of the ranks along the axes, without other options. The smallest tensor axis comes
    first, then the smallest data axis. All layouts have the run's number of context ranks.
    """
    context, way = run.layout.context, run.layout.context_attention
    values: Iterator[dict[str, Any]] = arrangements(num_ranks // context)
    return (Layout(**sizes, context=context, context_attention=way) for sizes in values)


def with_expert_ranks(run: Planned, plain: Layout) -> Iterator[Layout]:
    """Layouts with the arrangement of `plain`: one for each number of ranks that can share the experts of a layer. Only
    `plain` itself for a model without experts.
    """
    sizes = divisors(plain.ranks.tokens.size) if run.model.num_experts else [1]
    return (replace(plain, expert=size) for size in sizes)


def layouts_of(run: Planned, hardware: Hardware, plain: Layout) -> Iterator[Layout]:
    """Layouts with the arrangement of `plain`: one for each combination of options that the search compares."""
    is_split, readers = replace(plain, sequence_parallel=True), plain.ranks.tokens.size
    can_split = is_split.splits_sequence and run.training.sequence_length % is_split.length_divisor == 0
    in_node = max(1, hardware.ranks_per_node // plain.ranks.tokens.stride)
    has_groups = 1 < in_node < readers and readers % in_node == 0 == in_node % plain.expert and plain.context == 1
    groups = [0, in_node] if has_groups else [0]
    for split in (False, True) if can_split else (False,):
        symmetric = split and run.layout.symmetric_memory and plain.ranks.cuts.size <= hardware.ranks_per_node
        whole = replace(plain, sequence_parallel=split, symmetric_memory=symmetric)
        yield whole
        for sharding in (ZeroStage.ZERO2, ZeroStage.ZERO3) if readers > 1 else ():
            yield from (replace(whole, sharding=sharding, shard_group=group) for group in groups)


def kept_offload(training: TrainingConfig, recompute: str) -> tuple[Offload, ...]:
    """Parts of `training.offload` that work with this kind of recomputation. Activations are offloaded only with
    "full".
    """
    return tuple(item for item in training.offload if item != "activations" or recompute == "full")
