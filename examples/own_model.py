"""A plain model of your own, cut by a plan: a classifier of points on three spirals.

python examples/own_model.py                       two ranks that share every layer
python examples/own_model.py --tensor 1            one process: the same losses
python examples/own_model.py --tensor 2 --data 2   four ranks, of which two share a copy of the model
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from crosscut.config import Layout
from crosscut.cutting import Plan, Rule, Style, cut
from crosscut.launch import launch, process_group
from crosscut.parallel import make_mesh
from crosscut.parallel.collectives import all_reduce

NUM_CLASSES, NUM_POINTS, WIDTH = 3, 600, 256


class Spirals(nn.Module):
    """Two MLPs: [N, 2] to [N, classes]. The class knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.expand_1, self.contract_1 = nn.Linear(2, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand_2, self.contract_2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = F.gelu(self.contract_1(F.gelu(self.expand_1(x))))
        y: Tensor = self.contract_2(F.gelu(self.expand_2(x)))
        return y


PLAN = Plan(
    tensor=(2, 4),
    rules={
        "expand_1": Rule(style=Style.COLWISE),
        "contract_1": Rule(style=Style.ROWWISE, columns=("expand_1",)),
        "expand_2": Rule(style=Style.COLWISE),
        "contract_2": Rule(style=Style.ROWWISE, columns=("expand_2",)),
    },
)
"""Plan of the cut. `plan_cuts` finds such a plan, and `crosscut verify --module --plan` proves it."""


def points() -> tuple[Tensor, Tensor]:
    """Points on three arms of a spiral [N, 2], and the arm of each [N]."""
    generator = torch.Generator().manual_seed(0)
    arm = torch.arange(NUM_POINTS) % NUM_CLASSES
    radius = torch.rand(NUM_POINTS, generator=generator)
    angle = 4 * radius + 2 * math.pi * arm / NUM_CLASSES + 0.1 * torch.randn(NUM_POINTS, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def train(layout: Layout, num_steps: int) -> None:
    """Train on one rank."""
    device = torch.device("cpu")
    with process_group(device):
        mesh = make_mesh(layout, device)
        torch.manual_seed(1)  # all ranks begin with the same weights
        model = cut(Spirals(), mesh, PLAN)
        if mesh.data.size > 1:
            fully_shard(model, mesh=mesh.data.device_mesh)  # averages the gradients of the data ranks
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        x, arm = (part.chunk(mesh.data.size)[mesh.data.rank] for part in points())  # this data rank's share
        for step in range(1, num_steps + 1):
            scores = model(x)
            loss = F.cross_entropy(scores, arm)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % (num_steps // 4) == 0:
                right = (scores.argmax(1) == arm).float().mean()
                told = all_reduce(torch.stack([loss.detach(), right]), mesh.data) / mesh.data.size
                if mesh.is_first_rank:
                    print(f"{layout}: step {step}, loss {told[0]:.3f}, accuracy {told[1]:.2f}")


def main() -> None:
    """Read the layout and start its ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share every layer")
    parser.add_argument("--data", type=int, default=1, help="ranks that see different points")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps, at least 4")
    options = parser.parse_args()
    layout = Layout(tensor=options.tensor, data=options.data)
    launch(train, (layout, options.steps), num_ranks=layout.world_size)


if __name__ == "__main__":
    main()
