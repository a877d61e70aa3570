"""Comparison of the cut model's step with the uncut model's step, number by number, on the first rank. The cut model is
divided over the ranks of a layout, and the uncut model is on one rank.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from crosscut.config import TrainingError
from crosscut.parallel import ParallelMesh
from crosscut.parallel.collectives import gather_to_first, share_from_first
from crosscut.verification.assembly import Assembled, Grid, assemble_activation, assemble_parameter, distance
from crosscut.verification.causes import Difference, is_arrangement, usual_cause
from crosscut.verification.recording import (
    ARRIVED,
    INSIDE,
    LOSS,
    RECEIVED,
    Kept,
    Recording,
    call_of,
    in_any_micro_batch,
    micro_batch_of,
    module_of,
)
from crosscut.verification.report import AVERAGES, ROUNDING, Check, First, Row
from crosscut.verification.tolerance import MOST, ROUNDINGS, Bounds

_FLOOR = 1e-3
"""Fraction of the largest element among all tensors of a kind, such as all gradients. For an output, the difference is
divided by the output's own largest element. For any other tensor, it is divided by the tensor's own largest element or
by this fraction, whichever is larger. Without the fraction, a gradient that cancels to almost zero would always differ.
"""


class Comparison:
    """Comparison of the recorded step of the cut model with the recorded step of the uncut model. Every rank must
    create a `Comparison` and call `run`. The other methods give results on the first rank only.
    """

    def __init__(
        self,
        cut: Recording,
        uncut: Recording | None,
        mesh: ParallelMesh,
        *,
        bounds: Bounds,
        exact: Recording | None = None,
        amplification: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`cut` is the recording of this rank. `uncut` and `exact` are given on the first rank and are None on the
        others; `exact` is the recording of the uncut step in a wider type. `amplification` maps the name of a parameter
        to the factor by which the parameter's update may enlarge the relative difference of its gradient.
        """
        self.cut, self.uncut, self.exact, self.mesh = cut, uncut, exact, mesh
        self.tolerance, self.allowed_rounding = bounds.tolerance, bounds.rounding
        self.copies: list[str] = []
        """Descriptions of the tensors and numbers that should be equal on several ranks, but differ."""
        self._differences: dict[tuple[str, str], float] = {}
        self._allowed = {
            (kind, name): min(MOST, factor * bounds.tolerance)
            for kind in ("parameter", "average")
            for name, factor in amplification.items()
        }
        """Allowed differences between cut and uncut tensors, keyed by the tensor's kind and name. The bound of a tensor
        that is not listed is the tolerance.
        """
        self._rounded: dict[tuple[str, str], float] = {}
        """Difference between each uncut tensor and the exact one, keyed by the tensor's kind and name."""
        self._found: dict[tuple[str, str], Difference] = {}
        self._numbers: list[tuple[float, float]] = [(cut.loss, cut.norm)]
        self._first_call: First | None = None
        """First module that the cut model calls more often or less often than the uncut model."""

    def run(self) -> None:
        """Gather the tensors of all ranks on the first rank and compare them. If an error occurs on the first rank, it
        is raised after all ranks have sent their tensors. Raises `TrainingError` if the loss or the gradient norm of
        the uncut step is not finite.
        """
        failure: Exception | None = None if self.uncut is None else _failure_to_be_finite(self.uncut)
        self._numbers = gather_to_first((self.cut.loss, self.cut.norm)) or self._numbers
        calls = gather_to_first(self.cut.calls())
        if calls is not None and self.uncut is not None:
            self._first_call = _first_other_call(_stages_with(calls, self.mesh), self.uncut.calls())
        for kind, cut_ones, uncut_ones, exact_ones in self._recorded():
            names = share_from_first(list(uncut_ones or {}))
            largest = max((_largest(value) for value in (uncut_ones or {}).values()), default=0.0)
            floor = 0.0 if kind == "output" else _FLOOR * largest
            for name in names:
                parts = gather_to_first(cut_ones.get(name))
                if parts is None or uncut_ones is None:
                    continue
                try:
                    like = uncut_ones[name]
                    tensor = like.tensor if isinstance(like, Kept) else like
                    self._note_rounding((kind, name), tensor, exact_ones.get(name), floor)
                    self._compare(kind, name, parts, uncut_ones[name], floor)
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        if self.uncut is not None:
            self._excuse_arrangements()

    def rows(self) -> list[Row]:
        """Return a row for each module call, in the order in which the calls ended."""
        assert self.uncut is not None
        rows = []
        outputs, returned = _by_call(self.uncut.outputs), _by_call(self.uncut.returned)
        for call in self._calls():
            of_outputs = [("output", name) for name in outputs.get(call, []) if INSIDE not in name]
            differences = [self._differences[key] for key in of_outputs]
            forward = self._loss_difference() if call == LOSS else max(differences, default=None)
            of_call = [("returned", name) for name in returned.get(call, [])]
            of_call += [("gradient", name) for name in self._parameters_of(call)]
            gradient = max((self._differences[key] for key in of_call), default=None)
            same = self._is_same(forward) if call == LOSS else all(map(self._agrees, of_outputs))
            rows.append(Row(call, forward, gradient, same and all(map(self._agrees, of_call))))
        return rows

    @property
    def largest_allowed(self) -> float:
        """Largest bound on the relative difference, over all tensors. It is at least the tolerance."""
        return max([self.tolerance, *self._allowed.values()])

    def first(self) -> First | None:
        """Return the first module that the cut model calls more often or less often. If all modules are called as
        often, return the first module whose output differs in the forward pass. If all outputs agree, return the first
        module whose gradients differ in the backward pass. None if nothing differs.
        """
        assert self.uncut is not None
        if self._first_call is not None:
            return self._first_call
        for name in self.uncut.outputs:
            if ("output", name) in self._found:
                return self._told("forward", ("output", name))
        if not self._is_same(self._loss_difference()):
            return First(LOSS, "forward", _LOSS_CAUSE)
        return self._first_backward()

    def checks(self) -> list[Check]:
        """Return the checks of the whole model: loss, gradient norm, clipped gradients, parameters after the optimizer
        step, their moving averages if there are any, and copies on different ranks.
        """
        assert self.uncut is not None
        norms = [norm for _, norm in self._numbers]
        norm = max(_apart(each, self.uncut.norm) for each in norms)
        if len({repr(numbers) for numbers in self._numbers}) > 1:
            self.copies.append("the loss or the gradient norm")
        return [
            self._check("loss", self._loss_difference()),
            self._check("gradient norm", norm, f"{norms[0]:.6g}, uncut {self.uncut.norm:.6g}"),
            self._worst("clipped gradients", "clipped"),
            self._worst("parameters after a step", "parameter"),
            *([self._worst(AVERAGES, "average")] if self.uncut.averages else []),
            Check("copies on all ranks", None, not self.copies, _listed(self.copies) or "the same to the last bit"),
        ]

    def rounding(self) -> list[Check]:
        """Check that the uncut step differs only by rounding from the exact step. The exact step is the same step of
        the uncut model, computed in the parameters' own type. The list of checks is empty if there is no exact step.

        Each check names the tensor that differs most. Parameters after the step are not checked: AdamW divides by the
        size of the gradients and therefore enlarges gradients that consist of rounding alone.
        """
        if self.exact is None or self.uncut is None:
            return []
        words = {"output": "output of", "returned": "gradient returned by", "gradient": "gradient of"}
        forward = [(_apart(self.uncut.loss, self.exact.loss), LOSS)]
        backward = [(_apart(self.uncut.norm, self.exact.norm), "gradient norm")]
        for (kind, name), off in self._rounded.items():
            if kind in words:
                (forward if kind == "output" else backward).append((off, f"{words[kind]} {name}"))
        bounds = (self.allowed_rounding.outputs, self.allowed_rounding.gradients)
        wider = str(next(iter(self.exact.parameters.values())).tensor.dtype).removeprefix("torch.")
        checks = []
        for title, found, allowed in zip(ROUNDING, (forward, backward), bounds, strict=True):
            off, what = max(found)
            checks.append(Check(title, off, off <= allowed, f"at most {allowed:.1e} from {wider}, largest at {what}"))
        return checks

    def _agrees(self, key: tuple[str, str]) -> bool:
        return self._differences[key] <= self._allowed_of(key)

    def _allowed_of(self, key: tuple[str, str]) -> float:
        return self._allowed.get(key, self.tolerance)

    def _note_rounding(self, key: tuple[str, str], uncut: Tensor, exact: Any, floor: float) -> None:
        """Allow a tensor to differ by `ROUNDINGS` times the uncut tensor's own rounding, if this bound is larger than
        the tensor's bound so far.
        """
        if exact is None:
            return
        off = relative_difference(uncut, exact.tensor if isinstance(exact, Kept) else exact, floor=floor)
        self._rounded[key] = off
        if self._allowed_of(key) < ROUNDINGS * off < float("inf"):
            self._allowed[key] = ROUNDINGS * off

    def _recorded(self) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any] | None, Mapping[str, Any]]]:
        fields = ("outputs", "returned", "gradients", "clipped", "parameters", "averages")
        for name in fields:
            kind = name if name == "clipped" or name == "returned" else name[:-1]
            uncut = None if self.uncut is None else getattr(self.uncut, name)
            yield kind, getattr(self.cut, name), uncut, {} if self.exact is None else getattr(self.exact, name)

    def _compare(self, kind: str, name: str, parts: list[Any], uncut: Any, floor: float) -> None:
        """Compare a tensor on each pipeline stage that holds the tensor. Usually, only one stage holds it."""
        stages = _stages_with(parts, self.mesh)
        for of_stage in stages:
            self._compare_on_stage(kind, name, of_stage, uncut, floor)
        if len(stages) > 1 and any(
            not torch.equal(one.tensor, other.tensor) for one, other in zip(stages[0], stages[-1], strict=True)
        ):
            self.copies.append(f"{kind} of {name} on the first and the last stage")

    def _compare_on_stage(self, kind: str, name: str, parts: list[Any], uncut: Any, floor: float) -> None:
        like = uncut.tensor if isinstance(uncut, Kept) else uncut
        grid = Grid({}, [torch.empty(0)])
        assembled: Assembled | None = None
        if all(part is not None for part in parts):
            tensors = [part.tensor if isinstance(part, Kept) else part for part in parts]
            owners = {axis.name for axis in self.mesh.owners}
            grid = Grid({axis.name: axis.size for axis in self.mesh.axes if axis.name not in owners}, tensors)
            if isinstance(uncut, Kept):
                assembled = assemble_parameter(grid, parts[0].cut_dim, like)
            else:
                how = {"is_gradient": kind == "returned", "is_inside": self._is_inside(name)}
                assembled = assemble_activation(grid, like, **how)
        difference = float("inf")
        if assembled is not None:
            apart = assembled.spread / max(_largest(like), floor, 1e-300)
            difference = max(relative_difference(assembled.whole, like, floor=floor), apart)
        self._differences[(kind, name)] = max(difference, self._differences.get((kind, name), 0.0))
        copies = [] if assembled is None else assembled.copies_differ
        if copies:
            what = {"output": "output of", "returned": "gradient returned by"}.get(kind, f"{kind} of")
            self.copies.append(f"{what} {name} on ranks {copies[0][0]} and {copies[0][1]}")
        if copies or difference > self._allowed_of((kind, name)):
            told_kind = "received" if RECEIVED in name else "arrived" if ARRIVED in name else kind
            self._found[(kind, name)] = Difference(told_kind, like, assembled, grid, self._allowed_of((kind, name)))

    def _is_inside(self, name: str) -> bool:
        """Whether a tensor was seen inside a module's own code, or in a head, which the loss calls after the whole
        model.
        """
        assert self.uncut is not None
        head = name.partition(".")[0]
        return INSIDE in name or (head != self.uncut.root and f"{LOSS}{INSIDE}input of {head}" in self.uncut.outputs)

    def _first_backward(self) -> First | None:
        assert self.uncut is not None
        of_parameters = [name for name in self.uncut.gradients if ("gradient", name) in self._found]
        returned = [name for name in self.uncut.returned if ("returned", name) in self._found]
        if of_parameters and not returned and len(of_parameters) == len(self.uncut.gradients):
            cause = usual_cause(self._found[("gradient", of_parameters[-1])])
            return First("gradient reduction", "backward", cause)
        for place in self._backward_order():  # a parameter's gradient is the sum over all micro-batches
            for name in (name for name in returned if in_any_micro_batch(name) == place):
                return self._told("backward", ("returned", name))
            for parameter in self._parameters_of(place):
                if parameter in of_parameters:
                    return First(place, "backward", usual_cause(self._found[("gradient", parameter)]))
        return None

    def _told(self, direction: str, key: tuple[str, str]) -> First:
        """Return the place and the usual cause of a difference."""
        return First(call_of(key[1]), direction, usual_cause(self._found[key]), micro_batch_of(key[1]))

    def _backward_order(self) -> list[str]:
        """Return the places that the backward pass of a micro-batch reaches, in order: calls, and tensors inside calls.
        Modules that return no gradient, such as embeddings, come last.
        """
        assert self.uncut is not None
        places = dict.fromkeys(map(in_any_micro_batch, self.uncut.returned))
        return [*places, *(call for call in reversed(self._calls()) if call not in places)]

    def _calls(self) -> list[str]:
        """Return the names of the table's rows: calls in the order in which they ended, then modules that hold
        parameters but have no call, then the loss.
        """
        assert self.uncut is not None
        calls = list(dict.fromkeys(call_of(name) for name in self.uncut.outputs if INSIDE not in name))
        owners = {self._owner(name) for name in self.uncut.gradients} - set(calls)
        return [*calls, *sorted(owners), LOSS]

    def _parameters_of(self, call: str) -> list[str]:
        assert self.uncut is not None
        return [name for name in self.uncut.gradients if self._owner(name) == call]

    def _owner(self, parameter: str) -> str:
        """Return the module that holds a parameter. If the parent of this module returns several tensors, return the
        parent instead.
        """
        assert self.uncut is not None
        holder = parameter.rpartition(".")[0]
        user = holder.rpartition(".")[0]
        return user if f"{user}[0]" in self.uncut.outputs else holder or self.uncut.root

    def _excuse_arrangements(self) -> None:
        """Ignore tensors whose numbers are right but arranged differently. Between the operators f and g of tensor
        parallelism, a rank may hold summands, or heads in another order, without a bug. There is no bug if the loss and
        every parameter's gradient agree.
        """
        assert self.uncut is not None
        wrong = {kind for kind, _ in self._found}
        if wrong - {"output", "returned"} or not self._is_same(self._loss_difference()):
            return
        for key, difference in list(self._found.items()):
            if is_arrangement(difference):
                del self._found[key]
                self._differences[key] = 0.0
                self.copies = [line for line in self.copies if f" {key[1]} on ranks" not in line]

    def _loss_difference(self) -> float:
        assert self.uncut is not None
        return max(_apart(loss, self.uncut.loss) for loss, _ in self._numbers)

    def _worst(self, title: str, kind: str) -> Check:
        """Return the check for the largest difference of a kind. If some tensors exceed their bounds, only these
        tensors count.
        """
        keys = [key for key in self._differences if key[0] == kind]
        worst = max(keys, key=lambda key: (not self._agrees(key), self._differences[key]))
        return Check(title, self._differences[worst], self._agrees(worst), f"largest at {worst[1]}")

    def _check(self, name: str, difference: float, told: str = "") -> Check:
        return Check(name, difference, self._is_same(difference), told)

    def _is_same(self, difference: float | None) -> bool:
        return difference is None or difference <= self.tolerance


def _by_call(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of recorded tensors by call."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(call_of(name), []).append(name)
    return groups


_LOSS_CAUSE = (
    "All activations agree, but the loss does not: check the head (the tokens that it reads, and its sums over the "
    "ranks), each rank's shard of the vocabulary (offsets, mask, padding), the target's logit, and the number of "
    "targets or labels by which the loss is divided."
)


def _first_other_call(stages: list[list[Any]], uncut: list[tuple[str, int]]) -> First | None:
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
            return First(module, "forward", cause, micro_batch)
    return None


def _times_called(module: str, micro_batch: int, calls: Counter[tuple[str, int]]) -> str:
    number = sum(n for (name, index), n in calls.items() if module_of(name) == module and index == micro_batch)
    return "once" if number == 1 else f"{number} times"


def _stages_with(parts: list[Any], mesh: ParallelMesh) -> list[list[Any]]:
    """Split the parts of a tensor by pipeline stage, and return the parts of each stage that holds the tensor. `parts`
    has one entry per rank; an entry is None if the rank holds no part. Without a pipeline, or if no rank holds the
    tensor, all parts count as one stage.
    """
    size = len(parts) // (1 if mesh.pipeline is None else mesh.pipeline.size)
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


def _largest(value: Any) -> float:
    tensor = value.tensor if isinstance(value, Kept) else value
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    finite = tensor[tensor.isfinite()]
    return float(finite.double().abs().max()) if finite.numel() else 0.0


def _apart(actual: float, expected: float) -> float:
    pair = (torch.tensor(number, dtype=torch.float64) for number in (actual, expected))
    return relative_difference(*pair)


def _listed(copies: list[str]) -> str:
    more = f" and {len(copies) - 1} more" if len(copies) > 1 else ""
    return f"{copies[0]}{more}" if copies else ""
