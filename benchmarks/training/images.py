"""Images over a grid of ranks: the speed of a ResNet whose images two ranks share, beside one process with both cores.

    python benchmarks/training/images.py                                # ResNet-50, two images of 224 x 224
    python benchmarks/training/images.py --image 448 --grid 2 1
    python benchmarks/training/images.py --profile                      # also operators of both, by their time

Both are the `ResNetModel` of transformers with random weights, in float32 and in training. A turn is a forward and a
backward pass of both, one after the other; for the ranks, the sum of the gradients over the grid belongs to it. Each
rank has one thread, the process has two. Medians of the turns are printed.

Loss and gradient are those of one more step in float64. In float32, batch norms over two images amplify rounding: both
contenders' gradients of ResNet-50 are 2.5% off those in float64, in different directions.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import TINY_HELP, aligned, command_line, print_figures
from benchmarks.processes import free_port, join_ranks
from benchmarks.turns import CORES, Contender, peak_bytes, take_turns

BATCH, GOAL = 2, 0.95
TINY = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}
NUM_ROWS = 18
"""Operators that the profile of a contender lists."""


class Task(NamedTuple):
    """Network, images, and division of the images."""

    image: int
    """Height and width of an image."""
    grid: tuple[int, int]
    config: dict[str, Any]
    """Options of `ResNetConfig`."""


class Turn(NamedTuple):
    """Figures of one step in one process."""

    seconds: float
    processor_seconds: float
    """Processor time of all threads."""
    reducing_seconds: float
    """Seconds at the end of the step in which a rank waited for the sum of the gradients."""
    loss: float
    gradient: float
    """Sum of the squares of the gradients."""
    peak_bytes: int
    """Peak memory of the process until the end of the step."""


@contextmanager
def take_part(rank: int, port: int, task: Task, num_ranks: int) -> Iterator[Callable[[str], Any]]:
    """One process of a contender. It answers each order, "step", "profile" or "float64", with the figures of a step,
    the profile of one, or the figures of a first step in float64.
    """
    os.environ.update(join_ranks(rank, num_ranks, port))
    import torch

    from crosscut.launch import process_group

    with process_group(torch.device("cpu")):
        torch.set_num_threads(CORES // num_ranks)
        step = make_step(task, num_ranks)
        answers = {
            "step": step,
            "profile": lambda: profiled(step),
            "float64": lambda: make_step(task, num_ranks, torch.float64)(),
        }
        yield lambda order: answers[order]()


def make_step(task: Task, num_ranks: int, dtype: Any = None) -> Callable[[], Turn]:
    """Build the network on this rank, by default in float32. Each call is one step."""
    import torch
    from transformers import ResNetConfig, ResNetModel

    from crosscut.config import Layout
    from crosscut.parallel import GradientReducer, make_mesh

    torch.manual_seed(0)
    model = ResNetModel(ResNetConfig(**task.config)).to(dtype).train()
    x = torch.randn(BATCH, 3, task.image, task.image).to(dtype)
    mesh = make_mesh(Layout(context=num_ranks), torch.device("cpu"))
    forward = model if num_ranks == 1 else cut_network(model, mesh, task.grid)
    parameters = list(model.parameters())
    reducer = GradientReducer(parameters if num_ranks > 1 else [], mesh)

    def step() -> Turn:
        model.zero_grad(set_to_none=True)
        start, used = time.perf_counter(), time.process_time()
        pooled = forward(x)
        pooled = pooled.pooler_output if num_ranks == 1 else pooled
        loss = pooled.square().sum()
        reducer.arm()
        loss.backward()
        passed = time.perf_counter()
        reducer.finish()
        end, used = time.perf_counter(), time.process_time() - used
        grads = [each.grad for each in parameters]
        squares = sum(float(getattr(grad, "_local_tensor", grad).square().sum()) for grad in grads)
        return Turn(end - start, used, end - passed, loss.item(), squares, peak_bytes())

    return step


def cut_network(model: Any, mesh: Any, sizes: tuple[int, int]) -> Callable[[Any], Any]:
    """Replace the layers of a `ResNetModel` that mix positions by spatial layers. Return the forward pass of this
    rank: from whole images to the rank's part of the pooled image.
    """
    from torch import nn
    from torch.nn import functional as F

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

    kinds = {
        nn.Conv2d: lambda layer: SpatialConv2d(layer, mesh=mesh),
        nn.BatchNorm2d: lambda layer: SpatialBatchNorm(layer, mesh=mesh),
        nn.MaxPool2d: SpatialMaxPool,
        nn.AdaptiveAvgPool2d: SpatialAdaptiveAvgPool,
    }
    for name, layer in list(model.named_modules()):
        if type(layer) in kinds:
            model.set_submodule(name, kinds[type(layer)](layer))
    grid = make_grid(mesh, *sizes)

    def convolved(part: Any, image: CutImage) -> CutImage:
        image = part.normalization(part.convolution(image))
        return pointwise(F.relu, image) if isinstance(getattr(part, "activation", None), nn.ReLU) else image

    def block(layer: Any, image: CutImage) -> CutImage:
        y = image
        for part in layer.layer:
            y = convolved(part, y)
        residual = image if isinstance(layer.shortcut, nn.Identity) else convolved(layer.shortcut, image)
        return pointwise(lambda a, b: F.relu(a.add_(b)), y, residual)

    def forward(x: Any) -> Any:
        image = model.embedder.pooler(convolved(model.embedder.embedder, scatter_image(x, grid)))
        for stage in model.encoder.stages:
            for layer in stage.layers:
                image = block(layer, image)
        return model.pooler(image).x

    return forward


def profiled(step: Callable[[], Turn]) -> str:
    """Operators of one step by their own processor time."""
    from torch.profiler import profile

    with profile() as found:
        step()
    table: str = found.key_averages().table(sort_by="self_cpu_time_total", row_limit=NUM_ROWS)
    return table


def run(task: Task, *, rounds: int, warmup: int, with_profile: bool) -> dict[str, Any]:
    """Let both contenders take turns, and return the figures."""
    num_ranks = task.grid[0] * task.grid[1]
    port, other = free_port(), free_port()
    contenders = {
        "ranks": Contender(take_part, *((rank, port, task, num_ranks) for rank in range(num_ranks))),
        "one process": Contender(take_part, (0, other, task, 1)),
    }
    turns = take_turns(contenders, ["step"] * (warmup + rounds))
    exact = take_turns(contenders, ["float64"])
    for name, contender in contenders.items():
        if contender.failure:
            sys.exit(f"{name}: {contender.failure}")
        if with_profile:
            print(f"{name}:\n{contender.ask('profile')[0]}")
        contender.finish()
    figures: dict[str, Any] = {"rounds": rounds}
    for name, found in turns.items():
        counted = found[warmup:]
        figures[name] = {
            "seconds": [max(turn.seconds for turn in step) for step in counted],
            "processor_seconds": median(sum(turn.processor_seconds for turn in step) for step in counted),
            "reducing_seconds": median(max(turn.reducing_seconds for turn in step) for step in counted),
            "loss": sum(turn.loss for turn in exact[name][0]),
            "gradient": exact[name][0][0].gradient,
            "peak_bytes": sum(turn.peak_bytes for turn in counted[-1]) // len(counted[-1]),
        }
    pairs = zip(figures["one process"]["seconds"], figures["ranks"]["seconds"], strict=True)
    return {**figures, "speed": median(whole / cut for whole, cut in pairs)}


def report(figures: dict[str, Any]) -> None:
    """Print the figures of both contenders as a table, and the speed of the ranks."""
    rows: list[list[str]] = [
        ["", "median s", "min s", "max s", "gradients s", "processor s", "peak MiB each", "loss", "squared gradients"]
    ]
    for name in ("ranks", "one process"):
        found = figures[name]
        seconds = found["seconds"]
        times = (median(seconds), min(seconds), max(seconds), found["reducing_seconds"], found["processor_seconds"])
        same = (f"{found[each]:.12g}" for each in ("loss", "gradient"))
        rows.append([name, *(f"{each:.3f}" for each in times), f"{found['peak_bytes'] / 2**20:,.0f}", *same])
    print(aligned(rows))
    print(
        f"speed of the ranks: {figures['speed']:.3f} of the process, median of {figures['rounds']} turns (goal {GOAL})"
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__, tiny=TINY_HELP, figures="print")
    parser.add_argument("--image", type=int, default=224, help="height and width of the images")
    parser.add_argument("--grid", type=int, nargs=2, default=(1, 2), help="ranks along height and width")
    parser.add_argument("--rounds", type=int, default=15, help="turns that are counted")
    parser.add_argument("--warmup", type=int, default=2, help="turns before them")
    parser.add_argument("--profile", action="store_true", help="also print the operators of one step")
    options = parser.parse_args(arguments)
    task = Task(32 if options.tiny else options.image, tuple(options.grid), TINY if options.tiny else {})
    figures = run(task, rounds=options.rounds, warmup=options.warmup, with_profile=options.profile)
    if not print_figures(options, ("torch", "transformers"), {"task": task._asdict(), **figures}):
        report(figures)


if __name__ == "__main__":
    main()
