"""A model of your own from Crosscut's parallel layers: a classifier of points on three spirals.

python examples/own_model.py                       two ranks that share every layer
python examples/own_model.py --tensor 1            one process: the same losses
python examples/own_model.py --tensor 2 --data 2   four ranks, two copies of the model
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import Layout
from crosscut.launch import launch, process_group
from crosscut.parallel import (
    ColumnParallelLinear,
    GradientReducer,
    ParallelMesh,
    RowParallelLinear,
    clip_gradients_,
    global_gradient_norm,
    make_mesh,
    normal_,
)
from crosscut.parallel.collectives import all_reduce

NUM_CLASSES, NUM_POINTS, WIDTH = 3, 600, 256


class Spirals(nn.Module):
    """Two MLPs, each cut by columns and then by rows: [N, 2] to [N, classes], the same on all tensor ranks."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.expand_1 = ColumnParallelLinear(2, WIDTH, mesh=mesh)
        self.contract_1 = RowParallelLinear(WIDTH, WIDTH, mesh=mesh)
        self.expand_2 = ColumnParallelLinear(WIDTH, WIDTH, mesh=mesh)
        self.contract_2 = RowParallelLinear(WIDTH, NUM_CLASSES, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = F.gelu(self.contract_1(F.gelu(self.expand_1(x))))
        y: Tensor = self.contract_2(F.gelu(self.expand_2(x)))
        return y


def points() -> tuple[Tensor, Tensor]:
    """Points on three arms of a spiral [N, 2], and the arm of each [N]."""
    generator = torch.Generator().manual_seed(0)
    arm = torch.arange(NUM_POINTS) % NUM_CLASSES
    radius = torch.rand(NUM_POINTS, generator=generator)
    angle = 4 * radius + 2 * math.pi * arm / NUM_CLASSES + 0.1 * torch.randn(NUM_POINTS, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def train(layout: Layout, num_steps: int) -> None:
    """What every rank runs."""
    device = torch.device("cpu")
    with process_group(device):
        mesh = make_mesh(layout, device)
        model = Spirals(mesh)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:  # biases stay zero
                normal_(parameter, std=parameter.shape[1] ** -0.5, seed=1, name=name)
        parameters = list(model.parameters())
        reducer = GradientReducer(parameters, mesh)
        optimizer = torch.optim.AdamW(parameters, lr=3e-3)
        x, arm = (part.chunk(mesh.data.size)[mesh.data.rank] for part in points())  # this data rank's share
        for step in range(1, num_steps + 1):
            scores = model(x)
            loss = F.cross_entropy(scores, arm, reduction="sum") / NUM_POINTS  # of all ranks, not of this one
            reducer.arm()
            loss.backward()
            reducer.finish()
            clip_gradients_(parameters, global_gradient_norm(parameters), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % (num_steps // 4) == 0:
                right = (scores.argmax(1) == arm).sum() / NUM_POINTS
                told = all_reduce(torch.stack([loss.detach(), right]), mesh.data)
                if mesh.is_first_rank:
                    print(f"{layout}: step {step}, loss {told[0]:.3f}, accuracy {told[1]:.2f}")


def main() -> None:
    """Read the layout and start its ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share every layer")
    parser.add_argument("--data", type=int, default=1, help="copies of the model")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps, at least 4")
    options = parser.parse_args()
    layout = Layout(tensor=options.tensor, data=options.data)
    launch(train, (layout, options.steps), num_ranks=layout.world_size)


if __name__ == "__main__":
    main()
