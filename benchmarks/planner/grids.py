"""Activations and messages of ranks that share images: recorded on real ranks, planned, and shared by the ranks.

    python benchmarks/planner/grids.py          # a U-Net and a residual network on seven grids of at most eight ranks
    python benchmarks/planner/grids.py --tiny   # small images on two ranks

A rank should keep at most the activations of one rank, divided by the number of ranks, and the halos that it receives:
`excess` is what it keeps beyond them. The recorded bytes are those of the rank that keeps the most. The planned bytes,
halos and messages are those of `crosscut.rehearsal.rehearse_grid` for this rank.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import TINY_HELP, aligned, command_line
from benchmarks.machine import print_machine
from benchmarks.training.memory import LET_GO
from crosscut.config import Layout
from crosscut.launch import launch, process_group
from crosscut.parallel import CollectiveRecorder, ParallelMesh, Sent, make_mesh
from crosscut.parallel.spatial import (
    CutImage,
    SpatialAdaptiveAvgPool,
    SpatialBatchNorm,
    SpatialConv2d,
    SpatialMaxPool,
    make_grid,
    pointwise,
    scatter_image,
)
from crosscut.rehearsal import GridCost, rehearse_grid
from crosscut.training.watching.storages import LiveStorages
from examples.unet import on_ranks

CPU = torch.device("cpu")
WIDTHS = (16, 16, 32, 64)


class Residual(nn.Module):
    """Residual network as ResNet-18 begins: [B, 3, H, W] to [B, 64, 1, 1]. Ranks share the images."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.stem, self.pool = self._pair(3, WIDTHS[0], 7, 2), SpatialMaxPool(nn.MaxPool2d(3, 2, 1))
        strides = (1, 2, 2)
        widths = list(zip(WIDTHS, WIDTHS[1:], strides, strict=False))
        self.first = nn.ModuleList(self._pair(a, b, 3, stride) for a, b, stride in widths)
        self.second = nn.ModuleList(self._pair(b, b, 3, 1) for _, b, _ in widths)
        self.shortcut = nn.ModuleList(self._pair(a, b, 1, stride) for a, b, stride in widths)
        self.mean = SpatialAdaptiveAvgPool(nn.AdaptiveAvgPool2d(1))

    def _pair(self, before: int, after: int, kernel: int, stride: int) -> nn.Sequential:
        convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
        norm = SpatialBatchNorm(nn.BatchNorm2d(after), mesh=self.mesh)
        return nn.Sequential(SpatialConv2d(convolution, mesh=self.mesh), norm)

    def forward(self, image: CutImage) -> CutImage:
        """Means of the channels."""
        image = self.pool(pointwise(F.relu, self.stem(image)))
        for first, second, shortcut in zip(self.first, self.second, self.shortcut, strict=True):
            y = second(pointwise(F.relu, first(image)))
            image = pointwise(lambda a, b: F.relu(a + b), y, shortcut(image))
        mean: CutImage = self.mean(image)
        return mean


class Case(NamedTuple):
    """A network and its images."""

    build: Callable[[ParallelMesh], nn.Module]
    shape: tuple[int, ...]
    grids: tuple[tuple[int, ...], ...]


def cases(scale: int) -> dict[str, Case]:
    """Return the networks, with images of 32 `scale` positions in each direction."""
    size, volume = 32 * scale, 16 * scale
    return {
        "U-Net": Case(
            partial(on_ranks, dtype=torch.float32),
            (1, 1, volume, volume, volume),
            ((1, 1, 1), (1, 1, 2), (1, 2, 2), (1, 1, 4), (2, 2, 2)),
        ),
        "residual": Case(Residual, (2, 3, size, size), ((1, 1), (1, 2), (2, 2), (4, 1))),
    }


class Recorded(NamedTuple):
    """Bytes that a rank keeps for its backward pass, and its messages."""

    kept: int
    sent: list[Sent]


def record_in_group(name: str, scale: int, sizes: tuple[int, ...]) -> Recorded:
    """Record a training step of a network on this rank of a grid."""
    case = cases(scale)[name]
    mesh = make_mesh(Layout(context=prod(sizes)), CPU)
    grid = make_grid(mesh, *sizes)
    network = case.build(mesh)
    image = scatter_image(torch.randn(case.shape), grid)
    with CollectiveRecorder(mesh, grid=grid.axes) as recorder, LiveStorages() as live:
        y: Tensor = network(image).x
        time.sleep(LET_GO)
        kept = live.nbytes()
        y.sum().backward()
    return Recorded(kept, recorder.sent)


def record(*arguments: Any) -> list[Recorded]:
    """Record a step on a rank that `launch` has started, and return the records of all ranks on the first one."""
    with process_group(CPU):
        own = record_in_group(*arguments)
        records: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(records, own)
        return records


def planned(name: str, scale: int, sizes: tuple[int, ...], rank: int | None = None) -> GridCost:
    """Rehearse the step."""
    case = cases(scale)[name]
    return rehearse_grid(case.build, torch.empty(case.shape, device="meta"), sizes, rank=rank)


def excess(cost: GridCost, whole: GridCost) -> float:
    """Return the share by which a rank keeps more than its part of the bytes of one rank, and its halos."""
    return cost.kept / (whole.kept / prod(cost.sizes) + cost.halos) - 1


def main() -> None:
    """Record and print."""
    options = command_line(__doc__, tiny=TINY_HELP).parse_args()
    scale = 1 if options.tiny else 4
    print_machine("torch")
    rows: list[list[object]] = [["network", "grid", "kept MB", "planned", "halos", "excess", "messages", "planned"]]
    for name, case in cases(scale).items():
        whole = planned(name, scale, case.grids[0])
        for sizes in case.grids[: 2 if options.tiny else None]:
            records = launch(record, (name, scale, sizes), num_ranks=prod(sizes))
            rank = max(range(len(records)), key=lambda r: records[r].kept)
            cost = planned(name, scale, sizes, rank)
            megabytes = [f"{size / 1e6:.2f}" for size in (records[rank].kept, cost.kept, cost.halos)]
            messages = len(records[rank].sent), len(cost.sent)
            rows.append([name, " x ".join(map(str, sizes)), *megabytes, f"{excess(cost, whole):+.1%}", *messages])
    print(aligned(rows, left=2))


if __name__ == "__main__":
    main()
