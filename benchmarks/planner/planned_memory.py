"""Planned and measured peak memory of a rank during a step, for 20 runs on the CPU of this machine.

    python benchmarks/planner/planned_memory.py            # about three minutes on two cores; needs 5 GB
    python benchmarks/planner/planned_memory.py --write    # also write the table into docs/tables/dry-run.md

The planned figure is `crosscut.planner.forecast_memory`. The measured figure is the bytes of all tensors on the first
rank at the peak of the third step of a run (`crosscut.training.watching.memory_account`). Ranks and messages are real.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import ROOT, command_line, markdown
from benchmarks.machine import describe_machine
from benchmarks.training.ranks import CPU, random_batches, trainer_of
from crosscut.config import Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.launch import launch, process_group
from crosscut.planner import count_parameters, forecast_memory
from crosscut.training.optimization.optimizer import MOMENTS
from crosscut.training.precision import resolve_on
from crosscut.training.watching.memory_account import account_of

PAGE = ROOT / "docs" / "tables" / "dry-run.md"
MARKED = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- end -->)", re.DOTALL)


class Shape(NamedTuple):
    """Sizes of a model and of the batch of a data rank."""

    layers: int
    hidden: int
    vocabulary: int
    sequences: int
    length: int


SMALL = Shape(layers=2, hidden=128, vocabulary=4096, sequences=4, length=128)
MIDDLE = Shape(layers=6, hidden=384, vocabulary=8192, sequences=4, length=256)
LARGE = Shape(layers=8, hidden=768, vocabulary=8192, sequences=4, length=256)
LARGEST = Shape(layers=12, hidden=1152, vocabulary=8192, sequences=2, length=256)
LLAMA = {
    "positions": "rotary",
    "norm": "rms",
    "layers": ("attention swiglu",),
    "biases": "none",
    "num_kv_heads": 2,
    "dropout": 0.0,
}
RUNS: tuple[tuple[Shape, dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    (SMALL, {}, {}, {}),
    (SMALL, {}, {}, {"precision": "bfloat16", "recompute": "full"}),
    (MIDDLE, {}, {}, {}),
    (MIDDLE, {"dropout": 0.0}, {}, {}),
    (MIDDLE, {}, {}, {"precision": "bfloat16"}),
    (MIDDLE, {}, {}, {"recompute": "selective"}),
    (MIDDLE, {}, {}, {"recompute": "full"}),
    (MIDDLE, {}, {}, {"micro_batch_size": 1}),
    (MIDDLE, LLAMA, {}, {"recompute": "operators"}),
    (LARGE, {}, {}, {"recompute": "full", "recompute_every": 2}),
    (SMALL, {}, {"tensor": 2}, {}),
    (MIDDLE, {}, {"tensor": 2, "sequence_parallel": True}, {}),
    (MIDDLE, {}, {"data": 2}, {"micro_batch_size": 2}),
    (MIDDLE, {"dropout": 0.0}, {"data": 2, "sharding": "zero3"}, {"precision": "bfloat16"}),
    (LARGE, LLAMA, {"tensor": 2}, {"precision": "bfloat16", "recompute": "operators"}),
    (LARGE, {}, {"data": 2, "sharding": "zero2"}, {"recompute": "full"}),
    (LARGEST, {"dropout": 0.0}, {"tensor": 2, "sequence_parallel": True}, {"recompute": "full"}),
    (MIDDLE, {"num_heads": 8}, {"tensor": 4, "sequence_parallel": True}, {"recompute": "operators"}),
    (MIDDLE, {}, {"tensor": 2, "data": 2}, {"recompute": "full"}),
    (LARGE, {"num_heads": 12}, {"tensor": 2, "data": 2, "sequence_parallel": True, "sharding": "zero3"}, {}),
)


def make_run(shape: Shape, model: dict[str, Any], layout: dict[str, Any], training: dict[str, Any]) -> RunConfig:
    chosen = Layout(**layout)
    sizes = {"num_layers": shape.layers, "hidden_size": shape.hidden, "vocab_size": shape.vocabulary}
    return RunConfig(
        model=ModelConfig(**{**sizes, "num_heads": 6 if shape.hidden % 6 == 0 else 4, **model}),
        layout=chosen,
        training=TrainingConfig(
            sequence_length=shape.length, batch_size=shape.sequences * chosen.data, compile="off", **training
        ),
    )


def measure(runs: list[RunConfig]) -> list[int]:
    """Measure the peak of the third step of each run on the first rank, in bytes."""
    with process_group(CPU):
        return [peak_of(run) for run in runs]


def peak_of(run: RunConfig) -> int:
    trainer, batches = trainer_of(run), random_batches(run)
    for step in range(2):
        trainer.step(step, batches)
    states = trainer.optimizer.state.values()
    named = {"parameters": trainer.parameters, "optimizer": [state[name] for state in states for name in MOMENTS]}
    with account_of(named, CPU) as account:
        trainer.step(2, batches)
    return account.peak()[0]


def table(runs: Sequence[RunConfig], measured: Sequence[int]) -> str:
    """Format the figures of all runs as a markdown table."""
    head = ("parameters", "layout", "options", "planned MiB", "measured MiB", "error", "planned instant of the peak")
    rows, errors = [], []
    for run, found in zip(runs, measured, strict=True):
        forecast = forecast_memory(run, device="cpu")
        errors.append(forecast.total / found - 1)
        sizes = (f"{size / 2**20:,.1f}" for size in (forecast.total, found))
        parameters = f"{count_parameters(run.model) / 1e6:,.1f} M"
        rows.append([parameters, run.layout, options_of(run), *sizes, f"{errors[-1]:+.1%}", forecast.instant])
    distances = [abs(error) for error in errors]
    machine = "{date}, {device}, Python {python}, torch {torch}".format(**describe_machine("torch"))
    summary = f"Median error {median(distances):.1%}, worst {max(distances):.1%}, of {len(runs)} runs. {machine}."
    return f"{markdown(head, rows)}\n\n{summary}\n"


def options_of(run: RunConfig) -> str:
    training = run.training
    found = [resolve_on(run, CPU).precision, run.model.family]
    found += [f"recompute {training.recompute}"] * (training.recompute != "none")
    found += [f"every {training.recompute_every}nd layer"] * (training.recompute_every > 1)
    found += [f"{run.num_micro_batches} micro-batches"] * (run.num_micro_batches > 1)
    found += ["no dropout"] * (run.model.dropout == 0.0)
    return ", ".join(found)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--write", action="store_true", help="also write the table into docs/tables/dry-run.md")
    parser.add_argument(
        "--first", type=int, default=len(RUNS), help="measure only the first N runs, to check that everything works"
    )
    options = parser.parse_args(arguments)
    runs = [make_run(*chosen) for chosen in RUNS[: options.first]]
    measured: dict[int, int] = {}
    for ranks in sorted({run.layout.world_size for run in runs}):
        indices = [i for i, run in enumerate(runs) if run.layout.world_size == ranks]
        found = launch(measure, ([runs[i] for i in indices],), num_ranks=ranks)
        measured.update(zip(indices, found, strict=True))
        print(f"{len(indices)} runs on {ranks} ranks", file=sys.stderr, flush=True)
    text = table(runs, [measured[i] for i in range(len(runs))])
    print(text)
    if options.write:
        PAGE.write_text(MARKED.sub(lambda _: text, PAGE.read_text(encoding="utf-8"), count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
