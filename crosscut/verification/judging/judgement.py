"""Judgement of the differences between the cut and the uncut step: rows and checks of the report, and the first
difference.
"""

from crosscut.verification.comparison import relative_distance
from crosscut.verification.judging.calls import RecordedCalls
from crosscut.verification.judging.causes import usual_cause
from crosscut.verification.judging.differences import Differences, TensorKey
from crosscut.verification.recording import (
    INSIDE,
    LOSS,
    Recording,
    TensorKind,
    call_of,
    in_any_micro_batch,
    micro_batch_of,
)
from crosscut.verification.report import (
    AVERAGES,
    ROUNDING,
    STATISTICS,
    CallRow,
    FirstDifference,
    ReportCheck,
    StepPhase,
)

_LOSS_CAUSE = (
    "All activations agree, but the loss does not: check the head (the tokens that it reads, and its sums over the "
    "ranks), each rank's shard of the vocabulary (offsets, mask, padding), the target's logit, and the number of "
    "targets or labels by which the loss is divided."
)

_STATISTIC_CAUSE = (
    "The norm's outputs agree, but its running statistics do not: check over which ranks the statistics of a batch are "
    "taken, and that they are updated once per step."
)

_FAILED = (
    "All outputs before this place agree, but here the cut model raises {error}. Check whether the module's input must "
    "be whole, or only this rank's part, and which of the two arrives."
)


class StepJudgement:
    """Judgement of the `differences` from the `uncut` step, for the report."""

    def __init__(self, differences: Differences, uncut: Recording) -> None:
        self.differences, self._uncut = differences, uncut
        self._calls = RecordedCalls(uncut)

    def rows(self) -> list[CallRow]:
        """Return a row for each module call, in the order in which the calls ended."""
        differences, calls = self.differences, self._calls
        rows = []
        for call in calls.names():
            outputs = [(TensorKind.OUTPUT, name) for name in calls.outputs.get(call, []) if INSIDE not in name]
            gradients = [(TensorKind.RETURNED, name) for name in calls.returned.get(call, [])]
            gradients += [(TensorKind.GRADIENT, name) for name in calls.parameters_of(call)]
            forward = differences.loss if call == LOSS else self._largest(outputs)
            same = differences.is_same(forward) if call == LOSS else all(map(differences.agrees, outputs))
            same = same and all(map(differences.agrees, gradients))
            rows.append(CallRow(call, forward, self._largest(gradients), same))
        return rows

    def first(self) -> FirstDifference | None:
        """Return the first module that the cut model calls more often or less often. If all modules are called as
        often, return the first module whose output differs in the forward pass. If all outputs agree, return the first
        module whose gradients differ in the backward pass. None if nothing differs.
        """
        if self.differences.first_call is not None:
            return self.differences.first_call
        for name in self._uncut.outputs:
            if (TensorKind.OUTPUT, name) in self.differences.found and not self._is_beyond_failure(name):
                return self._place(StepPhase.FORWARD, (TensorKind.OUTPUT, name))
        if self.differences.failure is not None:
            module, error = self.differences.failure
            return FirstDifference(module, StepPhase.FORWARD, _FAILED.format(error=error))
        if not self.differences.is_same(self.differences.loss):
            return FirstDifference(LOSS, StepPhase.FORWARD, _LOSS_CAUSE)
        for name in self._uncut.statistics:
            if (TensorKind.STATISTIC, name) in self.differences.found:
                return FirstDifference(name.rpartition(".")[0], StepPhase.FORWARD, _STATISTIC_CAUSE)
        return self._first_backward()

    def checks(self, norm: float) -> list[ReportCheck]:
        """Return the checks of the whole model: loss, gradient norm, clipped gradients, parameters after the optimizer
        step, their moving averages if there are any, and copies on different ranks. `norm` is the gradient norm of the
        cut model on the first rank.
        """
        differences, copies = self.differences, self.differences.copies
        return [
            self._check("loss", differences.loss),
            self._check("gradient norm", differences.norm, f"{norm:.6g}, uncut {self._uncut.norm:.6g}"),
            self._worst("clipped gradients", TensorKind.CLIPPED),
            self._worst("parameters after a step", TensorKind.PARAMETER),
            *([self._worst(AVERAGES, TensorKind.AVERAGE)] if self._uncut.averages else []),
            *([self._worst(STATISTICS, TensorKind.STATISTIC)] if self._uncut.statistics else []),
            ReportCheck("copies on all ranks", None, not copies, _listed(copies) or "the same to the last bit"),
        ]

    def rounding(self, exact: Recording | None) -> list[ReportCheck]:
        """Check that the uncut step differs only by rounding from the `exact` step. The exact step is the same step of
        the uncut model, computed in the parameters' own type. The list of checks is empty if there is no exact step.

        Each check names the tensor that differs most. Parameters after the step are not checked: AdamW divides by the
        size of the gradients and therefore enlarges gradients that consist of rounding alone.
        """
        if exact is None:
            return []
        forward = [(relative_distance(self._uncut.loss, exact.loss), LOSS)]
        backward = [(relative_distance(self._uncut.norm, exact.norm), "gradient norm")]
        for (kind, name), off in self.differences.rounded.items():
            if kind in (TensorKind.OUTPUT, TensorKind.RETURNED, TensorKind.GRADIENT):
                (forward if kind is TensorKind.OUTPUT else backward).append((off, f"{kind.of} {name}"))
        bounds = self.differences.bounds.rounding
        wider = str(next(iter(exact.parameters.values())).tensor.dtype).removeprefix("torch.")
        checks = []
        for title, found, allowed in zip(
            ROUNDING, (forward, backward), (bounds.outputs, bounds.gradients), strict=True
        ):
            off, what = max(found)
            told = f"at most {allowed:.1e} from {wider}, largest at {what}"
            checks.append(ReportCheck(title, off, off <= allowed, told))
        return checks

    def _is_beyond_failure(self, name: str) -> bool:
        """Whether an error ended the step of the cut model before an output was recorded."""
        difference = self.differences.found[TensorKind.OUTPUT, name]
        return self.differences.failure is not None and not difference.grid.axes

    def _first_backward(self) -> FirstDifference | None:
        found = self.differences.found
        parameters = [name for name in self._uncut.gradients if (TensorKind.GRADIENT, name) in found]
        returned = [name for name in self._uncut.returned if (TensorKind.RETURNED, name) in found]
        if parameters and not returned and len(parameters) == len(self._uncut.gradients):
            cause = usual_cause(found[(TensorKind.GRADIENT, parameters[-1])])
            return FirstDifference("gradient reduction", StepPhase.BACKWARD, cause)
        for place in self._calls.backward_order():  # a parameter's gradient is the sum over all micro-batches
            for name in returned:
                if in_any_micro_batch(name) == place:
                    return self._place(StepPhase.BACKWARD, (TensorKind.RETURNED, name))
            for parameter in self._calls.parameters_of(place):
                if parameter in parameters:
                    cause = usual_cause(found[(TensorKind.GRADIENT, parameter)])
                    return FirstDifference(place, StepPhase.BACKWARD, cause)
        return None

    def _place(self, direction: StepPhase, key: TensorKey) -> FirstDifference:
        """Return the place and the usual cause of a difference."""
        cause = usual_cause(self.differences.found[key])
        return FirstDifference(call_of(key[1]), direction, cause, micro_batch_of(key[1]))

    def _largest(self, keys: list[TensorKey]) -> float | None:
        return max((self.differences.largest[key] for key in keys), default=None)

    def _worst(self, title: str, kind: TensorKind) -> ReportCheck:
        """Return the check for the largest difference of a kind. If some tensors exceed their bounds, only these
        tensors count.
        """
        largest, agrees = self.differences.largest, self.differences.agrees
        worst = max((key for key in largest if key[0] is kind), key=lambda key: (not agrees(key), largest[key]))
        return ReportCheck(title, largest[worst], agrees(worst), f"largest at {worst[1]}")

    def _check(self, name: str, difference: float, told: str = "") -> ReportCheck:
        return ReportCheck(name, difference, self.differences.is_same(difference), told)


def _listed(copies: list[str]) -> str:
    more = f" and {len(copies) - 1} more" if len(copies) > 1 else ""
    return f"{copies[0]}{more}" if copies else ""
