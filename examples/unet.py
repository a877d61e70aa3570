"""A 3D U-Net on a volume whose activations exceed the budget of one rank. The ranks of a grid share the volume.

python examples/unet.py                                  1, 2, 4 and 8 ranks: memory, and losses beside plain PyTorch
python examples/unet.py --grids 2x2x2 --budget 64        one grid, and the MiB of activations that a rank may keep
python examples/unet.py --size 32 --precision float64    a small volume, with losses that are equal to 1e-10

The program fails if a loss differs from that of plain PyTorch, or if the activations exceed the budget on every grid.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import Layout
from crosscut.launch import launch, process_group
from crosscut.parallel import GradientReducer, ParallelMesh, make_mesh
from crosscut.parallel.collectives import all_gather_objects, all_reduce
from crosscut.parallel.spatial import (
    SpatialConv3d,
    SpatialConvTranspose3d,
    SpatialGroupNorm,
    SpatialMaxPool,
    make_grid,
    pointwise,
    scatter_image,
)
from crosscut.rehearsal import rehearse_grid
from crosscut.training.watching.storages import LiveStorages

Make = Callable[[nn.Module], nn.Module]
NUM_STEPS, RATE, MIB = 3, 0.1, 2**20
TOLERANCES = {"float32": 1e-4, "float64": 1e-10}


def whole(function: Callable[..., Tensor], *images: Tensor) -> Tensor:
    """Apply a function to whole volumes."""
    return function(*images)


class UNet(nn.Module):
    """U-Net of three levels: [B, 1, D, H, W] to [B, 1, D, H, W]. It knows nothing of ranks: `make` may replace a layer,
    and `each` applies functions of single positions.
    """

    def __init__(self, make: Make = lambda layer: layer, each: Callable[..., Any] = whole) -> None:
        super().__init__()
        self.make, self.each, widths = make, each, (8, 16, 32)
        self.down = nn.ModuleList(self._block(*pair) for pair in pairwise((1, *widths)))
        self.up = nn.ModuleList(self._block(2 * width, width) for width in widths[:-1])
        self.rise = nn.ModuleList(make(nn.ConvTranspose3d(2 * width, width, 2, 2)) for width in widths[:-1])
        self.pool, self.last = make(nn.MaxPool3d(2)), make(nn.Conv3d(widths[0], 1, 1))

    def _block(self, before: int, after: int) -> nn.ModuleList:
        first, second = nn.Conv3d(before, after, 3, padding=1), nn.Conv3d(after, after, 3, padding=1)
        return nn.ModuleList(map(self.make, (first, nn.GroupNorm(4, after), second, nn.GroupNorm(4, after))))

    def _twice(self, block: Any, x: Any) -> Any:
        first, norm, second, last_norm = block
        return self.each(F.relu, last_norm(second(self.each(F.relu, norm(first(x))))))

    def forward(self, x: Any) -> Any:
        """Return a number for each position."""
        skipped = []
        for level, block in enumerate(self.down):
            x = self._twice(block, self.pool(x) if level else x)
            skipped.append(x)
        for block, rise, skip in reversed(list(zip(self.up, self.rise, skipped, strict=False))):
            x = self._twice(block, self.each(lambda a, b: torch.cat((a, b), 1), skip, rise(x)))
        return self.last(x)


def on_ranks(mesh: ParallelMesh, dtype: torch.dtype) -> UNet:
    """Return the network for ranks that share each volume."""
    makers: dict[type[nn.Module], Callable[..., nn.Module]] = {
        nn.Conv3d: partial(SpatialConv3d, mesh=mesh),
        nn.ConvTranspose3d: partial(SpatialConvTranspose3d, mesh=mesh),
        nn.GroupNorm: partial(SpatialGroupNorm, mesh=mesh),
        nn.MaxPool3d: SpatialMaxPool,
    }
    return UNet(lambda layer: makers[type(layer)](layer.to(dtype)), pointwise)


def volumes(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a noisy ball, and the ball: [1, 1, D, H, W]."""
    places = torch.linspace(-1, 1, size)
    ball = (torch.stack(torch.meshgrid(places, places, places, indexing="ij")).norm(dim=0) < 0.6)[None, None]
    noise = torch.randn(ball.shape, generator=torch.Generator().manual_seed(0))
    return (ball + 0.5 * noise).to(dtype), ball.to(dtype)


def train_alone(size: int, dtype: torch.dtype) -> list[float]:
    """Return the loss of each step of plain PyTorch."""
    torch.manual_seed(1)
    network, (x, target), losses = UNet().to(dtype), volumes(size, dtype), []
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    for _ in range(NUM_STEPS):
        loss = F.mse_loss(network(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(sizes: tuple[int, ...], size: int, dtype: torch.dtype) -> tuple[list[float], int]:
    """Train on one rank of a grid. Return the loss of each step, and the most bytes of activations that a rank keeps
    for the backward pass.
    """
    device = torch.device("cpu")
    with process_group(device):
        mesh = make_mesh(Layout(context=prod(sizes)), device)
        grid = make_grid(mesh, *sizes)
        torch.manual_seed(1)  # all ranks begin with the same weights
        network = on_ranks(mesh, dtype)
        x, target = (scatter_image(volume, grid) for volume in volumes(size, dtype))
        optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
        reducer, losses, kept = GradientReducer(network.parameters(), mesh), [], 0
        for _ in range(NUM_STEPS):
            with LiveStorages() as live:
                y = network(x)
                kept = live.nbytes()
            loss = F.mse_loss(y.x, target.x, reduction="sum") / size**3  # this rank's term
            optimizer.zero_grad()
            reducer.arm()
            loss.backward()
            reducer.finish()
            optimizer.step()
            losses.append(all_reduce(loss.detach(), mesh.context).item())
        return losses, max(all_gather_objects(kept, mesh.context))


def told(losses: list[float]) -> str:
    """Return losses as text."""
    return " ".join(f"{loss:.5f}" for loss in losses)


def compare(sizes: tuple[int, ...], size: int, dtype: torch.dtype, expected: list[float]) -> tuple[int, float]:
    """Train on a grid, print a row, and return the bytes that a rank keeps and the largest difference of a loss."""
    losses, kept = launch(train, (sizes, size, dtype), num_ranks=prod(sizes))
    cost = rehearse_grid(lambda mesh: on_ranks(mesh, dtype), torch.empty(1, 1, size, size, size, dtype=dtype), sizes)
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    memory = " ".join(f"{part / MIB:9.1f}" for part in (kept, cost.kept, cost.halos))
    grid = " x ".join(map(str, sizes))
    print(f"{grid:9} {memory} {len(cost.sent):9}  {told(losses)}  {worst:10.0e}", flush=True)
    return kept, worst


def main() -> None:
    """Train on each grid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grids", nargs="+", default=["1x1x1", "1x1x2", "1x2x2", "2x2x2"], help="ranks per direction")
    parser.add_argument("--size", type=int, default=96, help="positions of the volume in each direction")
    parser.add_argument("--precision", choices=TOLERANCES, default="float32")
    parser.add_argument("--budget", type=int, default=256, help="MiB of activations that a rank may keep")
    options = parser.parse_args()
    dtype = getattr(torch, options.precision)
    expected = train_alone(options.size, dtype)
    print(f"{options.precision}, {options.size} positions in each direction; activations of a rank in MiB")
    print(f"{'grid':9} {'kept':>9} {'planned':>9} {'halos':>9} {'messages':>9}  {'losses':23}  difference")
    print(f"{'PyTorch':49}  {told(expected)}")
    grids = [tuple(map(int, text.split("x"))) for text in options.grids]
    found = [compare(sizes, options.size, dtype, expected) for sizes in grids]
    fitting = [grid for grid, (kept, _) in zip(options.grids, found, strict=True) if kept <= options.budget * MIB]
    print(f"Grids within {options.budget} MiB: {', '.join(fitting) or 'none'}")
    if not fitting or not all(worst <= TOLERANCES[options.precision] for _, worst in found):
        sys.exit("A loss differs from PyTorch's, or no grid fits the budget.")


if __name__ == "__main__":
    main()
