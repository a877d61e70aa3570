"""Context ranks: the memory of a rank, and the time of a step.

    python benchmarks/training/context.py planned     # a rank of Llama 3 8B at 32,768 tokens, by dry run
    python benchmarks/training/context.py held        # a small model at 8,192 tokens, measured on 1, 2 and 4 ranks
    python benchmarks/training/context.py times       # steps of the three methods on two ranks, beside one rank

`planned` prints the bytes of a rank at the peak of a step, by part, and how much of 1 / C of the bytes of one rank each
part is: 1.00 for a part that falls as 1 / C, and C for a part that does not fall.

`held` prints the bytes that the forward pass leaves for the backward pass, beside the planner's account.

`times` measures forward and backward passes with one thread per rank, in turns, and prints medians.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, markdown
from benchmarks.machine import print_machine
from benchmarks.training.memory import LET_GO
from benchmarks.training.ranks import random_batches, rank_of
from crosscut.config import RunConfig, load_run
from crosscut.launch import launch
from crosscut.planner.activations import activations_held
from crosscut.rehearsal import rehearse
from crosscut.training.watching.storages import LiveStorages

WAYS = ("gather", "all_to_all", "ring")
SHAPE = {
    "num_layers": 4, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 4, "mlp_size": 704, "vocab_size": 512,
    "dropout": 0.0, "positions": "rotary", "norm": "rms", "layers": ("attention swiglu",), "biases": "none",
}  # fmt: skip
PARTS = {
    "attention": ("blocks.*.attention",),
    "MLP": ("blocks.*.mlp",),
    "norms, residual stream": ("blocks.*", "embedding", "tokens", "final_norm"),
    "mask, rotations": ("",),
}
"""Parts of the activations, by the beginning of the module's name; the first that fits counts."""


def run_of(
    context: int, way: str, length: int, *, shape: dict[str, Any] = SHAPE, precision: str = "float32"
) -> RunConfig:
    """A run of one sequence per step."""
    training = {"batch_size": 1, "sequence_length": length, "precision": precision, "compile": "off"}
    layout = {"context": context, "context_attention": way if context > 1 else "auto"}
    return load_run({"model": {**shape, "max_sequence_length": length}, "layout": layout, "training": training})


def cases(sizes: Sequence[int]) -> Iterator[tuple[str, int]]:
    """One rank, and each way with each other size of the axis."""
    yield "one rank", 1
    yield from ((way, size) for way in WAYS for size in sizes if size > 1)


def planned(length: int, num_layers: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Bytes of the first rank at the peak of a step, by part."""
    rows = []
    for way, context in cases(sizes):
        model = {"preset": "llama3-8b", "num_layers": num_layers}
        run = run_of(context, way, length, shape=model, precision="bfloat16")
        peak = rehearse(run).peak
        rows.append({"way": way, "context": context, **by_part(peak.parts), "all": peak.total})
    return rows


def by_part(parts: dict[tuple[str, str], int]) -> dict[str, int]:
    """Bytes of each of `PARTS`, of the logits, of the results of collectives, and of the state."""
    found = dict.fromkeys((*PARTS, "gathered or exchanged", "loss", "state"), 0)
    for (category, module), size in parts.items():
        part = {"buffers": "gathered or exchanged", "logits": "loss"}.get(category, "state")
        if category == "activations":
            part = next(
                p for p, starts in PARTS.items() if any(s == module or (s and module.startswith(s)) for s in starts)
            )
        found[part] += size
    return found


def held(run: RunConfig) -> int:
    """Bytes that this rank holds between a forward and a backward pass: the largest of all ranks."""
    (batch,) = random_batches(run)
    with rank_of(run) as trainer:
        own = batch.part_of_rank(trainer.mesh.context)
        with LiveStorages() as alive:
            y = trainer.model(own)
            time.sleep(LET_GO)
            size = alive.nbytes()
        y.sum().backward()
        return size


def step_times(run: RunConfig, num_steps: int) -> list[float]:
    """Seconds of each forward and backward pass, after one that is not counted."""
    (whole,) = random_batches(run)
    with rank_of(run, threads=1) as trainer:
        batch = whole.part_of_rank(trainer.mesh.context)
        seconds = []
        for _ in range(num_steps + 1):
            begin = time.perf_counter()
            trainer.accumulate(0, [batch])
            seconds.append(time.perf_counter() - begin)
        return seconds[1:]


def print_planned(arguments: argparse.Namespace) -> None:
    length, num_layers = arguments.length or 32_768, arguments.layers or 32
    rows = planned(length, num_layers, arguments.sizes or (1, 2, 4, 8))
    whole, names = rows[0], [name for name in rows[0] if name not in ("way", "context")]
    print(
        f"Llama 3 8B, {num_layers} layers, one sequence of {length:,} tokens, bfloat16, GiB of a rank (share of 1 / C)"
    )

    def told(row: dict[str, Any], name: str) -> str:
        size = f"{row[name] / 2**30:.2f}"
        return size if row is whole or not whole[name] else f"{size} ({row[name] * row['context'] / whole[name]:.2f})"

    cells = [[row["way"], row["context"], *(told(row, name) for name in names)] for row in rows]
    print(markdown(["way", "C", *names], cells))


def print_held(arguments: argparse.Namespace) -> None:
    length = arguments.length or 8192
    rows, whole = [], 0
    for way, context in cases(arguments.sizes or (1, 2, 4)):
        run = run_of(context, way, length)
        measured = launch(held, (run,), num_ranks=context)
        whole = whole or measured
        account = activations_held(run, device="cpu")
        rows.append(
            [way, context, f"{measured / 2**20:.1f}", f"{account / 2**20:.1f}", f"{measured * context / whole:.2f}"]
        )
    print(f"{SHAPE['num_layers']} layers, hidden {SHAPE['hidden_size']}, one sequence of {length:,} tokens, float32")
    print(markdown(["way", "C", "held, MiB", "planner, MiB", "share of 1 / C"], rows))


def print_times(arguments: argparse.Namespace) -> None:
    length, num_turns = arguments.length or 4096, arguments.steps or 5
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases((1, 2))}
    for _ in range(num_turns):
        for (way, context), found in seconds.items():
            found += launch(step_times, (run_of(context, way, length), 3), num_ranks=context)
    medians = {case: statistics.median(found) for case, found in seconds.items()}
    whole = medians["one rank", 1]
    print(f"One sequence of {length:,} tokens, forward and backward, one thread per rank, {num_turns} turns of 3 steps")
    rows = [[way, size, f"{median:.3f}", f"{whole / median:.2f}"] for (way, size), median in medians.items()]
    print(markdown(["way", "C", "seconds", "times as fast as one rank"], rows))


COMMANDS = {"planned": print_planned, "held": print_held, "times": print_times}


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, help="layers of the model of `planned`")
    parser.add_argument("--sizes", type=int, nargs="+", help="numbers of context ranks of `planned` and `held`")
    parser.add_argument("--steps", type=int, help="turns of `times`")
    given = parser.parse_args(arguments)
    print_machine("torch")
    COMMANDS[given.command](given)


if __name__ == "__main__":
    main()
