"""The proof itself: the same step uncut on the first rank and cut over all of them, then compared."""

import time
from collections.abc import Callable

import torch

from crosscut.parallel import ParallelMesh, make_lone_mesh
from crosscut.parallel.collectives import share_from_first
from crosscut.verification.comparison import Comparison
from crosscut.verification.draws import compare_draws
from crosscut.verification.recording import Recording, Step, record
from crosscut.verification.report import Check, First, Report
from crosscut.verification.tolerance import num_layers_of, num_summands_of, tolerance_of

MakeStep = Callable[[ParallelMesh], Step]
"""Builds the model on a mesh, with weights that no layout changes, and the step on this data rank's part of a batch."""


def prove(
    make_step: MakeStep,
    mesh: ParallelMesh,
    *,
    dtype: torch.dtype,
    describe: tuple[str, str, str],
    extra_checks: Callable[[Step], list[Check]] = lambda _: [],
) -> Report:
    """Compare the step on `mesh` with the step on one rank alone. Every rank calls it and gets the same report.

    The cut model first goes through the step with dropout, to see who draws what. Dropout is off while numbers are
    compared, since each rank's own numbers differ by design. `describe` is layout, model and precision in words;
    `extra_checks` come last, on every rank, with the step that was taken.
    """
    start = time.perf_counter()
    uncut = _uncut(make_step, mesh)
    step = make_step(mesh)
    draws, told = _draws(step)
    step.model.eval()
    cut = record(step)
    tolerance = share_from_first(None if uncut is None else _tolerance(step, uncut, dtype))
    comparison = Comparison(cut, uncut, mesh, tolerance=tolerance)
    comparison.run()
    further = extra_checks(step)
    if uncut is None:
        return _require_report(share_from_first(None))
    checks = (*comparison.checks(), draws, *further)
    layout, model, precision = describe
    first = comparison.first() or told or _first_failed(checks)
    return _require_report(
        share_from_first(
            Report(
                layout=layout,
                model=model,
                precision=precision,
                tolerance=tolerance,
                rows=tuple(comparison.rows()),
                checks=checks,
                first=first,
                seconds=time.perf_counter() - start,
            )
        )
    )


def _uncut(make_step: MakeStep, mesh: ParallelMesh) -> Recording | None:
    """The recording that all others are held against, on the first rank."""
    alone = make_lone_mesh(mesh.device)
    if not mesh.is_first_rank:
        return None
    step = make_step(alone)
    step.model.eval()
    return record(step)


def _tolerance(step: Step, uncut: Recording, dtype: torch.dtype) -> float:
    num_tokens = max(
        (output.numel() // output.shape[-1] for output in uncut.outputs.values() if output.dim()), default=1
    )
    return tolerance_of(
        dtype, num_layers=num_layers_of(step.model), num_summands=num_summands_of(step.model, num_tokens)
    )


def _draws(step: Step) -> tuple[Check, First | None]:
    """Whether random numbers are drawn alike where they must be and differently where they must be."""
    step.model.train()
    num_draws, disagreement = compare_draws(step.model, step.mesh, step.accumulate)
    if disagreement is None:
        told = f"{num_draws} draws on each rank" if num_draws else "the model has no dropout"
        return Check("random numbers", None, True, told), None
    i, j = disagreement.ranks
    told = f"{disagreement.module}: ranks {i} and {j} {disagreement.told}"
    cause = f"Ranks {i} and {j} {disagreement.told}. Look at which random stream it uses."
    return Check("random numbers", None, False, told), First(disagreement.module, "forward", cause)


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
}


def _first_failed(checks: tuple[Check, ...]) -> First | None:
    failed = next((check for check in checks if not check.same), None)
    return None if failed is None else First(failed.name, "step", _CHECK_CAUSES.get(failed.name, failed.told))


def _require_report(report: object) -> Report:
    assert isinstance(report, Report)
    return report
