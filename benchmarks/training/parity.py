"""Whether what saves memory changes what is learned: losses of a training on every combination, beside the plain run.

    python benchmarks/training/parity.py          # 60 combinations, 50 steps each, float32; then lower precisions
    python benchmarks/training/parity.py --steps 5 --tensor 1 2

The plain run is one rank that keeps everything, in float32. A combination is a layout {tensor 1, 2, 4} x {sequence
parallel or not} x {data 1, 2} x {whole copies, ZeRO-2, ZeRO-3} with a recomputation {none, full, selective}; a layout's
ranks are started once and go through all of its combinations. Dropout is off, since each layout draws its own numbers.
Told is the largest difference of any step's loss from the plain run's; the exit status is 1 where one is above 1e-5.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.machine import print_machine
from crosscut.config import RunConfig, load_run
from crosscut.parallel import launch, make_mesh, process_group
from crosscut.training.step import Batch, Trainer

LIMIT = 1e-5
LOWER_LIMITS = {"bfloat16": 2e-3, "float16": 2e-4}
"""Largest difference of a loss from float32's, in nats: four times what was measured (`benchmarks/README.md`)."""
LOWER_LAYOUTS: tuple[tuple[str, ...], ...] = (
    (),
    ("layout.tensor=2", "layout.sequence_parallel=true"),
    ("layout.data=2", "layout.sharding=zero3"),
)
RECOMPUTATIONS = ("none", "full", "selective")
SHARDINGS = ("none", "zero2", "zero3")


def combinations(tensor_sizes: list[int]) -> Iterator[tuple[str, ...]]:
    """The overrides of every combination; sequence parallelism needs tensor ranks, and sharding data ranks."""
    for tensor, split, data in product(tensor_sizes, ("false", "true"), (1, 2)):
        if split == "true" and tensor == 1:
            continue
        for sharding, recompute in product(SHARDINGS if data > 1 else SHARDINGS[:1], RECOMPUTATIONS):
            yield (
                f"layout.tensor={tensor}",
                f"layout.sequence_parallel={split}",
                f"layout.data={data}",
                f"layout.sharding={sharding}",
                f"training.recompute={recompute}",
            )


def make_run(overrides: tuple[str, ...], steps: int) -> RunConfig:
    """A model of two layers that learns within the steps; two micro-batches a step."""
    table: dict[str, Any] = {
        "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 300, "dropout": 0.0},
        "training": {"steps": steps, "batch_size": 8, "sequence_length": 32, "device": "cpu", "micro_batch_size": 2},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": min(5, steps - 1)},
    }
    return load_run(table, overrides)


def batch_of(run: RunConfig, step: int, data_rank: int) -> list[Batch]:
    """A data rank's micro-batches: the same sequences whatever the layout, with something to learn in them."""
    generator = torch.Generator().manual_seed(step)
    size = (run.training.batch_size, run.training.sequence_length + 1)
    tokens = torch.randint(0, run.model.vocab_size, size, generator=generator)
    tokens[:, 1::2] = (7 * tokens[:, :-1:2] + 3) % run.model.vocab_size
    mine = tokens.chunk(run.layout.data)[data_rank]
    return [(part[:, :-1], part[:, 1:]) for part in mine.split(run.micro_batch_size)]


def losses_of(runs: list[RunConfig]) -> list[list[float]]:
    """Every step's loss of each run, on the first rank. The runs have equally many ranks."""
    device = torch.device("cpu")
    torch.set_num_threads(1)  # the model is so small that threads would wait for each other
    told = []
    with process_group(device):
        for run in runs:
            mesh = make_mesh(run.layout, device)
            trainer = Trainer(run, mesh)
            steps = range(run.training.steps)
            told.append([float(trainer.step(step, batch_of(run, step, mesh.data.rank)).loss) for step in steps])
    return told


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Of two losses of the same step; infinite where one is no number."""
    differences = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)


def measure(options: argparse.Namespace) -> tuple[list[float], list[dict[str, Any]]]:
    """The plain run's losses, and of each combination its overrides, limit and largest difference."""
    chosen = [(overrides, LIMIT) for overrides in combinations(options.tensor)]
    for precision, limit in LOWER_LIMITS.items():
        chosen += [((*layout, f"training.precision={precision}"), limit) for layout in LOWER_LAYOUTS]
    made = [(make_run(overrides, options.steps), overrides, limit) for overrides, limit in chosen]
    made.sort(key=lambda row: row[0].layout.world_size)
    (plain,) = launch(losses_of, ([make_run((), options.steps)],), num_ranks=1)
    rows = []
    columns = (TextColumn("parity"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(made))
        for num_ranks, group in groupby(made, key=lambda row: row[0].layout.world_size):
            alike = list(group)
            for first in range(0, len(alike), options.at_once):
                part = alike[first : first + options.at_once]
                losses = launch(losses_of, ([run for run, _, _ in part],), num_ranks=num_ranks)
                for (run, overrides, limit), mine in zip(part, losses, strict=True):
                    difference = largest_difference(mine, plain)
                    rows.append({"run": overrides, "layout": str(run.layout), "difference": difference, "limit": limit})
                progress.advance(task, len(part))
    return plain, rows


def show(plain: list[float], rows: list[dict[str, Any]]) -> None:
    """The largest differences, one line for each layout and precision."""
    table = Table(title=f"Loss {plain[0]:.3f} to {plain[-1]:.3f} in {len(plain)} steps of the plain run")
    for title in ("layout", "precision", "runs", "largest difference", "limit"):
        table.add_column(title, justify="left" if title in ("layout", "precision") else "right")
    keys: dict[tuple[str, str, float], list[float]] = {}
    for row in rows:
        precision = next((o.partition("=")[2] for o in row["run"] if o.startswith("training.precision")), "float32")
        keys.setdefault((row["layout"], precision, row["limit"]), []).append(row["difference"])
    for (layout, precision, limit), differences in keys.items():
        table.add_row(layout, precision, str(len(differences)), f"{max(differences):.2e}", f"{limit:.0e}")
    Console(width=110).print(table)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 where a run differs by more than its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tensor", type=int, nargs="+", default=[1, 2, 4], help="tensor sizes")
    parser.add_argument("--at-once", type=int, default=12, help="runs for which ranks are started once")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    print_machine("torch")
    plain, rows = measure(options)
    show(plain, rows)
    if options.json:
        options.json.write_text(json.dumps({"plain": plain, "runs": rows}, indent=2) + "\n", encoding="utf-8")
    differ = [row for row in rows if not row["difference"] <= row["limit"]]
    for row in differ:
        print(f"differs by {row['difference']:.2e}: {' '.join(row['run'])}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
