"""Proof that your own model, built from the layers of `crosscut.parallel`, computes the same on several ranks as on one
rank. `foreign` proves models that other code cuts.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor, nn

from crosscut.config import ConfigError
from crosscut.parallel import (
    CollectiveRecorder,
    ParallelMesh,
    Sent,
    clip_gradients_,
    global_gradient_norm,
    make_reducer,
)
from crosscut.parallel.collectives import all_reduce, gather_to_first
from crosscut.verification.proof import Claim, prove
from crosscut.verification.recording import ParameterShard, ShardOf
from crosscut.verification.report import MESSAGES, LayoutReport, ReportCheck
from crosscut.verification.watching import RecordedStep, follows_batches


def verify_module(
    build: Callable[[ParallelMesh], nn.Module],
    loss: Callable[[nn.Module, ParallelMesh], Tensor],
    mesh: ParallelMesh,
    *,
    name: str = "model",
) -> LayoutReport:
    """Compare a training step of your own model on `mesh` with the same step on one rank. Every rank must call this
    function, and every rank gets the report.

    `build(mesh)` makes the model, with weights that depend only on seeds and names (`parallel.normal_`). Set biases to
    values other than zero, because a bug in the use of a zero bias stays invisible. If the mesh shards parameters
    (ZeRO), call `parallel.shard_model` in `build` before you set the weights.

    `loss(model, mesh)` returns this data rank's part of the loss, a scalar. The parts of all data ranks are summed, so
    divide each part by the number of targets on all data ranks.

    The proof watches modules through their forward calls. Dropout is off when numbers are compared (`model.eval()`) and
    on when random draws are compared. `name` is the name of the model in the report. Raises `ConfigError` for a model
    without parameters, and `TrainingError` if the loss or the gradient norm of the step on one rank is not finite.

        report = verify_module(build, loss, make_mesh(Layout(tensor=2), device))
        assert report.same, report.first

    Use float64 parameters to tell bugs from rounding.
    """
    claim = Claim(
        make_step=lambda on: _own_step(build(on), loss, on),
        extra_checks=tell_messages,
        layout=str(mesh.layout),
        model=name,
    )
    return prove(claim, mesh)


def _own_step(model: nn.Module, loss: Callable[[nn.Module, ParallelMesh], Tensor], mesh: ParallelMesh) -> "ModuleStep":
    """Return the step of a model from Crosscut's layers, with Crosscut's reduction of gradients, norm and clipping."""
    require_parameters(model)
    reducer, parameters = make_reducer(model, mesh), list(model.parameters())
    number = sum(parameter.numel() for parameter in parameters)

    def passes() -> Tensor:
        reducer.arm()
        found = loss(model, mesh)
        found.backward()
        reducer.finish()
        return found.detach()

    def finish() -> float:
        norm = global_gradient_norm(parameters, mesh.owners).item()
        clip_gradients_(parameters, norm, CLIP_NORM)
        adamw_step(model, number)
        return norm

    return ModuleStep(model, mesh, passes=passes, finish=finish)


@dataclass
class ModuleStep:
    """Training step of a module: the two passes of one batch, clipping, and an optimizer's step."""

    model: nn.Module
    mesh: ParallelMesh
    _: KW_ONLY
    passes: Callable[[], Tensor]
    """Runs the forward pass, the backward pass and the reduction of gradients. Returns this data rank's part of the
    loss.
    """
    finish: Callable[[], float]
    """Clips the gradients and runs the optimizer's step. Returns the gradient norm before clipping."""
    shard_of: ShardOf = ParameterShard.of
    may_fail: bool = False
    averages: Mapping[str, Tensor] = field(default_factory=dict)
    is_copied: bool = False
    sent: Counter[Sent] = field(default_factory=Counter)
    """Messages of the last two passes on this rank."""

    @property
    def statistics(self) -> Mapping[str, Tensor]:
        """Buffers of norms that follow the statistics of batches."""
        norms = [(name, each) for name, each in self.model.named_modules() if follows_batches(each)]
        return {f"{name}.{key}": tensor for name, each in norms for key, tensor in each.named_buffers(recurse=False)}

    def accumulate(self) -> Tensor:
        """Run the two passes, and list their messages. The axes in an attribute `cut_axes` of the model have names."""
        self.model.zero_grad()
        with CollectiveRecorder(self.mesh, grid=getattr(self.model, "cut_axes", ())) as recorder:
            loss = self.passes()
        self.sent = Counter(recorder.sent)
        return loss

    def update(self, loss: Tensor) -> tuple[float, float]:
        """Run `finish`. Returns the loss of all data ranks, and the gradient norm before clipping."""
        norm = self.finish()
        return (loss if self.is_copied else all_reduce(loss, self.mesh.tokens)).item(), norm


def tell_messages(step: RecordedStep, _tolerance: float) -> list[ReportCheck]:
    """Return a check that lists the messages of the forward and the backward pass. Nothing is compared, because nobody
    has planned the messages of such a model. Every rank must call this function. The list is empty on all ranks except
    the first.
    """
    assert isinstance(step, ModuleStep)
    every = gather_to_first(step.sent)
    if every is None:
        return []
    told = list(dict.fromkeys(map(_told, every)))
    return [ReportCheck(MESSAGES, None, True, told[0] if len(told) == 1 else f"of the ranks: {'; '.join(told)}")]


def _told(sent: Counter[Sent]) -> str:
    """Describe messages, grouped by operation and axis."""
    counts: dict[tuple[str, str], list[int]] = {}
    for message, count in sent.items():
        total = counts.setdefault((message.operation, message.axis), [0, 0])
        total[0] += count
        total[1] += count * message.elements
    kinds = [f"{n} x {kind} over {axis} ({size:,} elements)" for (kind, axis), (n, size) in sorted(counts.items())]
    return ", ".join(kinds) or "none"


def require_parameters(model: nn.Module) -> None:
    """Raise `ConfigError` if a model to verify has no parameters."""
    if not any(True for _ in model.parameters()):
        raise ConfigError("A model to verify must have parameters, but this model has none.")


def adamw_step(model: nn.Module, num_parameters: int) -> None:
    """Run the AdamW step of a proof on gradients that were clipped to `CLIP_NORM`. `num_parameters` is the number of
    the uncut model's parameters.
    """
    epsilon = CLIP_NORM / num_parameters**0.5
    torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=epsilon, foreach=False).step()


CLIP_NORM = 1e-3
"""Gradient norm that the verified step clips to. The norm is so small that every gradient is clipped, so that a bug in
clipping shows.
"""
LEARNING_RATE = 1.0
"""Learning rate of the verified step. The rate is so large that the update is as large as the parameters and is not
lost in their rounding. AdamW's epsilon is set to the size of a typical clipped gradient, because the usual epsilon
would turn the rounding of a gradient near zero into a whole update.
"""
