"""ResNet of transformers, whose images several ranks share: proven, then trained on made-up images.

python examples/own_images.py --grid 2 2           four ranks, each with a quarter of every image
python examples/own_images.py --grid 1 1           one process: the same losses
python examples/own_images.py --grid 1 2 --full    the published sizes of ResNet-50
"""

import argparse
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from crosscut.config import Layout
from crosscut.cutting import Plan, Rule, Style, costs_of, cut, print_plan
from crosscut.launch import launch, process_group
from crosscut.parallel import make_mesh
from crosscut.verification import prove_module

NUM_CLASSES, NUM_IMAGES = 5, 4
BLOCKS = "resnet.encoder.stages.*.layers.*"
LAYERS = ["convolution", "normalization"]


def plan(*grid: int) -> Plan:
    """Plan with a rule for each layer that mixes positions."""
    inner = ["resnet.embedder.embedder.normalization", "resnet.embedder.pooler"]
    inner += [f"{BLOCKS}.{place}.{layer}" for place in ("layer.*", "shortcut") for layer in LAYERS]
    return Plan(
        grid=grid,
        rules={
            "resnet.embedder.embedder.convolution": Rule(style=Style.SPATIAL_SPLIT_INPUT, reason="images enter"),
            **dict.fromkeys(inner, Rule(style=Style.SPATIAL)),
            "resnet.pooler": Rule(style=Style.SPATIAL_GATHER_OUTPUT, reason="one value for each channel"),
        },
    )


def network(*, is_full: bool) -> nn.Module:
    """Return the network with random weights. Its code knows nothing of ranks."""
    small = {"embedding_size": 8, "hidden_sizes": [16, 24, 32], "depths": [1, 2, 1]}
    return ResNetForImageClassification(ResNetConfig(num_labels=NUM_CLASSES, **({} if is_full else small)))


def images() -> tuple[Tensor, Tensor]:
    """Return images [B, 3, H, W], and the class of each [B]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM_IMAGES, 3, 60, 76, generator=generator), torch.arange(NUM_IMAGES) % NUM_CLASSES


def loss_of(output: Any) -> Tensor:
    """Return the loss of the network's output."""
    return F.cross_entropy(output.logits, images()[1])


def build(*, is_full: bool) -> tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor]]:
    """Return the network, its inputs and its loss, as `prove_module` needs them."""
    return network(is_full=is_full), {"pixel_values": images()[0]}, loss_of


def train(grid: tuple[int, ...], num_steps: int, *, is_full: bool) -> None:
    """Train on one rank."""
    device = torch.device("cpu")
    with process_group(device):
        mesh = make_mesh(Layout(context=prod(grid)), device)
        torch.manual_seed(1)  # all ranks begin with the same weights
        model = cut(network(is_full=is_full), mesh, plan(*grid))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for step in range(1, num_steps + 1):
            loss = loss_of(model(images()[0]))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if mesh.is_first_rank:
                print(f"{' x '.join(map(str, grid))}: step {step}, loss {loss.item():.5f}")


def main() -> None:
    """Forecast the messages, prove the cut, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", type=int, nargs=2, default=[1, 2], help="ranks along height and width")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--full", action="store_true", help="use the published sizes of ResNet-50")
    options = parser.parse_args()
    grid, layout = tuple(options.grid), Layout(context=prod(options.grid))
    made = partial(build, is_full=options.full)
    if layout.context > 1:
        print_plan(plan(*grid), costs_of(*made()[:2], plan(*grid)))
        report = prove_module(made, partial(cut, plan=plan(*grid)), layout)
        print(f"proven: {report.same}" if report.same else f"not proven: {report.first}")
    launch(partial(train, is_full=options.full), (grid, options.steps), num_ranks=layout.world_size)


if __name__ == "__main__":
    main()
