"""Bytes that a layer keeps for its backward pass, measured and by formula.

    python benchmarks/training/memory.py                                # two ranks of this machine's CPU
    python benchmarks/training/memory.py --device cuda                  # one GPU
    python benchmarks/training/memory.py --device cuda --tensor 8       # eight

Two models that differ only in their number of layers go through a forward pass. The difference of the bytes that they
then hold, divided by the difference of the layers, is the memory of one layer:

- On CUDA, bytes are `torch.cuda.memory_allocated`. Two more columns give the peak of forward and backward pass,
  allocated and reserved.
- On the CPU, PyTorch counts no memory. Bytes are the storages that operators made and that are still alive.

The other columns are the planner's account (`crosscut.planner.layer_activations`) and the published formulas
(Korthikanti et al. 2022, Table 2). `docs/sharding.py` measures the bytes of a parameter.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import TINY_HELP, aligned, command_line, write_figures
from benchmarks.machine import describe_machine, print_machine
from benchmarks.training.ranks import random_batches, trainer_of
from crosscut.config import Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.launch import launch, process_group
from crosscut.launch.processes import choose_device
from crosscut.planner import layer_activations, published_layer_activations
from crosscut.training.watching.storages import LiveStorages

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "operators": {"recompute": "operators"},
    "full": {"recompute": "full"},
    "full, offloaded": {"recompute": "full", "offload": ("activations",)},
}
LAYERS = (2, 4)  # offloading always has the inputs of two layers in transit, however many layers there are
NOTES = """
The published formulas assume elements of two bytes, dropout masks of one byte, and attention that keeps its scores.
Therefore:
- Without dropout there are no masks: the factor is 32, not 34 (with tensor parallelism, 8 of 10 in the part that is not
  sharded).
- A fused attention kernel keeps no scores: `none` lacks the term 5 a s / h and equals the published `selective`.
- On the CPU, PyTorch has no fused kernel with dropout and no masks of one byte. With dropout 0.1, `none` and
  `operators` keep the scores three times in float32 (12 a s / h, not 5), queries, keys and values in float32, and masks
  of two bytes (36, not 34). On CUDA they do not.
- `operators` is not published. Its column shows the formula of `none`.
- `full, offloaded`: a GPU keeps only the inputs of the last two layers. The memory of the CPU is the host's memory, so
  offloaded inputs are counted here.
"""

LET_GO = 0.05
"""Seconds to wait after a forward pass for gloo's threads to release the tensors that they have sent."""


def held_after_forward(run: RunConfig, device: torch.device) -> dict[str, int]:
    """Measure the bytes held between forward and backward pass and, on CUDA, the peak of both passes."""
    trainer = trainer_of(run, device)
    (batch,) = random_batches(run, device=device)
    trainer.accumulate(0, [batch])  # creates the tensors that stay, such as gradients
    trainer.streams.restart(step=0)
    if device.type != "cuda":
        with LiveStorages() as alive:
            y = trainer.model(batch)
            time.sleep(LET_GO)
            held = alive.nbytes()
        y.sum().backward()
        return {"held": held}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    y = trainer.model(batch)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    y.sum().backward()
    torch.cuda.synchronize()
    return {
        "held": held,
        "peak": torch.cuda.max_memory_allocated() - before,
        "reserved": torch.cuda.max_memory_reserved() - reserved,  # includes blocks that wait for a stream
    }


def measure_layers(runs: list[RunConfig], device: str) -> list[dict[str, float]]:
    """Measure one layer of each run on the first rank. All runs have the same layout, so ranks start once."""
    own = choose_device(device)
    with process_group(own):
        found = []
        for run in runs:
            few, many = (held_after_forward(replace(run, model=replace(run.model, num_layers=n)), own) for n in LAYERS)
            found.append({name: (many[name] - few[name]) / (LAYERS[1] - LAYERS[0]) for name in few})
        return found


def make_run(shape: Mapping[str, int], layout: Layout, *, dropout: float = 0.0, **training: Any) -> RunConfig:
    """Build a run with the model and the batch of this benchmark."""
    model = ModelConfig(
        num_layers=2, hidden_size=shape["hidden"], num_heads=shape["heads"], vocab_size=512,
        max_sequence_length=shape["sequence"], dropout=dropout,
    )  # fmt: skip
    options = {"sequence_length": shape["sequence"], "compile": "off", "precision": "bfloat16", **training}
    batch = shape["sequences"] * layout.data
    return RunConfig(model=model, layout=layout, training=TrainingConfig(batch_size=batch, **options))


def activations(shape: Mapping[str, int], layouts: Sequence[Layout], device: str) -> list[dict[str, Any]]:
    """Measure all rows of the table."""
    rows = []
    for layout in layouts:
        cases = [(dropout, name) for dropout in (0.0, 0.1) for name in SETTINGS]
        runs = [make_run(shape, layout, dropout=dropout, **SETTINGS[name]) for dropout, name in cases]
        measured = launch(measure_layers, (runs, device), num_ranks=layout.world_size)
        for (dropout, name), run, figures in zip(cases, runs, measured, strict=True):
            on_device = run if device == "cuda" else replace(run, training=replace(run.training, offload=()))
            account = layer_activations(on_device, device=device)  # on a CPU, offloading moves nothing
            rows.append(
                {
                    "layout": str(layout), "dropout": dropout, "recompute": name, **figures,
                    "weights": account.weights, "planned": account.total + account.weights,
                    "published": published_layer_activations(run),
                }
            )  # fmt: skip
    return rows


def kib(size: float) -> str:
    return f"{size / 1024:,.1f}"


def report_activations(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print("\nActivations of a layer, KiB; `rest` excludes the copies of weights in the compute type")
    peaks = [name for name in ("peak", "reserved") if name in rows[0]]
    head = ["layout", "recompute", "dropout", "held", "planned", "ratio", "rest", "published", "ratio", *peaks]
    table: list[list[object]] = [head]
    for row in rows:
        held, planned, published = row["held"], row["planned"], row["published"]
        rest = held - row["weights"]
        kept = (kib(held), kib(planned), f"{held / planned if planned else 1.0:.2f}")
        others = (kib(rest), kib(published), f"{rest / published:.2f}", *(kib(row[name]) for name in peaks))
        table.append([row["layout"], row["recompute"], row["dropout"], *kept, *others])
    print(aligned(table, left=2))
    print(NOTES, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__, tiny=TINY_HELP, figures="write")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--tensor", type=int, help="tensor ranks of the sharded layouts; by default 2 on the CPU and 1 on CUDA"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("`--device` must be available on this machine, but there is no CUDA device. Try --device cpu.")
    tensor = options.tensor or (2 if options.device == "cpu" else 1)
    large = options.device == "cuda"
    shape = {"hidden": 512, "heads": 8, "sequence": 256, "sequences": 4}
    if large:
        shape = {"hidden": 2048, "heads": 16, "sequence": 4096, "sequences": 2}
    if options.tiny:
        shape = {"hidden": 64, "heads": 4, "sequence": 32, "sequences": 2}
    device = torch.cuda.get_device_name() if large else ""
    print_machine("torch", device=device)
    print(", ".join(f"{name} {value}" for name, value in shape.items()))
    cut = [Layout(tensor=tensor), Layout(tensor=tensor, sequence_parallel=True)] if tensor > 1 else []
    rows = activations(shape, [Layout(), *(cut[-1:] if options.tiny else cut)], options.device)
    report_activations(rows)
    machine = describe_machine("torch", device=device)
    write_figures(options.json, {"machine": machine, "shape": shape, "activations": rows})


if __name__ == "__main__":
    sys.exit(main())
