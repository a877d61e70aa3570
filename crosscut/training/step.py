"""One optimizer step on one layout: batch, forward, backward, reduce, clip, step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscut.config import ModelConfig, RunConfig
from crosscut.model import GPT, initialize
from crosscut.parallel import (
    IGNORED,
    ParallelMesh,
    RandomStreams,
    clip_gradients_,
    global_gradient_norm,
    make_reducer,
    shard_model,
)
from crosscut.parallel.collectives import all_reduce
from crosscut.training.optimizer import make_optimizer, set_learning_rate
from crosscut.training.precision import compute_dtype, parameter_dtype
from crosscut.training.recomputation import apply_recomputation
from crosscut.training.schedule import learning_rate

Batch = tuple[Tensor, Tensor]
"""Token ids [B, S] and the ids that follow them [B, S]."""


class NonFiniteError(Exception):
    """The loss or the gradient norm of a step is not a finite number; the weights are still those before the step."""


@dataclass(frozen=True)
class StepResult:
    """What a step tells of itself."""

    loss: float
    """Mean cross entropy per target token over the whole batch, in nats."""
    gradient_norm: float
    """Global norm before clipping."""
    learning_rate: float


class Trainer:
    """A model, its optimizer and what a step needs, as one rank holds them."""

    def __init__(self, run: RunConfig, mesh: ParallelMesh) -> None:
        self.run, self.mesh = run, mesh
        self.streams = RandomStreams(mesh, run.training.seed)
        self.model = make_model(run.model, precision=run.training.precision, mesh=mesh, streams=self.streams)
        shard_model(self.model, mesh, units=self.model.blocks, compute_dtype=compute_dtype(run.training.precision))
        initialize(self.model, run.training.seed)
        apply_recomputation(self.model, run)
        self.parameters = list(self.model.parameters())
        self.reducer = make_reducer(self.model, mesh)
        self.optimizer = make_optimizer(self.model, run.optimizer)

    def step(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Do step `step`, counted from 0, on this data rank's micro-batches.

        Raises `NonFiniteError`, on every rank alike and before the weights change, when the loss or the gradient norm
        is not finite.
        """
        result = self.update(step, self.accumulate(step, micro_batches))
        self.optimizer.zero_grad()
        return result

    def update(self, step: int, loss: Tensor) -> StepResult:
        """Clip the summed gradients and change the weights by them. `loss` is reported. Raises as `step`."""
        norm = global_gradient_norm(self.parameters)
        loss_value, norm_value = torch.stack([loss.double(), norm.double()]).tolist()
        if not (abs(loss_value) < torch.inf and norm_value < torch.inf):
            raise NonFiniteError(f"loss {loss_value}, gradient norm {norm_value}")
        clip_gradients_(self.parameters, norm_value, self.run.optimizer.clip_norm)
        rate = learning_rate(step, config=self.run.optimizer, num_steps=self.run.training.steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        return StepResult(loss_value, norm_value, rate)

    def accumulate(self, step: int, micro_batches: Sequence[Batch]) -> Tensor:
        """Forward and backward over the micro-batches: leaves the summed gradients, gives the mean loss of all ranks.

        The mean is over the target tokens of all data ranks, so no split of the batch changes it.
        """
        num_targets = sum((targets != IGNORED).sum() for _, targets in micro_batches)
        scale = 1.0 / max(1, int(all_reduce(torch.as_tensor(num_targets), self.mesh.data)))
        total = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        for index, (tokens, targets) in enumerate(micro_batches):
            self.streams.restart(step=step, micro_batch=index)
            if index == len(micro_batches) - 1:
                self.reducer.arm()
            loss = self.model.loss(tokens, targets, scale=scale)
            loss.backward()
            total = total + loss.detach()
        self.reducer.finish()
        return all_reduce(total, self.mesh.data)


def make_model(config: ModelConfig, *, precision: str, mesh: ParallelMesh, streams: RandomStreams) -> GPT:
    """The model of a config in a run's precision: weights in float32 (or float64), arithmetic in the precision."""
    return GPT(
        config,
        mesh=mesh,
        streams=streams,
        dtype=parameter_dtype(precision),
        compute_dtype=compute_dtype(precision),
    )
