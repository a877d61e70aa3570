"""The speed and memory of training on one device: tokens/s, utilisation and peak memory of the paper's presets.

    python benchmarks/gpu.py                       # one CUDA device, bfloat16, megatron-355m and megatron-1.2b
    python benchmarks/gpu.py --device cpu --tiny   # seconds on any machine, to see that it runs

Every preset is trained for a few steps by the trainer that `crosscut train` uses, on random tokens with the preset's
vocabulary. Utilisation is the planner's model FLOP/s (no recomputation counted) over two peaks: the dense peak that the
maker states, and the matrix rate measured in this run.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from crosscut.config import RunConfig, load_run
from crosscut.parallel import ParallelMesh, make_mesh, process_group
from crosscut.planner import count_parameters, find_hardware, model_flops_per_token
from crosscut.training.precision import compute_dtype
from crosscut.training.step import Batch, Trainer
from crosscut.training.throughput import measure_matrix_rate, synchronize


def make_run(preset: str, options: argparse.Namespace) -> RunConfig:
    """The run of a preset as the options have it."""
    return load_run(
        {
            "model": {"preset": preset, "dropout": options.dropout},
            "training": {
                "batch_size": options.batch_size,
                "micro_batch_size": options.micro_batch_size,
                "sequence_length": options.sequence_length,
                "precision": options.precision,
            },
        },
        ["model.vocab_size=512"] if options.tiny else [],
    )


def random_batch(run: RunConfig, device: torch.device, seed: int) -> list[Batch]:
    """The micro-batches of a step, of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    size = (run.training.batch_size, run.training.sequence_length + 1)
    tokens = torch.randint(0, run.model.vocab_size, size, generator=generator).to(device)
    parts = tokens.split(run.micro_batch_size)
    return [(part[:, :-1], part[:, 1:]) for part in parts]


def measure(run: RunConfig, mesh: ParallelMesh, *, steps: int, warmup: int) -> dict[str, Any]:
    """Seconds per step and peak memory of a run."""
    device = mesh.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    trainer = Trainer(run, mesh)
    building = time.perf_counter() - start
    seconds = []
    for step in range(warmup + steps):
        batch = random_batch(run, device, step)
        synchronize(device)
        start = time.perf_counter()
        loss = trainer.step(step, batch).loss
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[warmup:])
    tokens = run.training.batch_size * run.training.sequence_length
    return {
        "parameters": count_parameters(run.model),
        "batch_size": run.training.batch_size,
        "micro_batch_size": run.micro_batch_size,
        "sequence_length": run.training.sequence_length,
        "seconds_to_build": building,
        "seconds_per_step": median,
        "tokens_per_second": tokens / median,
        "model_flops_per_second": tokens / median * model_flops_per_token(run.model, run.training.sequence_length),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "last_loss": loss,
    }


def machine(device: torch.device) -> dict[str, str]:
    """What this ran on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "date": datetime.now(tz=UTC).date().isoformat(),
        "device": name,
        "python": platform.python_version(),
        "torch": version("torch"),
        "cuda": torch.version.cuda or "none",
    }


def report(result: dict[str, Any]) -> None:
    """Print the table."""
    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    published = result["published_peak"]
    stated = f"{published / 1e12:,.0f} TFLOP/s stated" if published else "no stated peak known"
    print(f"{result['precision']}: {stated}, {result['measured_peak'] / 1e12:,.2f} TFLOP/s measured\n")
    print(f"{'preset':22}{'params':>9}{'batch':>7}{'s/step':>9}{'tokens/s':>11}{'TFLOP/s':>9}", end="")
    print(f"{'of stated':>11}{'of measured':>13}{'peak GiB':>10}")
    for name, row in result["presets"].items():
        rate = row["model_flops_per_second"]
        of_stated = f"{rate / published:.1%}" if published else "-"
        memory = f"{row['peak_bytes'] / 2**30:,.1f}" if row["peak_bytes"] else "-"
        print(
            f"{name:22}{row['parameters'] / 1e6:>8,.1f}M{row['batch_size']:>7}{row['seconds_per_step']:>9.3f}"
            f"{row['tokens_per_second']:>11,.0f}{rate / 1e12:>9,.2f}{of_stated:>11}"
            f"{rate / result['measured_peak']:>13.1%}{memory:>10}"
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--presets", nargs="+", default=["megatron-355m", "megatron-1.2b"])
    parser.add_argument("--tiny", action="store_true", help="laptop-tiny with a small vocabulary, a few short steps")
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.presets, options.steps, options.warmup = ["laptop-tiny"], 2, 1
        options.batch_size, options.micro_batch_size, options.sequence_length = 4, 2, 32
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("`--device` must be a device that is there, but there is no CUDA device. Try --device cpu --tiny.")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    with process_group(device):
        runs = {preset: make_run(preset, options) for preset in options.presets}
        mesh = make_mesh(next(iter(runs.values())).layout, device)
        hardware = find_hardware(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        result = {
            "machine": machine(device),
            "precision": options.precision,
            "published_peak": hardware.flops.get(options.precision) if hardware else None,
            "measured_peak": measure_matrix_rate(device, compute_dtype(options.precision)),
            "presets": {n: measure(r, mesh, steps=options.steps, warmup=options.warmup) for n, r in runs.items()},
        }
    report(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
