"""Order of the module calls in a recording."""

from collections.abc import Iterable

from crosscut.verification.recording import INSIDE, LOSS, Recording, call_of, in_any_micro_batch


class RecordedCalls:
    """Calls of a `recording` in the order of the forward and of the backward pass, and the parameters of each call."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.outputs, self.returned = _by_call(recording.outputs), _by_call(recording.returned)
        """Names of the outputs and of the returned gradients of each call."""

    def names(self) -> list[str]:
        """Return the names of the report's rows: calls in the order in which they ended, then modules that hold
        parameters but have no call, then the loss.
        """
        calls = list(dict.fromkeys(call_of(name) for name in self._recording.outputs if INSIDE not in name))
        owners = {self._owner(name) for name in self._recording.gradients} - set(calls)
        return [*calls, *sorted(owners), LOSS]

    def backward_order(self) -> list[str]:
        """Return the places that the backward pass of a micro-batch reaches, in order: calls, and tensors inside calls.
        Modules that return no gradient, such as embeddings, come last.
        """
        places = dict.fromkeys(map(in_any_micro_batch, self._recording.returned))
        return [*places, *(call for call in reversed(self.names()) if call not in places)]

    def parameters_of(self, call: str) -> list[str]:
        """Return the names of the parameters that belong to a call."""
        return [name for name in self._recording.gradients if self._owner(name) == call]

    def _owner(self, parameter: str) -> str:
        """Return the module that holds a parameter. If this module is not called and its parent returns several
        tensors, return the parent instead.
        """
        holder = parameter.rpartition(".")[0]
        user, outputs = holder.rpartition(".")[0], self._recording.outputs
        is_called = holder in outputs or f"{holder}[0]" in outputs
        return user if f"{user}[0]" in outputs and not is_called else holder or self._recording.root


def _by_call(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of recorded tensors by call."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(call_of(name), []).append(name)
    return groups
