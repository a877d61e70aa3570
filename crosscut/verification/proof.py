"""Proof of one layout: run the step of the uncut model on the first rank and the step of the cut model on all ranks,
then compare the two steps.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from crosscut.config import Layout
from crosscut.parallel import ParallelMesh, make_lone_mesh
from crosscut.parallel.collectives import gather_to_first, share_from_first
from crosscut.training.speed.compilation import compiled_modules, uncompiled
from crosscut.verification.comparison import StepComparison
from crosscut.verification.dropout.draw_rules import first_disagreement, first_other_start
from crosscut.verification.dropout.draws import Drawn, DropoutDraw, draws_of
from crosscut.verification.dropout.dropping import drop_by_value
from crosscut.verification.judging.differences import Differences
from crosscut.verification.judging.judgement import StepJudgement
from crosscut.verification.recording import Recording
from crosscut.verification.report import (
    AVERAGE,
    AVERAGES,
    DOCUMENTS,
    DRAWS,
    LOADS,
    MIXTURE,
    ROUNDING,
    FirstDifference,
    LayoutReport,
    ReportCheck,
    StepPhase,
)
from crosscut.verification.tolerance import Bounds, num_layers_of, num_summands_of, rounding_of, tolerance_of
from crosscut.verification.watching import RecordedStep, follows_batches, record

_T = TypeVar("_T")

MakeStep = Callable[[ParallelMesh], RecordedStep]
"""Function that builds the model on a mesh, with weights that do not depend on the layout. Returns the training step on
this data rank's part of a batch.
"""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Claim to prove: a training step of the cut model (split over the ranks) equals the same step of the uncut model
    (whole, on one rank). The fields from `layout` on describe the step, for the report and the tolerance.
    """

    make_step: MakeStep
    """Builds the step of the cut model."""
    make_uncut: MakeStep | None = None
    """Builds the step of the uncut model on one rank; None means `make_step`. If `make_step` builds both steps, its
    bugs are in both and do not show. A function that builds the model from plainer code exposes such bugs.
    """
    make_exact: MakeStep | None = None
    """Builds the step of the uncut model in the parameters' type; None if products and activations already have this
    type. A comparison with this step shows how much the uncut step is rounded.
    """
    extra_checks: Callable[[RecordedStep, float], list[ReportCheck]] = lambda _step, _tolerance: []
    """Returns further checks of the step on the cut model, after the step has run. Called on every rank, with the
    allowed relative difference.
    """
    amplification: Mapping[str, float] = field(default_factory=dict)
    """Maps the name of a parameter to the factor by which the optimizer may enlarge the relative difference of its
    gradient. Parameters that are not listed have the factor 1. After the step, a parameter may differ by its factor
    times the tolerance."""

    runs_uncut_first: bool = False
    """Whether the uncut step runs before the cut one is made, because code that cuts may change more than its module.
    Nothing is dropped then, so `drops` has no effect.
    """
    looks_at_draws: bool = True
    """Whether the random draws are compared, too. False for a step that another claim has with the same draws."""
    drops: bool = False
    """Whether dropout is on when numbers are compared. Elements are then dropped by their values (`dropping`), so that
    all layouts drop the same elements. Only for float64, and for models that drop only with `F.dropout` and
    `F.scaled_dot_product_attention`.
    """

    layout: str
    """Description of the layout, such as `tensor 2 x data 1`."""
    model: str
    """Description of the model."""
    precision: str = ""
    """Name of the precision; empty means the name of the activations' type."""
    compute_dtype: torch.dtype | None = None
    """Type of the activations; None means the parameters' type."""
    product_dtype: torch.dtype | None = None
    """Type of the factors in matrix products; None means the activations' type."""


def prove(claim: Claim, mesh: ParallelMesh) -> LayoutReport:
    """Compare the step on `mesh` with the same step on one rank. Every rank must call this function, and every rank
    gets the same report.

    The cut and the uncut model first run the step with dropout, to compare the random draws. When numbers are compared,
    each rank must not drop other elements, as it does by design: dropout is then off, or drops by value
    (`Claim.drops`). An error on the first rank is raised on all ranks. Raises `TrainingError` if the loss or the
    gradient norm of the uncut step is not finite.
    """
    start = time.perf_counter()
    uncut = _uncut(claim, mesh, drops=False, compiled=()) if claim.runs_uncut_first else None
    step = claim.make_step(mesh)
    compiled = compiled_modules(step.model)
    drops = (
        claim.drops and not compiled and not claim.runs_uncut_first
    )  # a compiled layer cannot be told to drop by value
    if not claim.runs_uncut_first:
        uncut = _uncut(claim, mesh, drops=drops, compiled=compiled)
    elif uncut is not None:
        uncut = uncut._replace(recording=uncut.recording.with_wholes(compiled))
    drawn, cut = _take(step, drops=drops, looks_at_draws=claim.looks_at_draws)
    cut = _in_form(cut, mesh, has_loss=mesh.has_loss)
    dtype = claim.compute_dtype or next(step.model.parameters()).dtype
    differences = Differences(_shared_bounds(dtype, claim.product_dtype or dtype, uncut), claim.amplification)
    exact = None if claim.make_exact is None else _exact(claim.make_exact, mesh)
    reference = None if uncut is None else uncut.recording
    outcome = _attempt(StepComparison(cut, reference, mesh, differences=differences, exact=exact).run)
    every = gather_to_first(drawn)
    further = claim.extra_checks(step, differences.bounds.tolerance)

    def report() -> LayoutReport:
        assert uncut is not None and every is not None
        judged, draw = _judge_draws(every, uncut.drawn, _layout_of_draws(cut, mesh.layout))
        judgement = StepJudgement(differences, uncut.recording)
        of_draws = [judged] if claim.looks_at_draws and cut.failure is None else []
        checks = (*judgement.checks(cut.norm), *of_draws, *further, *judgement.rounding(exact))
        return _report(claim, judgement, dtype, checks=checks, draw=draw, seconds=time.perf_counter() - start)

    told: LayoutReport = _shared(outcome if uncut is None or outcome is not None else _attempt(report))
    return told


def _shared_bounds(dtype: torch.dtype, product_dtype: torch.dtype, uncut: "_Uncut | None") -> Bounds:
    """Return the bounds of rounding on every rank, for activations of type `dtype` and factors of type `product_dtype`.
    `uncut` is None on all ranks except the first. Every rank must call this function.
    """

    def bounds() -> Bounds | None:
        return None if uncut is None else _bounds(uncut.model, uncut.recording, dtype, product_dtype)

    shared: Bounds = _shared(_attempt(bounds))
    return shared


def _shared(value: object, *, is_late: bool = False) -> Any:
    """Return the first rank's `value` on every rank. If the value is an error, raise it on every rank. `is_late` says
    whether the other ranks wait while the first rank works alone.
    """
    shared = share_from_first(value, is_late=is_late)
    if isinstance(shared, Exception):
        raise shared
    return shared


def _attempt(function: Callable[[], _T]) -> _T | Exception:
    """Call the function. Return its result, or the error that it raises."""
    try:
        return function()
    except Exception as error:
        return error


def _report(
    claim: Claim,
    judgement: StepJudgement,
    dtype: torch.dtype,
    *,
    checks: tuple[ReportCheck, ...],
    draw: FirstDifference | None,
    seconds: float,
) -> LayoutReport:
    """Make the report on the first rank. `draw` is the first module whose random draws are wrong."""
    return LayoutReport(
        layout=claim.layout,
        model=claim.model,
        precision=claim.precision or str(dtype).removeprefix("torch."),
        tolerance=judgement.differences.bounds.tolerance,
        largest_tolerance=judgement.differences.largest_allowed,
        rows=tuple(judgement.rows()),
        checks=checks,
        first=_first_of(judgement.first(), draw) or _first_failed(checks),
        seconds=seconds,
    )


class _Uncut(NamedTuple):
    """Step of the uncut model."""

    drawn: Drawn
    recording: Recording
    model: nn.Module


def _uncut(claim: Claim, mesh: ParallelMesh, *, drops: bool, compiled: Sequence[str]) -> _Uncut | None:
    """Run the uncut step on the first rank, as the reference. Returns None on the other ranks. `compiled` are the names
    of the cut model's compiled modules.
    """

    def run(step: RecordedStep) -> _Uncut:
        drawn, recording = _take(step, drops=drops, looks_at_draws=claim.looks_at_draws)
        return _Uncut(drawn, _in_form(recording.with_wholes(compiled), mesh), step.model)

    return _on_first_rank(claim.make_uncut or claim.make_step, run, mesh)


def _on_first_rank(make_step: MakeStep, run: Callable[[RecordedStep], _T], mesh: ParallelMesh) -> _T | None:
    """Build and run the step of the uncut model on the first rank. Returns None on the other ranks, and raises an error
    of the first rank on all ranks, before they wait for the first rank in the step of the cut model.
    """
    alone = make_lone_mesh(mesh.device)
    found = _attempt(lambda: run(make_step(alone))) if mesh.is_first_rank else None
    _shared(found if isinstance(found, Exception) else None, is_late=True)
    assert not isinstance(found, Exception)
    return found


def _in_form(recording: Recording, mesh: ParallelMesh, *, has_loss: bool = True) -> Recording:
    """Return a recording in a form in which the cut and the uncut model can be compared. Only a pipeline changes the
    form (`Recording.of_stages`).
    """
    return recording.of_stages(has_loss=has_loss) if mesh.is_staged else recording


def _exact(make_exact: MakeStep, mesh: ParallelMesh) -> Recording | None:
    """Record the uncut step in the parameters' own type, on the first rank. Returns None on the other ranks."""

    def run(step: RecordedStep) -> Recording:
        step.model.eval()
        return _in_form(record(step), mesh)

    return _on_first_rank(make_exact, run, mesh)


def _take(step: RecordedStep, *, drops: bool, looks_at_draws: bool) -> tuple[Drawn, Recording]:
    """Run the step twice: with dropout to list its random draws, and with the same elements dropped on all layouts, or
    none, to record it. Without `looks_at_draws`, only record it.
    """
    step.model.train()
    drawn = Drawn([], [], {}, [])
    if looks_at_draws:
        # Draws inside a compiled layer cannot be seen. An error occurs again when the step is recorded.
        with uncompiled(step.model), suppress(*[Exception] * step.may_fail):
            drawn = draws_of(step.model, step.mesh, step.accumulate)
    step.model.train(drops)
    for module in filter(follows_batches, step.model.modules()):
        module.train()  # a training step has the statistics of its batch
    with drop_by_value() if drops else nullcontext():
        recording = record(step)
    step.model.eval()
    return drawn, recording


def _bounds(model: nn.Module, uncut: Recording, dtype: torch.dtype, product_dtype: torch.dtype) -> Bounds:
    outputs = [output for output in uncut.outputs.values() if output.dim()]
    num_tokens = max((output.numel() // max(output.shape[-1], 1) for output in outputs), default=1)
    size = {"num_layers": num_layers_of(model), "num_summands": num_summands_of(model, num_tokens)}
    return Bounds(tolerance_of(dtype, **size), rounding_of(product_dtype, **size))


def _layout_of_draws(cut: Recording, layout: Layout) -> Layout:
    """Return a layout whose ranks draw as those of the cut model must. Ranks with copies draw as tensor ranks do."""
    return Layout(tensor=layout.world_size) if cut.is_copied else layout


def _judge_draws(every: list[Drawn], uncut: Drawn, layout: Layout) -> tuple[ReportCheck, FirstDifference | None]:
    """Check that the cut model makes the same random draws as the uncut model, and that the draws of both models follow
    the rules in `draw_rules`. `every` has the draws of each rank.
    """
    cut = [
        draw for drawn in every[:: layout.ranks.per_owner] for draw in drawn.draws
    ]  # of the first rank of each stage
    modules = list(dict.fromkeys(draw.module for draw in uncut.draws))
    other = first_disagreement(every, layout, modules) or _first_other_draw(
        cut, uncut.draws, is_staged=layout.num_stages > 1
    )
    other = other or first_disagreement([uncut], Layout()) or first_other_start(every, uncut, layout)
    if other is not None:
        return ReportCheck(DRAWS, None, False, f"{other.place}: {other.cause}"), other
    unseen = sum(not draw.dropped for draw in cut)
    told = f"{len(cut)} draws on each rank" if cut else "the model has no dropout"
    more = f", {unseen} of them not checked, because the dropped tensor could not be found" if unseen else ""
    return ReportCheck(DRAWS, None, True, told + more), None


def _first_other_draw(cut: list[DropoutDraw], uncut: list[DropoutDraw], *, is_staged: bool) -> FirstDifference | None:
    """Find the first draw that only one of the models makes, or that is made by different operators. The schedule of a
    pipeline runs the layers in a different order than the uncut model does, so the draws of a pipeline are sorted by
    module.
    """
    if is_staged:
        cut, uncut = (sorted(draws, key=lambda draw: draw.module) for draws in (cut, uncut))
    for mine, other in zip_longest(cut, uncut):
        if mine is None or other is None or (mine.module, mine.operator) != (other.module, other.operator):
            cause = (
                "The cut model does not apply dropout in the same modules with the same probabilities as the uncut "
                "model: check which modules apply dropout, and their probabilities."
            )
            return FirstDifference((mine or other).module, StepPhase.FORWARD, cause)
    return None


_CHECK_CAUSES = {
    "gradient norm": (
        "All gradients agree, but their norm does not: check how replicated and cut parameters are counted, and over "
        "which ranks squares are summed."
    ),
    "clipped gradients": (
        "The gradients and their norm agree, but the clipped gradients do not: check which norm the clipping uses."
    ),
    "parameters after a step": "The gradients agree, but the parameters after the step do not: check the optimizer.",
    AVERAGES: (
        "The parameters after the step agree, but their moving averages do not: check whether every rank averages all "
        "of its own part of the parameters."
    ),
    AVERAGE: (
        "The cut and the uncut model agree, but the moving average of the weights does not follow its formula: check "
        "whether the average is updated after the optimizer's step, and the decay with its warm-up."
    ),
    "copies on all ranks": (
        "All values agree up to rounding, but replicas differ in their last bits and will drift apart: check whether "
        "all ranks do the same operations in the same order."
    ),
    DOCUMENTS: (
        "The cut and the uncut model agree, but packed documents do not give the same results as separate documents: "
        "check where documents begin, the attention mask, and the positions."
    ),
    LOADS: (
        "The cut and the uncut model agree, but the loads of the experts do not add up to the rows of all tokens: "
        "check over which ranks loads are summed, and whether recomputation or an evaluation counts them again."
    ),
    MIXTURE: (
        "The model's step agrees, but the batches do not draw from the folders in the proportions that `data.mixture` "
        "asks for: check what a weight counts (tokens, not files or documents), and how a batch is divided over data "
        "ranks."
    ),
    "collectives": "All numbers agree, but the messages differ from the messages that the planner counts: check which "
    "collectives are missing or superfluous.",
    **dict.fromkeys(
        ROUNDING,
        "The cut and the uncut model agree, but the uncut model differs by more than rounding from the same model in a "
        "wider type: check the operations in the narrow type, including kernels.",
    ),
}


def _first_of(difference: FirstDifference | None, draw: FirstDifference | None) -> FirstDifference | None:
    """Return the first difference of numbers or, if there is none, the first wrong draw. A wrong draw of a
    recomputation explains wrong gradients, and comes before them.
    """
    comes_first = difference is None or difference.direction is StepPhase.BACKWARD
    return draw if draw is not None and draw.direction is StepPhase.BACKWARD and comes_first else difference or draw


def _first_failed(checks: tuple[ReportCheck, ...]) -> FirstDifference | None:
    """Return the first failed check. Rounding comes last: if only rounding fails, the layout need not be the cause."""
    failed = next((check for check in checks if not check.same), None)
    if failed is None:
        return None
    return FirstDifference(failed.name, StepPhase.STEP, _CHECK_CAUSES.get(failed.name, failed.told))
