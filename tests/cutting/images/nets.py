"""A plain convolutional network with a layer of most kinds, its plan, and faults that are planted into its cut."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.cutting import Plan, Rule, Style, cut
from crosscut.cutting.images.part import ImagePart, OnGrid
from crosscut.parallel import ParallelMesh, make_lone_mesh
from crosscut.parallel.collectives import own_rank
from crosscut.parallel.spatial import CutImage, ImageGrid, gather_image, scatter_image

SPATIAL, SPLIT, GATHER = (Rule(style=style) for style in list(Style)[-3:])
WHOLE = Rule(style=Style.REPLICATE)


class Gate(nn.Module):
    """Squeeze and excitation: a factor for each channel, from the mean of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.weigh = nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weigh(self.pool(x)).sigmoid()


class Block(nn.Module):
    """Two branches with a stride, one added to the other in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4)
        self.skip, self.scale = nn.Conv2d(4, 4, 1, stride=2), nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.gelu(self.norm(self.conv(x)))
        y += self.skip(x)
        return y * self.scale


class Net(nn.Module):
    """Images [B, 3, H, W] to scores [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.colour, self.stem, self.norm = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4)
        self.relu, self.pool, self.blocks = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), nn.ModuleList([Block()])
        self.gate, self.act = Gate(), nn.PReLU(4)
        self.up, self.wide = nn.ConvTranspose2d(4, 4, 3, 2, 1), nn.Upsample(scale_factor=2)
        self.mix, self.mean = nn.Conv2d(8, 6, 3, padding=1), nn.AdaptiveAvgPool2d(1)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(6, 5)

    def between(self, x: Tensor) -> Tensor:
        """Faulty networks have other code here."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.norm(self.stem(self.colour(x)))))
        y = self.act(self.gate(self.blocks[0](x)))
        y = torch.cat([self.up(y), self.between(x).chunk(1, 1)[0]], 1)
        x = self.mean(self.mix(self.wide(y)).clamp(min=-2.0))
        scores: Tensor = self.head(self.drop(x.flatten(1)))
        return scores


class Softmax(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Mean(Net):
    def between(self, x: Tensor) -> Tensor:
        return x - x.mean((2, 3), keepdim=True)


class Flat(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.flatten(1).view_as(x)


class Transposed(Net):
    def between(self, x: Tensor) -> Tensor:
        return x.transpose(2, 3).contiguous().view_as(x)


class Interpolated(Net):
    def between(self, x: Tensor) -> Tensor:
        return F.interpolate(F.interpolate(x, scale_factor=2), size=x.shape[2:])


class OfSize(Net):
    def between(self, x: Tensor) -> Tensor:
        return x / x.shape[-1]


class Positions(Net):
    def between(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[-1], dtype=x.dtype)


class Dropped(Net):
    def between(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Numbers(Net):
    def between(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy()) + x


PLAN = Plan(
    grid=(1, 2),
    rules={
        "colour": WHOLE,
        "stem": SPLIT,
        **dict.fromkeys(
            ["norm", "pool", "blocks.*.conv", "blocks.*.norm", "blocks.*.skip", "up", "wide", "mix"], SPATIAL
        ),
        "gate.pool": GATHER,
        "gate.weigh": WHOLE,
        "mean": GATHER,
    },
)

Built = tuple[nn.Module, Mapping[str, Any], Callable[[Any], Tensor]]


def _loss(scores: Tensor) -> Tensor:
    return scores.square().mean() + scores[:, 0].mean()


def build(kind: type[Net] = Net, sizes: tuple[int, int] = (17, 21)) -> Built:
    return kind(), {"x": torch.randn(2, 3, *sizes)}, _loss


# --- planted faults --------------------------------------------------------------------------------------------------


def _on_part(layer: nn.Module) -> None:
    """Let a layer compute on its part alone, as if it had no other ranks."""
    kind: Any = type(layer).__mro__[1]

    def forward(x: ImagePart) -> ImagePart:
        return ImagePart.of(kind.forward(layer, x.plain()), x.spans, x.sharing)

    vars(layer)["forward"] = forward


def _alone(layer: Any) -> None:
    """Let the gradients of a layer's weights be terms."""
    layer.cut_site.axis = layer.cut_site.axis.alone("context")


def _grid_of(net: Any) -> ImageGrid:
    grid: ImageGrid = net.stem.image_layer.grid
    return grid


def _of_ranks(net: Any) -> None:
    """Gather with the gradient that `parallel.spatial` gives a loss of terms."""

    def forward(x: ImagePart) -> Tensor:
        y = net.mean.image_layer.spatial(CutImage(x.plain(), x.spans, _grid_of(net)))
        return gather_image(y)

    vars(net.mean)["forward"] = forward


def _transposed(net: Any) -> None:
    """Let images enter a square grid as if ranks below one another were beside one another."""
    height, width = _grid_of(net).axes
    ranks = ((height, width.rank), (width, height.rank))
    _enter_with(net, ImageGrid(tuple(replace(axis, rank=rank) for axis, rank in ranks), _grid_of(net).ranks))


def _doubled(net: Any) -> None:
    net.norm.momentum = 0.2  # which the cut layer follows


def _local_statistics(net: Any) -> None:
    net.norm.image_layer.spatial.mesh = make_lone_mesh(torch.device("cpu"))


class _NotEntered(OnGrid):
    def entered(self, x: Tensor) -> Tensor:
        return x


def _not_entered(net: Any) -> None:
    def keep(_: nn.Module, __: Any, y: ImagePart) -> None:
        y.sharing = _NotEntered(_grid_of(net))

    net.blocks[0].skip.register_forward_hook(keep)
    net.blocks[0].norm.register_forward_hook(keep)


def _own_input(net: Any) -> None:
    _enter_with(net, _grid_of(net))


def _enter_with(net: Any, grid: ImageGrid) -> None:
    """Let images enter by another grid, and without the sum of their gradient."""
    layer, kind = net.stem.image_layer, type(net.stem)
    layer.style = Style.SPATIAL

    def forward(x: Tensor) -> ImagePart:
        image = scatter_image(x, grid)
        part: ImagePart = kind.forward(net.stem, ImagePart.of(image.x, image.spans, OnGrid(layer.grid)))
        return part

    vars(net.stem)["forward"] = forward


def _draws(_: Any) -> None:
    torch.manual_seed(own_rank())


PLANTS: dict[str, Callable[[Any], None]] = {
    "a norm over its part": lambda net: _on_part(net.norm),
    "a convolution without halos": lambda net: _on_part(net.blocks[0].skip),
    "weights' gradients of a part": lambda net: _alone(net.mix),
    "a whole gradient added by each rank": _of_ranks,
    "a grid transposed": _transposed,
    "running statistics with another momentum": _doubled,
    "statistics of one rank": _local_statistics,
    "a parameter's gradient of a part": _not_entered,
    "the gradient of a part of the input": _own_input,
    "a head that drops other elements": _draws,
}


def cut_wrongly(module: nn.Module, mesh: ParallelMesh, *, fault: str, plan: Plan = PLAN) -> None:
    cut(module, mesh, plan)
    PLANTS[fault](module)
