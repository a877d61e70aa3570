"""Rounding of float16, bfloat16 and float8 in a training step, compared with float32 as `crosscut verify` does.

    python benchmarks/training/rounding.py                        # eleven models, three seeds each
    python benchmarks/training/rounding.py --models 1 --seeds 1

The model runs on one rank. The table shows two largest differences from the same step in float32: of outputs (and the
loss), and of gradients (and their norm). A difference is relative to the largest element of its tensor. The exit status
is 1 if a difference is larger than the proof allows.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line, progress_bar, write_figures
from benchmarks.machine import print_machine
from crosscut.config import load_run
from crosscut.launch import process_group
from crosscut.parallel import make_mesh
from crosscut.verification import LayoutReport, for_verification, verify_on_mesh
from crosscut.verification.report import ROUNDING

PRECISIONS = ("float16", "bfloat16", "float8")

LLAMA = {"positions": "rotary", "norm": "rms", "layers": ("attention swiglu",), "biases": "none"}
QWEN3 = {**LLAMA, "qk_norm": True}


def shape(num_layers: int, hidden_size: int, num_heads: int, **more: Any) -> dict[str, Any]:
    """Build the `model` table of a run."""
    return {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads, "vocab_size": 304, **more}


MODELS = {
    "GPT-2, 2 layers of 16, one head": shape(2, 16, 1),
    "GPT-2, 2 layers of 64": shape(2, 64, 4),
    "Llama, 2 layers of 64": shape(2, 64, 4, **LLAMA),
    "Qwen3, 2 layers of 64": shape(2, 64, 4, **QWEN3),
    "GPT-2, 12 layers of 64": shape(12, 64, 4),
    "Llama, 12 layers of 64": shape(12, 64, 4, **LLAMA),
    "GPT-2, 24 layers of 64": shape(24, 64, 4),
    "Llama, 24 layers of 64": shape(24, 64, 4, **LLAMA),
    "Qwen3, 24 layers of 64": shape(24, 64, 4, **QWEN3),
    "GPT-2, 6 layers of 512": shape(6, 512, 8, vocab_size=4096),
    "Llama, 6 layers of 512": shape(6, 512, 8, vocab_size=4096, **LLAMA),
}


def report_of(model: dict[str, Any], precision: str, seed: int) -> LayoutReport:
    """Verify one rank in this precision against itself in float32, on sequences of 128 tokens."""
    run = load_run({"model": {**model, "dropout": 0.0}, "training": {"seed": seed, "sequence_length": 128}})
    run = for_verification(run, run.layout, precision)
    return verify_on_mesh(run, make_mesh(run.layout, torch.device("cpu")))


def measure(models: list[str], num_seeds: int) -> list[dict[str, Any]]:
    """Measure the largest differences of each model and precision, and collect the checks that fail."""
    rows = []
    with process_group(torch.device("cpu")), progress_bar() as progress:
        task = progress.add_task("rounding", total=len(models) * len(PRECISIONS) * num_seeds, told="")
        for model, precision in product(models, PRECISIONS):
            off: dict[str, list[float]] = {name: [] for name in ROUNDING}
            failed = []
            for seed in range(num_seeds):
                for check in report_of(MODELS[model], precision, seed).checks:
                    if check.name in ROUNDING:
                        assert check.difference is not None
                        off[check.name].append(check.difference)
                        failed += [] if check.same else [f"seed {seed}: {check.name}, {check.told}"]
                progress.advance(task)
            outputs, gradients = (max(off[name]) for name in ROUNDING)
            rows.append({
                "model": model, "precision": precision, "outputs": outputs, "gradients": gradients, "failed": failed
            })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print a line for each model, and a last line with the largest difference of all models."""
    print("Largest relative difference: outputs / gradients")
    table = [["model", *PRECISIONS]]
    for model in [*dict.fromkeys(row["model"] for row in rows), "all models"]:
        mine = [row for row in rows if model in (row["model"], "all models")]
        table.append([model])
        for precision in PRECISIONS:
            of_precision = [row for row in mine if row["precision"] == precision]
            most = (max(row[kind] for row in of_precision) for kind in ("outputs", "gradients"))
            table[-1].append(" / ".join(f"{number:.4f}" for number in most))
    print(aligned(table))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. The exit status is 1 if a difference is larger than the proof allows."""
    parser = command_line(__doc__, figures="write")
    parser.add_argument("--models", type=int, default=len(MODELS), help="measure only the first N models")
    parser.add_argument("--seeds", type=int, default=3, help="random seeds of weights and tokens for each model")
    options = parser.parse_args(arguments)
    print_machine("torch")
    rows = measure(list(MODELS)[: options.models], options.seeds)
    show(rows)
    write_figures(options.json, rows)
    failed = [(row, told) for row in rows for told in row["failed"]]
    for row, told in failed:
        print(f"{row['model']}, {row['precision']}, {told}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
