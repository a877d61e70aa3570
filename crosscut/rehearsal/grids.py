"""Choice of a grid for images that ranks share: a dry run of a network of spatial layers on each grid.

The forward and the backward pass of one rank run on tensors that hold no data, and the other ranks are simulated. The
dry run counts the messages, the products, and the activations that the rank keeps for the backward pass. A cube has the
smallest surface for its volume, so grids of equal sizes send the fewest bytes. But each divided direction adds
messages. The grid with the shortest time is the best one:

    seconds = FLOPs / rate of products + messages x latency + bytes / rate of a link

The time leaves out passes over memory, overlap, and the sum of the gradients of parameters, which are alike for all
grids.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from crosscut.config import ConfigError, Layout, LayoutError
from crosscut.config.system.console import figures_table
from crosscut.config.system.terminal import new_console
from crosscut.parallel import CollectiveRecorder, ParallelMesh, Sent, make_mesh
from crosscut.parallel.pretended import is_exchange, pretended_ranks
from crosscut.parallel.spatial import Span, make_grid, scatter_image
from crosscut.planner.hardware import Hardware
from crosscut.training.watching.storages import LiveStorages, OperatorCall

Build = Callable[[ParallelMesh], nn.Module]
"""Function that makes a network of spatial layers on a mesh. The network takes a `CutImage`."""


@dataclass(frozen=True, kw_only=True)
class GridCost:
    """Cost of one training step on one rank of a grid."""

    sizes: tuple[int, ...]
    """Number of ranks along each direction."""
    rank: int
    precision: str
    """Element type of the images."""
    share: float
    """Share of the positions of an image that the rank holds."""
    sent: tuple[Sent, ...]
    """Messages of the forward and the backward pass, except those with gradients of parameters."""
    sent_bytes: int
    kept: int
    """Bytes of activations that the rank keeps for the backward pass, including halos and the result."""
    halos: int
    """Bytes of positions, and of terms of averages, that the rank receives in the forward pass."""
    flops: int
    """FLOPs of convolutions and other products."""

    def seconds(self, hardware: Hardware) -> float:
        """Return the time of products and messages, without overlap. Raises `ConfigError` if the device does not
        multiply the element type of the images.
        """
        num_ranks = prod(self.sizes)
        sharing = num_ranks if hardware.device == "cpu" else 1
        link = hardware.node if num_ranks <= hardware.ranks_per_node else hardware.network or hardware.node
        products = self.flops * sharing / _rate(hardware, self.precision)
        return products + len(self.sent) * link.latency + self.sent_bytes / link.rate


def _rate(hardware: Hardware, precision: str) -> float:
    """Return the FLOP/s of products of an element type."""
    if precision not in hardware.flops:
        raise ConfigError(
            f"The element type of the images must be one of {', '.join(hardware.flops)} on {hardware.name}, but is "
            f"{precision}. Choose another element type or another device."
        )
    return hardware.flops[precision] * hardware.products_attained


def plan_grids(build: Build, image: Tensor, num_ranks: int, hardware: Hardware) -> list[GridCost]:
    """Rehearse all grids of `num_ranks` ranks in which each rank has a part of the images, and return their costs, the
    shortest time first. Each cost is that of the rank with the largest part; among equal parts, that of a rank with
    most neighbours.

    `build` and `image` are those of `rehearse_grid`. Raises `LayoutError` if the images have too few positions for so
    many ranks, and `ConfigError` if the device does not multiply their element type.
    """
    _rate(hardware, _name(image.dtype))
    sizes = image.shape[2:]
    grids = list(_grids(num_ranks, sizes))
    if not grids:
        raise LayoutError(
            f"The number of ranks must be a product of at most {' x '.join(map(str, sizes))}, the positions of the "
            f"images, but is {num_ranks}. Use fewer ranks or larger images."
        )
    return sorted((rehearse_grid(build, image, grid) for grid in grids), key=lambda cost: cost.seconds(hardware))


def _grids(num_ranks: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield from [()] if num_ranks == 1 else []
        return
    for first in range(1, min(num_ranks, sizes[0]) + 1):
        if num_ranks % first == 0:
            yield from ((first, *rest) for rest in _grids(num_ranks // first, sizes[1:]))


def rehearse_grid(build: Build, image: Tensor, sizes: Sequence[int], *, rank: int | None = None) -> GridCost:
    """Count the cost of a training step on rank `rank` of a grid; by default, on a rank with the largest part.

    `image` [B, C, ...] has the shape and the element type of the images, and may be on the device `meta`. Parts are as
    equal as possible. Must not be called while this process is in a process group. Raises `LayoutError` if the images
    do not have the directions of the grid, or if `rank` is not a rank of the grid.
    """
    spans = [Span.even(size, num) for size, num in zip(image.shape[2:], sizes, strict=False)]
    rank = _fullest(spans) if rank is None else rank
    with pretended_ranks(prod(sizes), rank), torch.random.fork_rng(devices=()):
        mesh = make_mesh(Layout(context=prod(sizes)), torch.device("cpu"))
        grid = make_grid(mesh, *sizes)
        part = scatter_image(image.to("meta"), grid)
        with torch.device("meta"):
            network = build(replace(mesh, device=torch.device("meta")))
        with CollectiveRecorder(mesh, grid=grid.axes) as recorder, _Pass() as counted:
            results = [x for x in tree_leaves(network(part)) if isinstance(x, Tensor) and x.requires_grad]
            kept, halos = counted.nbytes(), counted.received
            torch.autograd.backward(results, [torch.empty_like(x) for x in results])
    return GridCost(
        sizes=tuple(sizes),
        rank=rank,
        precision=_name(image.dtype),
        share=part.x[:1, :1].numel() / prod(part.sizes),
        sent=tuple(recorder.sent),
        sent_bytes=sum(each.elements * size for each, size in zip(recorder.sent, recorder.element_bytes, strict=True)),
        kept=kept,
        halos=halos,
        flops=counted.flops,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fullest(spans: Sequence[Span]) -> int:
    """Return the rank with the most positions and, among several, the one that is nearest to the middle of the grid."""
    rank = 0
    for span in spans:
        last = span.num_ranks - 1
        rank = rank * span.num_ranks + max(range(last + 1), key=lambda r: (span.part(r).size, min(r, last - r), r))
    return rank


class _Pass(LiveStorages):
    """Count of the FLOPs, the live tensors and the received bytes of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.received = 0

    def note(self, call: OperatorCall) -> None:
        """Count an operator."""
        super().note(call)
        if (count := flop_registry.get(getattr(call.operator, "_overloadpacket", None))) is not None:
            self.flops += count(*call.args, **call.kwargs, out_val=call.result)
        if is_exchange(call.operator):
            self.received += call.result.nbytes  # type: ignore[attr-defined]


def print_grids(costs: Sequence[GridCost], hardware: Hardware) -> None:
    """Print the costs of grids per rank and training step, with 1 MB = 10^6 bytes."""
    names = ("share of image", "kept MB", "halos MB", "messages", "sent MB", "GFLOP", "ms")
    table = figures_table(f"grid on {hardware.name}", *names)
    for cost in costs:
        megabytes = [f"{size / 1e6:,.2f}" for size in (cost.kept, cost.halos, cost.sent_bytes)]
        row = f"{cost.share:.1%}", *megabytes[:2], str(len(cost.sent)), megabytes[2], f"{cost.flops / 1e9:,.2f}"
        table.add_row(" x ".join(map(str, cost.sizes)), *row, f"{1e3 * cost.seconds(hardware):,.3f}")
    new_console().print(table)
