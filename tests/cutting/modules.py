"""Plain modules that are hard to cut, each for one reason."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER = 8, 16


class Mlp(nn.Module):
    """Two layers with something between."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.between(self.up(x)))
        return y


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x), inplace=True)
        return x


class Skips(Mlp):
    """Calls a layer only for some values."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x))
        for _ in range(int((y > 0).sum())):
            y = self.down(self.up(y))
        return y


class Direct(nn.Module):
    """Uses the weight of its embedding without a call of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp = nn.Embedding(INNER, WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[0]) % INNER
        return F.linear(self.mlp(self.embed(ids) + x), self.embed.weight)


class Temperature(nn.Module):
    """Multiplies by a parameter of its own between two layers, and after them."""

    def __init__(self, *, after: bool) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), Scale()
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.scale(self.up(x)))
        return self.scale(y) if self.after else y


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * self.factor


class Attends(nn.Module):
    """PyTorch's attention, which uses the weights of its layers without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.MultiheadAttention(WIDTH, 2, batch_first=True), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.attention(x[None], x[None], x[None])[0][0])
        return y


class OwnLinear(nn.Linear):
    """Linear layer with a forward of its own, as in Falcon."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Positions(nn.Module):
    """Adds whole positions, with dropout, between layers that are cut. Reads the size of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.measured = nn.Embedding(WIDTH, WIDTH), nn.Embedding(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.up, self.key, self.down = OwnLinear(WIDTH, INNER), nn.Linear(WIDTH, INNER), OwnLinear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(len(x))
        if self.measured.weight.shape[0] < len(x):
            raise ValueError("too many positions")
        table, y = self.positions(ids), self.up(x + self.measured(ids))
        out: Tensor = self.down((y + self.key(self.drop(table))).tanh())
        return out


class Stack(nn.Module):
    """Layers whose sizes stand in a config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.words, config.width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(config.width, config.inner), nn.GELU(), nn.Linear(config.inner, config.width))
            for _ in range(config.depth)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, x.shape[-1:]))
        return x


def large() -> Any:
    """Module of 403 million parameters."""
    config = SimpleNamespace(words=100_000, width=2048, inner=8192, depth=6, end=99_999)
    return Stack(config), {"ids": torch.tensor([[5, 99_999, 7]])}, total


def total(output: Tensor) -> Tensor:
    return output.square().sum()


def inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))}


def with_positions() -> Any:
    return Positions(), inputs(), total
