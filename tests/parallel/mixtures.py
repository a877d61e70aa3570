"""A model whose layers have experts, cut over the ranks of a layout, and the same model on one rank.

Every expert processes every token, weighted by the scores of a router, so the experts' gradients need the tokens of all
ranks. The ranks that share the experts gather each other's tokens, and send back what their own experts made of them.

Shapes: N tokens of a rank, H hidden size, E experts, F width of an expert.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crosscut.checkpoint import Progress, checkpoint_folder, load_checkpoint, save_checkpoint
from crosscut.config import Layout
from crosscut.parallel import (
    ColumnParallelLinear,
    ParallelMesh,
    RowParallelLinear,
    clip_gradients_,
    local,
    make_mesh,
    make_reducer,
    measure_gradients,
    normal_,
    shard_model,
)
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.operators import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from crosscut.parallel.recorder import CollectiveRecorder, Sent
from crosscut.parallel.state.parameters import ParameterMaker, local_inside, whole
from tests.parallel.twins import CPU

H, E, F = 6, 4, 8
TOKENS, MICRO_BATCHES, LAYERS = 8, 2, 2
"""Tokens of a micro-batch on all ranks, micro-batches of a step, and layers of all stages."""


class Mixture(nn.Module):
    """Router and experts: y = sum over e of softmax(x R^T)_e relu(x A_e^T) B_e^T."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh, make = mesh, ParameterMaker(mesh, torch.float64)
        self.router = make.replicated(E, H)
        self.expand, self.contract = make.stacked(E, F, H, dim=1), make.stacked(E, H, F, dim=2)

    def forward(self, x: Tensor) -> Tensor:
        """[1, N, H] to [1, N, H]."""
        expert, dtype = self.mesh.expert, x.dtype
        entered = copy_to_tensor_parallel(x, self.mesh.tensor)
        scores = (entered @ local_inside(self.router, dtype).mT).softmax(-1)
        tokens = gather_from_sequence_parallel(entered, expert)
        scores = gather_from_sequence_parallel(scores, expert).chunk(expert.size, -1)[expert.rank]
        inner = torch.einsum("bnh,efh->benf", tokens, local(self.expand, dtype)).relu()
        results = torch.einsum("benf,ehf,bne->bnh", inner, local(self.contract, dtype), scores)
        return reduce_from_tensor_parallel(reduce_scatter_to_sequence_parallel(results, expert), self.mesh.tensor)


class Layer(nn.Module):
    """Two matrices that the tensor ranks cut, and experts, each with a residual sum."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        place: dict[str, Any] = {"mesh": mesh, "dtype": torch.float64}
        self.first, self.second = ColumnParallelLinear(H, F, **place), RowParallelLinear(F, H, **place)
        self.mixture = Mixture(mesh)

    def forward(self, x: Tensor) -> Tensor:
        """[1, N, H] to [1, N, H]."""
        x = x + self.second(self.first(x).tanh())
        mixed: Tensor = x + self.mixture(x)
        return mixed


class Layers(nn.Module):
    """The layers of one rank of the pipeline. All stages read the same input, so that no stage sends to another."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        each = LAYERS // mesh.pipeline.size
        mine = range(mesh.pipeline.rank * each, (mesh.pipeline.rank + 1) * each)
        self.blocks = nn.ModuleDict({str(layer): Layer(mesh) for layer in mine})

    def forward(self, x: Tensor) -> Tensor:
        """Sum over the layers of their losses, a scalar. `x`: [1, N, H]."""
        losses: list[Tensor] = [block(x).square().sum() for block in self.blocks.values()]
        return torch.stack(losses).sum()


@dataclass
class Outcome:
    """What a rank knows after some steps."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    """Whole parameters of the rank's stages."""
    sent: list[list[Sent]]
    """Messages of each step."""


class Run:
    """Training of the layers on a layout."""

    def __init__(self, layout: Layout) -> None:
        self.mesh = make_mesh(layout, CPU)
        self.model = Layers(self.mesh)
        shard_model(self.model, self.mesh, units=self.model.blocks.values(), always_used=True)
        for name, parameter in self.model.named_parameters():
            normal_(parameter, std=0.5, seed=3, name=name)
        self.reducer = make_reducer(self.model, self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, foreach=False)

    def step(self, step: int) -> tuple[float, float]:
        """Loss and gradient norm of one clipped step."""
        generator = torch.Generator().manual_seed(step)
        batches = torch.randn(MICRO_BATCHES, 1, TOKENS, H, dtype=torch.float64, generator=generator)
        tokens, total = self.mesh.tokens, torch.zeros((), dtype=torch.float64)
        self.reducer.begin()
        for index, batch in enumerate(batches):
            if index == MICRO_BATCHES - 1:
                self.reducer.arm()
            loss = self.model(batch.chunk(tokens.size, 1)[tokens.rank]) / (MICRO_BATCHES * TOKENS)
            loss.backward()
            total += loss.detach()
        self.reducer.finish()
        parameters = list(self.model.parameters())
        norm = measure_gradients(parameters, self.mesh.owners).norm
        clip_gradients_(parameters, norm, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return all_reduce(all_reduce(total, tokens), self.mesh.pipeline).item(), norm.item()

    def steps(self, steps: Iterable[int]) -> Outcome:
        """Take the steps with these numbers."""
        found, sent = [], []
        for step in steps:
            with CollectiveRecorder(self.mesh) as recorder:
                found.append(self.step(step))
            sent.append(list(recorder.sent))
        losses, norms = map(list, zip(*found, strict=True))
        return Outcome(losses, norms, {name: whole(p.detach()) for name, p in self.model.named_parameters()}, sent)


def trained(layout: Layout, steps: int) -> Outcome:
    """Train the layers from their initial weights."""
    return Run(layout).steps(range(steps))


def trained_from(layout: Layout, steps: range, root: Path) -> Outcome:
    """Train the layers from the checkpoint in `root`, if there is one, and write a checkpoint there."""
    run = Run(layout)
    if steps.start:
        load_checkpoint(checkpoint_folder(root, steps.start), model=run.model, optimizer=run.optimizer)
    outcome = run.steps(steps)
    progress = Progress(step=steps.stop, samples=0, layout=str(layout))
    options = {"is_first_rank": run.mesh.is_first_rank, "keep": 9}
    save_checkpoint(root, progress, model=run.model, optimizer=run.optimizer, **options)
    return outcome
