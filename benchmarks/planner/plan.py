"""Forecast step times beside measured ones, and whether the layout that is forecast to be the fastest is.

    python benchmarks/planner/plan.py                        # two ranks of this machine, calibrated first
    python benchmarks/planner/plan.py --gpu here.toml        # calibrated before: crosscut plan --calibrate here.toml

Every layout of two ranks is trained for some steps in turns with all the others, so that other work on the machine
falls on all alike. The calibration comes before and knows of no load that begins later: on a machine with other work
the errors are those of that work.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.machine import print_machine
from crosscut.calibration import calibrate
from crosscut.config import Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.parallel import launch, make_mesh, process_group
from crosscut.parallel.processes import choose_device, is_first_started
from crosscut.planner.hardware import named_hardware
from crosscut.planner.time import step_time
from crosscut.training.step import Trainer

RANKS = 2
MODEL = ModelConfig(num_layers=4, hidden_size=256, num_heads=4, vocab_size=8192, max_sequence_length=256, dropout=0.0)


def layouts(device: str) -> list[RunConfig]:
    """Two tensor ranks, whole or split; two data ranks, whole or sharded; each with two micro-batches and two
    recomputations.
    """
    cut = [Layout(tensor=RANKS), Layout(tensor=RANKS, sequence_parallel=True)]
    copied = [Layout(data=RANKS), Layout(data=RANKS, sharding="zero2"), Layout(data=RANKS, sharding="zero3")]
    precision = "bfloat16" if device == "cuda" else "float32"
    return [
        RunConfig(
            model=MODEL,
            layout=layout,
            training=TrainingConfig(
                batch_size=8,
                micro_batch_size=micro,
                sequence_length=256,
                precision=precision,
                recompute=recompute,
                device=device,
            ),
        )
        for layout, micro, recompute in product([*cut, *copied], (4, 2), ("none", "full"))
    ]


def measure(runs: Sequence[RunConfig], rounds: int, file: str) -> None:
    """On each rank: the seconds of every round of every run, written by the first."""
    device = choose_device(runs[0].training.device)
    with process_group(device):
        trainers = [Trainer(run, make_mesh(run.layout, device)) for run in runs]
        seconds: list[list[float]] = [[] for _ in runs]
        for round_number in range(rounds + 1):  # the first is warm-up
            for index, trainer in enumerate(trainers):
                taken = one_step(trainer, round_number, device)
                if round_number:
                    seconds[index].append(taken)
        if is_first_started():
            Path(file).write_text(json.dumps(seconds), encoding="utf-8")


def one_step(trainer: Trainer, step: int, device: torch.device) -> float:
    """Seconds of one optimizer step."""
    run = trainer.run
    size = (run.micro_batch_size, run.training.sequence_length + 1)
    tokens = torch.randint(0, run.model.vocab_size, size, generator=torch.Generator().manual_seed(step)).to(device)
    batches = [(tokens[:, :-1], tokens[:, 1:])] * run.num_micro_batches
    synchronize(device)
    start = time.perf_counter()
    trainer.step(step, batches)
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(runs: Sequence[RunConfig], measured: Sequence[float], forecast: Sequence[float]) -> None:
    print("\n| layout | micro-batch | recompute | forecast s | measured s | error |\n|---|---|---|---|---|---|")
    for run, seen, told in sorted(zip(runs, measured, forecast, strict=True), key=lambda row: row[2]):
        what = f"{run.layout} | {run.micro_batch_size} | {run.training.recompute}"
        print(f"| {what} | {told:.3f} | {seen:.3f} | {told / seen - 1:+.0%} |")
    errors = [abs(told / seen - 1) for seen, told in zip(measured, forecast, strict=True)]
    first = measured[forecast.index(min(forecast))]
    print(f"\nMedian error {median(errors):.0%}, largest {max(errors):.0%}.")
    print(
        f"The layout that is forecast to be the fastest takes {first / min(measured) - 1:+.0%} of the fastest's time."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", help="a file of this machine's device; measured first where there is none")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "device.toml"
        if options.gpu is None:
            calibrate(file)
        hardware = named_hardware(options.gpu or str(file))
        print_machine("torch", device="" if hardware.device == "cpu" else hardware.name)
        runs = layouts(hardware.device)
        results = Path(folder) / "seconds.json"
        launch(measure, (runs, options.rounds, str(results)), num_ranks=RANKS)
        seconds: list[list[float]] = json.loads(results.read_text(encoding="utf-8"))
    report(runs, [median(taken) for taken in seconds], [step_time(run, hardware).total for run in runs])


if __name__ == "__main__":
    main()
