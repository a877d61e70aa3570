"""The host's work for one layer of a tensor rank: parameters read through plain leaves, and as distributed tensors.

    python benchmarks/gpu/host.py [--ranks 8] [--turns 60] [--eager]

A rank of eight of a large model waits for its host if the host takes longer for a layer than the GPU. This command
needs no GPU: on a CPU, with a width that leaves almost no arithmetic, the processor time of a layer is the host's work.
The other ranks are pretended, so messages take no time. Models of 2 and of 10 layers run forward and backward in
alternating turns, and the difference of their times is that of 8 layers. The first quarter of the sorted times counts,
since other programs only add to them.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line
from benchmarks.machine import print_machine
from benchmarks.turns import alternate
from crosscut.config import load_run
from crosscut.parallel import make_mesh
from crosscut.parallel.pretended import pretended_ranks
from crosscut.parallel.state import leaves
from crosscut.training.precision import resolve_on
from crosscut.training.step import Trainer

DEPTHS = (2, 10)
WIDTH, LENGTH = 128, 16


class Passes(NamedTuple):
    """Seconds of processor time of a forward and of a backward pass."""

    forward: float
    backward: float


def _none_of(parameter: DTensor) -> None:
    """Make no leaves."""


@contextmanager
def without_leaves() -> Iterator[None]:
    """Context in which no parameter gets leaves, so that the passes handle distributed tensors."""
    plain = leaves.leaves_of
    leaves.leaves_of = _none_of
    try:
        yield
    finally:
        leaves.leaves_of = plain


def prepare(num_layers: int, ranks: int, *, compiled: bool) -> Callable[[], Passes]:
    """Make the layers of a model, and return a function that times their passes once."""
    sizes = {"num_layers": num_layers, "hidden_size": WIDTH, "num_heads": 8, "vocab_size": 1024}
    batch = {"batch_size": 1, "micro_batch_size": 1, "sequence_length": LENGTH, "steps": 10}
    how = {"precision": "bfloat16", "compile": "on" if compiled else "off"}
    table = {
        "model": {**sizes, "max_sequence_length": LENGTH, "dropout": 0.0},
        "training": {**batch, **how},
        "optimizer": {"warmup_steps": 1},
        "layout": {"tensor": ranks},
    }
    run, device = load_run(table, ()), torch.device("cpu")
    blocks = Trainer(resolve_on(run, device), make_mesh(run.layout, device)).model.blocks
    parameters, given = list(blocks.parameters()), torch.randn(1, LENGTH, WIDTH, dtype=torch.bfloat16)

    def once() -> Passes:
        x = given.clone().requires_grad_()
        start = time.process_time()
        for block in blocks:
            x, _ = block(x)
        middle = time.process_time()
        x.backward(given)
        end = time.process_time()
        for parameter in parameters:
            parameter.grad = None
        return Passes(middle - start, end - middle)

    return once


def measure(ranks: int, turns: int, *, compiled: bool) -> dict[str, Passes]:
    """Measure the seconds per layer of both ways of reading parameters."""
    torch.set_num_threads(1)
    contenders: dict[str, Callable[[], Passes]] = {}
    with pretended_ranks(ranks, 0):
        for depth in DEPTHS:
            once = prepare(depth, ranks, compiled=compiled)
            contenders[f"leaves {depth}"] = once
            contenders[f"distributed {depth}"] = _distributed(prepare(depth, ranks, compiled=compiled))
        for once in contenders.values():
            for _ in range(3):
                once()
        times = alternate(contenders, turns)
    return {name: _per_layer(*(times[f"{name} {depth}"] for depth in DEPTHS)) for name in ("leaves", "distributed")}


def _per_layer(shallow: list[Passes], deep: list[Passes]) -> Passes:
    low = ([sorted(each)[len(some) // 4] for each in zip(*some, strict=True)] for some in (shallow, deep))
    return Passes(*((b - a) / (DEPTHS[1] - DEPTHS[0]) for a, b in zip(*low, strict=True)))


def _distributed(once: Callable[[], Passes]) -> Callable[[], Passes]:
    def run() -> Passes:
        with without_leaves():
            return once()

    return run


def main() -> None:
    """Measure both ways and print microseconds per layer and their ratio."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="tensor ranks of the layout")
    parser.add_argument("--turns", type=int, default=60, help="passes of each model")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    options = parser.parse_args()
    print_machine("torch")
    found = measure(options.ranks, options.turns, compiled=not options.eager)
    rows = [["", "forward, us", "backward, us"]]
    rows += [[name, f"{passes.forward * 1e6:.0f}", f"{passes.backward * 1e6:.0f}"] for name, passes in found.items()]
    ratios = [ours / theirs for ours, theirs in zip(found["leaves"], found["distributed"], strict=True)]
    print(aligned([*rows, ["ratio", *(f"{ratio:.2f}" for ratio in ratios)]]))


if __name__ == "__main__":
    main()
