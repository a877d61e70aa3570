"""Check that no layout, sharding or recomputation changes the losses of a training run.

    python benchmarks/training/parity.py          # 60 combinations, 50 steps each, float32; then lower precisions
    python benchmarks/training/parity.py --steps 5 --tensor 1 2

The plain run is one rank in float32 without sharding and recomputation. Every combination of these settings is compared
with it:

| tensor | sequence parallel | data | sharding | recompute |
|---|---|---|---|---|
| 1, 2, 4 | no, yes | 1, 2 | none, ZeRO-2, ZeRO-3 | none, full, selective |

The ranks of a layout start once and run all of its combinations. Dropout is off, because each layout draws its own
random numbers. The table shows the largest difference between the losses of the same step. The exit status is 1 if a
float32 run differs by more than 1e-5, or a run in a lower precision by more than its own limit.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line, progress_bar, write_figures
from benchmarks.machine import print_machine
from benchmarks.training.ranks import trainer_of
from crosscut.config import RunConfig, load_run
from crosscut.launch import launch, process_group
from crosscut.model import Batch

LIMIT = 1e-5
LOWER_LIMITS = {"bfloat16": 2e-3, "float16": 2e-4}
"""Largest allowed difference from the loss in float32, in nats: four times the difference in `benchmarks/README.md`."""
LOWER_LAYOUTS: tuple[tuple[str, ...], ...] = (
    (),
    ("layout.tensor=2", "layout.sequence_parallel=true"),
    ("layout.data=2", "layout.sharding=zero3"),
)
RECOMPUTATIONS = ("none", "full", "selective")
SHARDINGS = ("none", "zero2", "zero3")


def combinations(tensor_sizes: list[int]) -> Iterator[tuple[str, ...]]:
    """Yield the overrides of every combination. Sequence parallelism needs tensor ranks, sharding needs data ranks."""
    for tensor, split, data in product(tensor_sizes, ("false", "true"), (1, 2)):
        if split == "true" and tensor == 1:
            continue
        for sharding, recompute in product(SHARDINGS if data > 1 else SHARDINGS[:1], RECOMPUTATIONS):
            layout = (f"layout.tensor={tensor}", f"layout.sequence_parallel={split}", f"layout.data={data}")
            yield (*layout, f"layout.sharding={sharding}", f"training.recompute={recompute}")


def make_run(overrides: tuple[str, ...], steps: int) -> RunConfig:
    """Build a run of two layers that learns within these steps, with micro-batches of two sequences."""
    table: dict[str, Any] = {
        "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 300, "dropout": 0.0},
        "training": {"steps": steps, "batch_size": 8, "sequence_length": 32, "device": "cpu", "micro_batch_size": 2},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": min(5, steps - 1)},
    }
    return load_run(table, overrides)


def batch_of(run: RunConfig, step: int, data_rank: int) -> list[Batch]:
    """Build the micro-batches of a data rank. All layouts get the same sequences, which follow a pattern."""
    generator = torch.Generator().manual_seed(step)
    size = (run.training.batch_size, run.training.sequence_length + 1)
    tokens = torch.randint(0, run.model.vocab_size, size, generator=generator)
    tokens[:, 1::2] = (7 * tokens[:, :-1:2] + 3) % run.model.vocab_size
    mine = tokens.chunk(run.layout.data)[data_rank]
    return [Batch.from_ids(part) for part in mine.split(run.micro_batch_size)]


def losses_of(runs: list[RunConfig]) -> list[list[float]]:
    """Train each run and return the losses of its steps on the first rank. All runs have the same number of ranks."""
    device = torch.device("cpu")
    torch.set_num_threads(1)  # threads would only wait for each other in so small a model
    told = []
    with process_group(device):
        for run in runs:
            trainer, steps = trainer_of(run), range(run.training.steps)
            data_rank = trainer.mesh.data.rank
            told.append([float(trainer.step(step, batch_of(run, step, data_rank)).loss) for step in steps])
    return told


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Return the largest difference between two losses of the same step. It is infinite if a loss is not finite."""
    differences = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    return max(difference if math.isfinite(difference) else math.inf for difference in differences)


def measure(options: argparse.Namespace) -> tuple[list[float], list[dict[str, Any]]]:
    """Measure the losses of the plain run, and the overrides, limit and largest difference of each combination."""
    chosen = [(overrides, LIMIT) for overrides in combinations(options.tensor)]
    for precision, limit in LOWER_LIMITS.items():
        chosen += [((*layout, f"training.precision={precision}"), limit) for layout in LOWER_LAYOUTS]
    made = [(make_run(overrides, options.steps), overrides, limit) for overrides, limit in chosen]
    made.sort(key=lambda row: row[0].layout.world_size)
    (plain,) = launch(losses_of, ([make_run((), options.steps)],), num_ranks=1)
    rows = []
    with progress_bar() as progress:
        task = progress.add_task("parity", total=len(made), told="")
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
    """Print the largest differences, one line for each layout and precision."""
    print(f"Loss {plain[0]:.3f} to {plain[-1]:.3f} in {len(plain)} steps of the plain run")
    keys: dict[tuple[str, str, float], list[float]] = {}
    for row in rows:
        precision = next((o.partition("=")[2] for o in row["run"] if o.startswith("training.precision")), "float32")
        keys.setdefault((row["layout"], precision, row["limit"]), []).append(row["difference"])
    table: list[tuple[object, ...]] = [("layout", "precision", "runs", "largest difference", "limit")]
    for (layout, precision, limit), differences in keys.items():
        table.append((layout, precision, len(differences), f"{max(differences):.2e}", f"{limit:.0e}"))
    print(aligned(table, left=2))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. The exit status is 1 if a run differs by more than its limit."""
    parser = command_line(__doc__, figures="write")
    parser.add_argument("--steps", type=int, default=50, help="training steps of each run")
    parser.add_argument("--tensor", type=int, nargs="+", default=[1, 2, 4], help="tensor sizes to run")
    parser.add_argument("--at-once", type=int, default=12, help="runs that share one start of the ranks")
    options = parser.parse_args(arguments)
    print_machine("torch")
    plain, rows = measure(options)
    show(plain, rows)
    write_figures(options.json, {"plain": plain, "runs": rows})
    differ = [row for row in rows if not row["difference"] <= row["limit"]]
    for row in differ:
        print(f"differs by {row['difference']:.2e}: {' '.join(row['run'])}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
