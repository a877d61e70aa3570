"""Differences between two recorded steps, and the bounds within which they count as rounding."""

from collections.abc import Collection, Mapping

from crosscut.verification.judging.causes import StepDifference, is_arrangement
from crosscut.verification.recording import INSIDE, StepFailure, TensorKind, call_of, module_of
from crosscut.verification.report import FirstDifference
from crosscut.verification.tolerance import MOST, Bounds

_ARRANGED = (TensorKind.OUTPUT, TensorKind.RETURNED)
"""Kinds of tensors that may be arranged in another way."""

TensorKey = tuple[TensorKind, str]
"""Kind and name of a recorded tensor."""


class Differences:
    """Differences between the cut and the uncut step, tensor by tensor, and the bound of each difference.

    `amplification` maps the name of a parameter to the factor by which the parameter's update may enlarge the relative
    difference of its gradient.
    """

    def __init__(self, bounds: Bounds, amplification: Mapping[str, float]) -> None:
        self.bounds = bounds
        self.allowed = {
            (kind, name): min(MOST, factor * bounds.tolerance)
            for kind in (TensorKind.PARAMETER, TensorKind.AVERAGE)
            for name, factor in amplification.items()
        }
        """Bounds of the tensors whose bound is not the tolerance."""
        self.loss = self.norm = 0.0
        """Largest relative difference of the loss, and of the gradient norm, on any rank."""
        self.largest: dict[TensorKey, float] = {}
        """Largest relative difference of each tensor."""
        self.rounded: dict[TensorKey, float] = {}
        """Relative difference between each uncut tensor and the exact one."""
        self.found: dict[TensorKey, StepDifference] = {}
        """Tensors that differ by more than their bound, or whose copies differ."""
        self.first_call: FirstDifference | None = None
        """First module that the cut model calls more often or less often than the uncut model."""
        self.failure: StepFailure | None = None
        """Error that ended the step of the cut model."""
        self.copies: list[str] = []
        """Descriptions of the tensors and numbers that should be equal on several ranks, but differ."""

    @property
    def largest_allowed(self) -> float:
        """Largest bound on the relative difference, over all tensors. It is at least the tolerance."""
        return max([self.bounds.tolerance, *self.allowed.values()])

    def allowed_of(self, key: TensorKey) -> float:
        """Bound on the relative difference of a tensor."""
        return self.allowed.get(key, self.bounds.tolerance)

    def agrees(self, key: TensorKey) -> bool:
        """Whether the difference of a tensor is within its bound."""
        return self.largest[key] <= self.allowed_of(key)

    def is_same(self, difference: float | None) -> bool:
        """Whether the difference of a number is within the tolerance. None means that there is nothing to compare."""
        return difference is None or difference <= self.bounds.tolerance

    def excuse_arrangements(self, root: str, with_other_inputs: Collection[str]) -> None:
        """Ignore tensors whose numbers are right but arranged differently. Between the operators f and g of tensor
        parallelism, a rank may hold summands, or heads in another order, without a bug. There is no bug if the loss and
        every parameter's gradient agree. There is none inside a module that returns the right output or, for gradients,
        the right gradient of its input. The output of the whole model, whose name is `root`, is never excused, and
        neither are gradients and parameters.

        If the loss and every parameter's gradient agree, the gradients of inputs that are other tensors in the cut
        model are ignored, too: those of the calls in `with_other_inputs`.
        """
        is_right = self.is_same(self.loss) and all(kind is not TensorKind.GRADIENT for kind, _ in self.found)
        for key, difference in list(self.found.items()):
            if key[0] not in _ARRANGED or (module_of(call_of(key[1])) == root and INSIDE not in key[1]):
                continue
            is_other = is_right and key[0] is TensorKind.RETURNED and key[1] in with_other_inputs
            if is_other or ((is_right or self._is_inside_right(key)) and is_arrangement(difference)):
                del self.found[key]
                self.largest[key] = 0.0
                self.copies = [line for line in self.copies if f" {key[1]} on ranks" not in line]

    def _is_inside_right(self, key: TensorKey) -> bool:
        """Whether a tensor belongs to the inside of a module whose own tensor of this kind agrees."""
        kind, name = key
        place = module_of(call_of(name))
        outer = place if INSIDE in name else place.rpartition(".")[0]
        while outer and (kind, outer) not in self.largest:
            outer = outer.rpartition(".")[0]
        return bool(outer) and (kind, outer) not in self.found
