"""Comparison of the cut model's step with the uncut model's step, number by number, on the first rank. The cut model is
divided over the ranks of a layout, and the uncut model is on one rank.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from crosscut.config import TrainingError
from crosscut.parallel import ParallelMesh
from crosscut.parallel.collectives import gather_to_first, share_from_first
from crosscut.verification.assembly import (
    Assembled,
    Grid,
    assemble_activation,
    assemble_columns,
    assemble_parameter,
    assemble_places,
    distance,
)
from crosscut.verification.judging.causes import StepDifference
from crosscut.verification.judging.differences import Differences
from crosscut.verification.recording import (
    ARRIVED,
    INSIDE,
    LOSS,
    RECEIVED,
    ParameterShard,
    Recorded,
    Recording,
    TensorKind,
    module_of,
    tensor_of,
)
from crosscut.verification.report import FirstDifference, ReportCheck, StepPhase
from crosscut.verification.tolerance import ROUNDINGS

_T = TypeVar("_T")

FLOOR = 1e-3
"""Fraction of the largest element among all tensors of a kind, such as all gradients. For an output, the difference is
divided by the output's own largest element. For any other tensor, it is divided by the tensor's own largest element or
by this fraction, whichever is larger. Without the fraction, a gradient that cancels to almost zero would always differ.
"""

NOTHING = 1e-9
"""Fraction of the largest element among all tensors of a kind, below which a tensor consists of rounding alone: the
gradient of a bias in front of a batch norm. Its difference is divided by that largest element.
"""

_BUNDLE = 1 << 20
"""Most bytes of the uncut tensors whose parts are gathered in one message."""


class StepComparison:
    """Comparison of the recorded steps of the cut and the uncut model, tensor by tensor. Every rank must create one and
    call `run`. Only the first rank finds the differences.
    """

    def __init__(
        self,
        cut: Recording,
        uncut: Recording | None,
        mesh: ParallelMesh,
        *,
        differences: Differences,
        exact: Recording | None = None,
    ) -> None:
        """`cut` is the recording of this rank. `uncut` and `exact` are given on the first rank and are None on the
        others; `exact` is the recording of the uncut step in a wider type. `differences` holds the bounds, and receives
        what differs.
        """
        self._cut, self._uncut, self._exact, self._mesh = cut, uncut, exact, mesh
        self._differences = differences

    def run(self) -> None:
        """Gather the tensors of all ranks on the first rank and compare them. If an error occurs on the first rank, it
        is raised after all ranks have sent their tensors. Raises `TrainingError` if the loss or the gradient norm of
        the uncut step is not finite.
        """
        failure: Exception | None = None if self._uncut is None else _failure_to_be_finite(self._uncut)
        numbers = gather_to_first((self._cut.loss, self._cut.norm))
        calls = gather_to_first(self._cut.calls())
        bundles = {kind: list(_bundles(self._uncut.tensors(kind))) for kind in TensorKind} if self._uncut else {}
        for kind, of_kind in share_from_first(bundles, is_late=False).items():
            for name, parts, floor in self._gathered(kind, of_kind):
                try:
                    self._note_rounding(kind, name, floor)
                    self._compare(kind, name, parts, floor)
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        if self._uncut is not None and numbers is not None and calls is not None:
            differences = self._differences
            differences.failure = self._cut.failure
            if differences.failure is None:  # a step that failed has fewer calls
                differences.first_call = _first_other_call(_stages_with(calls, self._mesh), self._uncut.calls())
            differences.loss = max(relative_distance(loss, self._uncut.loss) for loss, _ in numbers)
            differences.norm = max(relative_distance(norm, self._uncut.norm) for _, norm in numbers)
            differences.excuse_arrangements(self._uncut.root, self._with_other_inputs())
            if len(set(map(repr, numbers))) > 1:
                differences.copies.append("the loss or the gradient norm")

    def _with_other_inputs(self) -> set[str]:
        """Return the calls whose input the cut model makes in another place, as code does that applies f to a tensor
        before it calls a module. The tensor may have other uses, which only one of the two gradients includes.
        """
        assert self._uncut is not None
        return {call for call, origin in self._uncut.origins.items() if self._cut.origins.get(call) != origin}

    def _gathered(
        self, kind: TensorKind, bundles: Sequence[Sequence[str]]
    ) -> Iterator[tuple[str, list[Recorded | None], float]]:
        """Gather the tensors of a kind, those of a bundle of names in one message. Yields the name of each tensor, the
        part of each rank (None if the rank holds no part) and the smallest number by which a difference is divided.
        Yields nothing on ranks other than the first.
        """
        uncut = {} if self._uncut is None else self._uncut.tensors(kind)
        largest = max(map(_largest, map(tensor_of, uncut.values())), default=0.0)
        for names in bundles:
            every = gather_to_first([self._cut.tensors(kind).get(name) for name in names])
            for name, *parts in zip(names, *every, strict=True) if every is not None else ():
                is_rounding = 0.0 < _largest(tensor_of(uncut[name])) < NOTHING * largest
                yield name, parts, 0.0 if kind is TensorKind.OUTPUT else (1.0 if is_rounding else FLOOR) * largest

    def _note_rounding(self, kind: TensorKind, name: str, floor: float) -> None:
        """Allow a tensor to differ by `ROUNDINGS` times the uncut tensor's own rounding, if this bound is larger than
        the tensor's bound so far.
        """
        assert self._uncut is not None
        exact = None if self._exact is None else self._exact.tensors(kind).get(name)
        if exact is None:
            return
        key, differences = (kind, name), self._differences
        off = relative_difference(tensor_of(self._uncut.tensors(kind)[name]), tensor_of(exact), floor=floor)
        differences.rounded[key] = off
        if differences.allowed_of(key) < ROUNDINGS * off < float("inf"):
            differences.allowed[key] = ROUNDINGS * off

    def _compare(self, kind: TensorKind, name: str, parts: list[Recorded | None], floor: float) -> None:
        """Compare a tensor on each pipeline stage that holds the tensor. Usually, only one stage holds it."""
        stages = _stages_with(parts, self._mesh)
        for of_stage in stages:
            self._compare_on_stage(kind, name, of_stage, floor)
        if len(stages) > 1 and not all(map(_is_equal, stages[0], stages[-1])):
            self._differences.copies.append(f"{kind} of {name} on the first and the last stage")

    def _compare_on_stage(self, kind: TensorKind, name: str, parts: list[Recorded | None], floor: float) -> None:
        assert self._uncut is not None
        uncut, differences, key = self._uncut.tensors(kind)[name], self._differences, (kind, name)
        like = tensor_of(uncut)
        grid, assembled = self._assembled(kind, name, parts)
        difference = float("inf")
        if assembled is not None:
            apart = assembled.spread / max(_largest(like), floor, 1e-300)
            difference = max(relative_difference(assembled.whole, like, floor=floor), apart)
        differences.largest[key] = max(difference, differences.largest.get(key, 0.0))
        copies = [] if assembled is None else assembled.copies_differ
        if copies:
            differences.copies.append(f"{kind.of} {name} on ranks {copies[0][0]} and {copies[0][1]}")
        if copies or difference > differences.allowed_of(key):
            is_sent = RECEIVED in name or ARRIVED in name
            differences.found[key] = StepDifference(
                kind, like, assembled, grid, tolerance=differences.allowed_of(key), is_sent=is_sent
            )

    def _assembled(self, kind: TensorKind, name: str, parts: list[Recorded | None]) -> tuple[Grid, Assembled | None]:
        """Assemble a tensor from its parts on the ranks of one stage. Returns the parts as a grid, and None if a rank
        holds no part or if the shapes do not fit.
        """
        assert self._uncut is not None
        uncut, held = self._uncut.tensors(kind)[name], [part for part in parts if part is not None]
        if len(held) < len(parts):
            return Grid({}, [torch.empty(0)]), None
        layout, first = self._mesh.layout, held[0]
        is_expert = isinstance(first, ParameterShard) and first.is_expert
        grid = Grid(layout.ranks_of(experts=is_expert).axes_of_owner, list(map(tensor_of, held)))
        if isinstance(uncut, ParameterShard):
            assert isinstance(first, ParameterShard)
            places = [part.place for part in held if isinstance(part, ParameterShard) and part.place is not None]
            if places:
                return grid, assemble_places(grid.parts, places, uncut.tensor)
            return grid, assemble_parameter(grid, first.cuts, uncut.tensor)
        is_gradient = kind is TensorKind.RETURNED
        if (columns := self._cut.columns.get((kind, name))) is not None and len(columns) == len(held):
            return grid, assemble_columns(grid.parts, columns, uncut, is_gradient=is_gradient)
        if (own := self._cut.places.get((kind, name))) is not None or self._cut.is_copied:
            return grid, assemble_places(grid.parts, own or [()] * len(held), uncut)
        is_inside = _is_inside(name, self._uncut)
        return grid, assemble_activation(grid, uncut, is_gradient=is_gradient, is_inside=is_inside)


def _is_inside(name: str, uncut: Recording) -> bool:
    """Whether a tensor was seen inside a module's own code, or in a head, which the loss calls after the model."""
    head = name.partition(".")[0]
    return INSIDE in name or (head != uncut.root and f"{LOSS}{INSIDE}input of {head}" in uncut.outputs)


def _bundles(tensors: Mapping[str, Recorded]) -> Iterator[list[str]]:
    """Yield the names of the tensors in lists. The tensors of a list have `_BUNDLE` bytes at most, or there is one."""
    bundle: list[str] = []
    size = 0
    for name, recorded in tensors.items():
        more = tensor_of(recorded).nbytes
        if bundle and size + more > _BUNDLE:
            yield bundle
            bundle, size = [], 0
        bundle.append(name)
        size += more
    if bundle:
        yield bundle


def _is_equal(one: Recorded | None, other: Recorded | None) -> bool:
    return one is not None and other is not None and torch.equal(tensor_of(one), tensor_of(other))


def _first_other_call(
    stages: list[list[list[tuple[str, int]]]], uncut: list[tuple[str, int]]
) -> FirstDifference | None:
    """Find the first module that the cut model calls more often or less often than the uncut model does. `stages` holds
    the calls of each rank, by pipeline stage. A stage makes a call if one of its ranks makes the call.
    """
    cut = Counter(call for of_ranks in stages for call in dict.fromkeys(call for calls in of_ranks for call in calls))
    expected = Counter(uncut)
    changed = [*(cut - expected), *(expected - cut)]
    modules = {module_of(name) for name, _ in changed}
    for name, micro_batch in changed:
        module = module_of(name)
        if not any(module.startswith(f"{other}.") for other in modules):  # of modules in one another, the outermost
            is_, must = (_times_called(module, micro_batch, calls) for calls in (cut, expected))
            cause = (
                f"The cut model calls the module {is_} per micro-batch, but the uncut model {must}: check on which "
                "ranks, in which stages and for which micro-batches the module runs."
            )
            return FirstDifference(module, StepPhase.FORWARD, cause, micro_batch)
    return None


def _times_called(module: str, micro_batch: int, calls: Counter[tuple[str, int]]) -> str:
    number = sum(n for (name, index), n in calls.items() if module_of(name) == module and index == micro_batch)
    return "once" if number == 1 else f"{number} times"


def _stages_with(parts: list[_T], mesh: ParallelMesh) -> list[list[_T]]:
    """Split the parts of a tensor by pipeline stage, and return the parts of each stage that holds the tensor. `parts`
    has one entry per rank; an entry is None if the rank holds no part. Without a pipeline, or if no rank holds the
    tensor, all parts count as one stage.
    """
    size = mesh.layout.ranks.per_owner
    stages = [parts[start : start + size] for start in range(0, len(parts), size)]  # the pipeline is outermost
    return [stage for stage in stages if any(part is not None for part in stage)] or [parts]


def _failure_to_be_finite(uncut: Recording) -> Exception | None:
    """Return an error if the uncut loss or gradient norm is not finite, otherwise None. Equal overflows in both models
    would prove nothing.
    """
    if math.isfinite(uncut.loss) and math.isfinite(uncut.norm):
        return None
    return TrainingError(
        "The loss and the gradient norm of the uncut model must be finite for a comparison, but are "
        f"{uncut.loss:g} and {uncut.norm:g}. Verify in a precision with a larger range."
    )


def relative_difference(actual: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    """Largest difference between corresponding elements, relative to the largest finite element of `expected` (or to
    `floor` if that is larger). Zero for empty tensors, infinite if an element is NaN.
    """
    if not expected.numel():
        return 0.0
    difference = distance(actual, expected).max().item()
    if difference == 0.0:
        return 0.0
    relative = difference / max(_largest(expected), floor, 1e-300)
    return relative if relative < float("inf") else float("inf")  # NaN compares as false


def check_of_largest(name: str, found: Mapping[str, float], tolerance: float, told: str) -> list[ReportCheck]:
    """Check the largest difference of all ranks. `found` maps the names of this rank's tensors to their differences.
    Every rank must call this function. The list has one check on the first rank and is empty on the others.
    """
    mine = max(found, key=lambda tensor: found[tensor])
    every = gather_to_first((found[mine], mine))
    if every is None:
        return []
    difference, worst = max(every)
    return [ReportCheck(name, difference, difference <= tolerance, f"{told}; largest at {worst}")]


def relative_distance(actual: float, expected: float) -> float:
    """Difference of two numbers, relative to the expected one; see `relative_difference`."""
    pair = (torch.tensor(number, dtype=torch.float64) for number in (actual, expected))
    return relative_difference(*pair)


def _largest(tensor: Tensor) -> float:
    """Absolute value of the largest finite element, 0 if there is none."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    finite = tensor[tensor.isfinite()]
    return float(finite.double().abs().max()) if finite.numel() else 0.0
