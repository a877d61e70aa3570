"""Search over the layouts that a model and a batch allow on a number of devices.

The search varies every setting that changes the cost of a step but not its result: tensor, data and pipeline ranks, the
schedule of the pipeline, sequence parallelism, sharding over data ranks, recomputation, and the micro-batch size. Each
candidate is either ranked by the time of a step or rejected with a reason. The search checks memory first, because a
memory forecast is cheap. Only candidates that fit into memory get a forecast of their time. Of the candidates with a
pipeline, the search forecasts only those that can still be among the fastest (`pipelines`).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from crosscut.config import Layout, LayoutError, RunConfig, resolve
from crosscut.config.checks import divisors
from crosscut.planner.hardware import Hardware
from crosscut.planner.products import Speed
from crosscut.planner.search.pipelines import search_pipelines
from crosscut.planner.search.plans import Plan, Plans, Rejected, forecast
from crosscut.planner.search.proposals import candidate_of, candidates, layouts_of, plain_layouts
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
def search_layouts(run: RunConfig, hardware: Hardware, num_ranks: int) -> Plans:
    """Search the layouts of `run` on `num_ranks` devices. Of the layout of `run`, the search keeps only the number of
    context ranks, their attention algorithm, and `layout.symmetric_memory`.

    Raises `ConfigError` if no layout is possible. Examples are a `num_ranks` out of range, a precision that the device
    does not support, a `training.device` that is not the kind of the hardware, and a batch that no layout can divide.
    """
    require_ranks(hardware, num_ranks)
    run = resolve(run, device=hardware.device, precision=hardware.fast_precision).config
    require_precision(run, hardware)
    require_device(run, hardware)
    require_symmetric_memory(run, hardware)
    require_context_divides(run, num_ranks)
    per_context = num_ranks // run.layout.context
    tensors = [tensor for tensor in divisors(per_context) if not reason_against_tensor(run.model, tensor)]
    arranged = list(plain_layouts(run, num_ranks))
    require_batch(run, arranged, max(tensors))
    reasons = {layout: reason_against_arrangement(run, layout) for layout in arranged}
    rejected = [Rejected(candidate=candidate_of(run, layout), reason=why) for layout, why in reasons.items() if why]
    possible = [layout for layout, reason in reasons.items() if not reason]
    require_few_combinations(run, possible, num_ranks)
    speed = Speed(hardware, run.training.precision, ranks=num_ranks)
    fitting: list[Plan] = []
    for plain in (layout for layout in possible if layout.num_stages == 1):
        layouts = list(layouts_of(run, hardware, plain))
        rejected += _not_compilable(run, layouts)
        for candidate in candidates(run, hardware, layouts):
            found = forecast(candidate, speed)
            if isinstance(found, Plan):
                fitting.append(found)
            elif found:
                rejected.append(found)
    staged = [layout for layout in possible if layout.num_stages > 1]
    pipelines, without = search_pipelines(run, speed, staged, [plan.time.total for plan in fitting])
    fitting += pipelines
    rejected += without
    if not fitting and max(tensors) == 1 < per_context:
        raise LayoutError(nothing_cuts(run.model, hardware, per_context))
    fitting.sort(key=_order)
    return Plans(asked=run, hardware=hardware, num_ranks=num_ranks, fitting=tuple(fitting), rejected=tuple(rejected))


def _order(plan: Plan) -> tuple[float, bool, int]:
    """Sort key that puts the fastest layout first. Among equally fast layouts, those without a pipeline come first."""
    return plan.time.total, plan.candidate.layout.num_stages > 1, plan.memory.total


def _not_compilable(run: RunConfig, layouts: list[Layout]) -> Iterator[Rejected]:
    """Reject the layouts that cannot be compiled although `training.compile` is "on".

    Layouts that differ only in their sharding share one entry.
    """
    for layout in layouts:
        reason = reason_against_asked_compiling(run, layout)
        if reason and layout.sharding == "none":
            yield Rejected(candidate=candidate_of(run, layout), reason=reason)
