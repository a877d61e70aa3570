"""Search over the layouts that a model and a batch allow on a number of devices.

The search varies every setting that changes the cost of a step but not its result: tensor, data and pipeline ranks,
ranks that share experts, the schedule of the pipeline, sequence parallelism, sharding over data ranks, recomputation,
and the micro-batch size. Each
candidate is either ranked by the time of a step or rejected with a reason. The search checks memory first, because a
memory forecast is cheap. Only candidates that fit into memory get a forecast of their time. Of the candidates with a
pipeline, the search forecasts only those that can still be among the fastest (`pipelines`).
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from crosscut.config import Layout, LayoutError, RunConfig, resolve
from crosscut.config.checks import divisors
from crosscut.planner.candidate import Candidate
from crosscut.planner.hardware import Hardware
from crosscut.planner.products import Speed
from crosscut.planner.search.pipelines import search_pipelines
from crosscut.planner.search.plans import Plan, Plans, Rejected, forecast
from crosscut.planner.search.proposals import candidate_of, candidates, layouts_of, plain_layouts, with_expert_ranks
from crosscut.planner.search.reasons import (
    reason_against_arrangement,
    reason_against_asked_compiling,
    reason_against_tensor,
)
from crosscut.planner.search.requirements import (
    nothing_cuts,
    require_batch,
    require_context_divides,
    require_device,
    require_few_combinations,
    require_precision,
    require_ranks,
    require_skew,
    require_symmetric_memory,
)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Let Python not look for reference cycles. A search makes many small objects, and none of them is in a cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collector_paused()
def search_layouts(run: RunConfig, hardware: Hardware, num_ranks: int, *, expert_skew: float = 1.0) -> Plans:
    """Search the layouts of `run` on `num_ranks` devices. Of the layout of `run`, the search keeps only the number of
    context ranks, their attention algorithm, and `layout.symmetric_memory`. `expert_skew` is the load of the fullest of
    the ranks that share experts, as a multiple of the mean load (`Candidate.expert_skew`).

    Raises `ConfigError` if no layout is possible. Examples are a `num_ranks` out of range, a precision that the device
    does not support, a `training.device` that is not the kind of the hardware, and a batch that no layout can divide.
    """
    require_skew(run.model, expert_skew)
    run = _allowed(run, hardware, num_ranks)
    per_context = num_ranks // run.layout.context
    tensors = [tensor for tensor in divisors(per_context) if not reason_against_tensor(run.model, tensor)]
    arranged = list(plain_layouts(run, num_ranks))
    require_batch(run, arranged, max(tensors))
    skewed = replace(Candidate.at(run, 0), expert_skew=expert_skew)
    possible, rejected = _divided(skewed, arranged)
    require_few_combinations(run, possible, num_ranks)
    speed = Speed(hardware, run.training.precision, ranks=num_ranks)
    fitting, misfits = _without_stages(skewed, speed, [layout for layout in possible if layout.num_stages == 1])
    staged = [layout for layout in possible if layout.num_stages > 1]
    pipelines, without = search_pipelines(skewed, speed, staged, [plan.time.total for plan in fitting])
    fitting += pipelines
    rejected += misfits + without
    if not fitting and max(tensors) == 1 < per_context:
        raise LayoutError(nothing_cuts(run.model, hardware, per_context))
    fitting.sort(key=_order)
    return Plans(
        asked=run,
        hardware=hardware,
        num_ranks=num_ranks,
        expert_skew=expert_skew,
        fitting=tuple(fitting),
        rejected=tuple(rejected),
    )


def _allowed(run: RunConfig, hardware: Hardware, num_ranks: int) -> RunConfig:
    """Return the run in the precision of the device. Raises `ConfigError` if the device does not allow the run."""
    require_ranks(hardware, num_ranks)
    run = resolve(run, device=hardware.device, precision=hardware.fast_precision).config
    require_precision(run, hardware)
    require_device(run, hardware)
    require_symmetric_memory(run, hardware)
    require_context_divides(run, num_ranks)
    return run


def _divided(run: Candidate, arranged: Iterable[Layout]) -> tuple[list[Layout], list[Rejected]]:
    """Return the layouts that the model and the batch allow, and the rejected ones. The result has a layout for each
    arrangement of the ranks and each number of ranks that share experts.
    """
    possible: list[Layout] = []
    rejected: list[Rejected] = []
    for plain in arranged:
        reason = reason_against_arrangement(run, plain)
        for layout in [plain] if reason else with_expert_ranks(run, plain):
            if reason := reason_against_arrangement(run, layout):
                rejected.append(Rejected(candidate=candidate_of(run, layout), reason=reason))
            else:
                possible.append(layout)
    return possible, rejected


def _without_stages(run: Candidate, speed: Speed, arranged: Iterable[Layout]) -> tuple[list[Plan], list[Rejected]]:
    """Forecast all candidates without a pipeline. Return those that fit, and the rejected ones."""
    fitting: list[Plan] = []
    rejected: list[Rejected] = []
    for plain in arranged:
        layouts = list(layouts_of(run, speed.hardware, plain))
        rejected += _not_compilable(run, layouts)
        for candidate in candidates(run, speed.hardware, layouts):
            found = forecast(candidate, speed)
            if isinstance(found, Plan):
                fitting.append(found)
            elif found:
                rejected.append(found)
    return fitting, rejected


def _order(plan: Plan) -> tuple[float, bool, int]:
    """Sort key that puts the fastest layout first. Among equally fast layouts, those without a pipeline come first."""
    return plan.time.total, plan.candidate.layout.num_stages > 1, plan.memory.total


def _not_compilable(run: Candidate, layouts: list[Layout]) -> Iterator[Rejected]:
    """Reject the layouts that cannot be compiled although `training.compile` is "on".

    Layouts that differ only in their sharding share one entry.
    """
    for layout in layouts:
        reason = reason_against_asked_compiling(run, layout)
        if reason and layout.sharding == "none":
            yield Rejected(candidate=candidate_of(run, layout), reason=reason)
