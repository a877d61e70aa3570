"""The proof itself: the same step uncut on the first rank and cut over all of them, then compared."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

import torch

from crosscut.parallel import ParallelMesh, make_lone_mesh
from crosscut.parallel.collectives import share_from_first
from crosscut.training.speed.compilation import compiled_modules, uncompiled
from crosscut.verification.comparison import Comparison
from crosscut.verification.draws import Disagreement, Draw, compare_draws, draws_of
from crosscut.verification.recording import Recording, Step, record
from crosscut.verification.report import DRAWS, ROUNDING, Check, First, Report
from crosscut.verification.tolerance import Rounding, num_layers_of, num_summands_of, rounding_of, tolerance_of

MakeStep = Callable[[ParallelMesh], Step]
"""Builds the model on a mesh, with weights that no layout changes, and the step on this data rank's part of a batch."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Step that is claimed to be the same on every layout, and the words for the report of its proof."""

    make_step: MakeStep
    make_uncut: MakeStep | None = None
    """Builds the step on one rank; None takes `make_step`. Plainer code here shows a fault that both would share."""
    make_exact: MakeStep | None = None
    """Builds the step in the parameters' type, where products or activations are narrower. It shows how much rounding
    the step has, and that its difference is no more than rounding."""
    extra_checks: Callable[[Step], list[Check]] = lambda _: []
    """Makes further checks on every rank, of the step that was taken."""

    layout: str
    model: str
    precision: str = ""
    """Empty takes the name of the activations' type."""
    compute_dtype: torch.dtype | None = None
    """Type of the activations; None takes that of the parameters."""
    product_dtype: torch.dtype | None = None
    """Type of the factors of products; None takes that of the activations."""


def prove(claim: Claim, mesh: ParallelMesh) -> Report:
    """Compare the step on `mesh` with the step on one rank alone. Every rank calls it and gets the same report.

    Both models first go through the step with dropout, to see who draws what. Dropout is off while numbers are
    compared, since each rank's own numbers differ by design. An error of the first rank is raised on all ranks;
    `TrainingError` if its step is not finite.
    """
    start = time.perf_counter()
    uncut = _uncut(claim.make_uncut or claim.make_step, mesh)
    step = claim.make_step(mesh)
    draws, cut = _take(step)
    if uncut is not None:
        uncut = uncut[0], uncut[1].with_wholes(compiled_modules(step.model))
    dtype = claim.compute_dtype or next(step.model.parameters()).dtype
    bounds = None if uncut is None else _bounds(step, uncut[1], dtype, claim.product_dtype or dtype)
    tolerance, rounding = share_from_first(bounds)
    exact = None if claim.make_exact is None else _exact(claim.make_exact, mesh)
    reference = None if uncut is None else uncut[1]
    comparison = Comparison(cut, reference, mesh, tolerance=tolerance, exact=exact, rounding=rounding)
    outcome: Report | Exception | None = None
    try:
        comparison.run()
    except Exception as error:
        outcome = error
    disagreement = compare_draws(draws, mesh)
    further = claim.extra_checks(step)
    if uncut is not None and outcome is None:
        try:
            judged, told = _judge_draws(draws, uncut[0], disagreement)
            checks = (*comparison.checks(), judged, *further, *comparison.rounding())
            outcome = _report(claim, comparison, dtype, checks=checks, told=told, seconds=time.perf_counter() - start)
        except Exception as error:
            outcome = error
    outcome = share_from_first(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, Report)
    return outcome


def _report(
    claim: Claim,
    comparison: Comparison,
    dtype: torch.dtype,
    *,
    checks: tuple[Check, ...],
    told: First | None,
    seconds: float,
) -> Report:
    """Report on the first rank; `told` is the first place at which random numbers are drawn otherwise."""
    return Report(
        layout=claim.layout,
        model=claim.model,
        precision=claim.precision or str(dtype).removeprefix("torch."),
        tolerance=comparison.tolerance,
        largest_tolerance=comparison.largest_allowed,
        rows=tuple(comparison.rows()),
        checks=checks,
        first=comparison.first() or told or _first_failed(checks),
        seconds=seconds,
    )


def _uncut(make_step: MakeStep, mesh: ParallelMesh) -> tuple[list[Draw], Recording] | None:
    """Draws and recording of the uncut model, the reference for the cut one, on the first rank."""
    alone = make_lone_mesh(mesh.device)
    return _take(make_step(alone)) if mesh.is_first_rank else None


def _exact(make_exact: MakeStep, mesh: ParallelMesh) -> Recording | None:
    """The uncut model's step without its rounding, on the first rank."""
    alone = make_lone_mesh(mesh.device)
    if not mesh.is_first_rank:
        return None
    step = make_exact(alone)
    step.model.eval()
    return record(step)


def _take(step: Step) -> tuple[list[Draw], Recording]:
    """Take the step twice: its draws with dropout, and its recording without dropout."""
    step.model.train()
    with uncompiled(step.model):  # what draws inside a compiled layer would not be seen
        draws = draws_of(step.model, step.mesh, step.accumulate)
    step.model.eval()
    return draws, record(step)


def _bounds(step: Step, uncut: Recording, dtype: torch.dtype, product_dtype: torch.dtype) -> tuple[float, Rounding]:
    """Bounds on the difference of two computations of one step, and of one computation from the unrounded step."""
    outputs = [output for output in uncut.outputs.values() if output.dim()]
    num_tokens = max((output.numel() // max(output.shape[-1], 1) for output in outputs), default=1)
    size = {"num_layers": num_layers_of(step.model), "num_summands": num_summands_of(step.model, num_tokens)}
    return tolerance_of(dtype, **size), rounding_of(product_dtype, **size)


def _judge_draws(cut: list[Draw], uncut: list[Draw], disagreement: Disagreement | None) -> tuple[Check, First | None]:
    """Whether random numbers are drawn as in the uncut model, alike or differently on ranks as they must be."""
    if disagreement is None:
        for mine, other in zip_longest(cut, uncut):
            if mine is None or other is None or (mine.module, mine.operator) != (other.module, other.operator):
                module = (mine or other).module
                told = f"{module}: draws otherwise than in the uncut model, or not as often"
                cause = "Other numbers are drawn than in the uncut model: look at probabilities and at who drops."
                return Check(DRAWS, None, False, told), First(module, "forward", cause)
        unseen = sum(not draw.dropped for draw in cut)
        told = f"{len(cut)} draws on each rank" if cut else "the model has no dropout"
        more = f", {unseen} of them for what was not seen" if unseen else ""
        return Check(DRAWS, None, True, told + more), None
    i, j = disagreement.ranks
    told = f"{disagreement.module}: ranks {i} and {j} {disagreement.told}"
    cause = f"Ranks {i} and {j} {disagreement.told}. Look at which random stream it uses."
    return Check(DRAWS, None, False, told), First(disagreement.module, "forward", cause)


_CHECK_CAUSES = {
    "gradient norm": (
        "All gradients agree and their norm does not: look at how replicated and cut parameters are counted, and over "
        "which ranks squares are summed."
    ),
    "clipped gradients": (
        "Gradients and norm agree and the clipped gradients do not: look at the norm that they are clipped by."
    ),
    "parameters after a step": "The gradients agree and what the optimizer does with them does not.",
    "copies on all ranks": (
        "Values agree to rounding, but ranks that hold copies differ in their last bits: they will drift apart."
    ),
    "collectives": "All numbers agree, but other messages were sent than the planner accounts for.",
    **dict.fromkeys(
        ROUNDING,
        "Both models agree, and the uncut one is further from itself in a wider type than narrow numbers explain: look "
        "at what is computed in them, kernels included.",
    ),
}


def _first_failed(checks: tuple[Check, ...]) -> First | None:
    """Rounding comes last: where it alone fails, it is not known whether the cut is at fault."""
    failed = next((check for check in checks if not check.same), None)
    return None if failed is None else First(failed.name, "step", _CHECK_CAUSES.get(failed.name, failed.told))
