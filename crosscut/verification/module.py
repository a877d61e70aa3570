"""Proof that your own model, built from the layers of `crosscut.parallel`, computes the same on several ranks as on one
rank.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from crosscut.config import ConfigError
from crosscut.parallel import ParallelMesh, clip_gradients_, global_gradient_norm, make_reducer
from crosscut.parallel.collectives import all_reduce
from crosscut.verification.proof import Claim, prove
from crosscut.verification.report import LayoutReport


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
    claim = Claim(make_step=lambda on: _OwnStep(build(on), loss, on), layout=str(mesh.layout), model=name)
    return prove(claim, mesh)


class _OwnStep:
    """One AdamW step on a given loss, with clipping."""

    averages: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, ParallelMesh], Tensor], mesh: ParallelMesh) -> None:
        self.model, self.loss, self.mesh = model, loss, mesh
        self.parameters = list(model.parameters())
        if not self.parameters:
            raise ConfigError("A model to verify must have parameters, but this model has none.")
        self.reducer = make_reducer(model, mesh)

    def accumulate(self) -> Tensor:
        self.model.zero_grad()
        self.reducer.arm()
        loss = self.loss(self.model, self.mesh)
        loss.backward()
        self.reducer.finish()
        return loss.detach()

    def update(self, loss: Tensor) -> tuple[float, float]:
        norm = global_gradient_norm(self.parameters, self.mesh.owners).item()
        clip_gradients_(self.parameters, norm, CLIP_NORM)
        size = sum(parameter.numel() for parameter in self.parameters) ** 0.5
        torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, eps=CLIP_NORM / size).step()
        return all_reduce(loss, self.mesh.tokens).item(), norm


CLIP_NORM = 1e-3
"""Gradient norm that the verified step clips to. The norm is so small that every gradient is clipped, so that a bug in
clipping shows.
"""
LEARNING_RATE = 1.0
"""Learning rate of the verified step. The rate is so large that the update is as large as the parameters and is not
lost in their rounding. AdamW's epsilon is set to the size of a typical clipped gradient, because the usual epsilon
would turn the rounding of a gradient near zero into a whole update.
"""
