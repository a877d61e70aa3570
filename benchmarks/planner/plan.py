"""Forecast and measured step times of 20 layouts, and the rank of the forecast's first choice.

    python benchmarks/planner/plan.py                        # two ranks of this machine, calibrated first
    python benchmarks/planner/plan.py --gpu here.toml        # calibrated before: crosscut plan --calibrate here.toml

The layouts of two ranks take training steps in turn, so other work on the machine slows all of them alike. The
calibration runs before and cannot see a load that begins later: run this command on an idle machine.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, markdown
from benchmarks.machine import print_machine
from benchmarks.training.ranks import hardware_of, random_batches, seconds_of_step, trainer_of
from crosscut.config import Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.launch import launch, process_group
from crosscut.launch.processes import choose_device
from crosscut.planner.time import step_time

RANKS = 2
MODEL = ModelConfig(num_layers=4, hidden_size=256, num_heads=4, vocab_size=8192, max_sequence_length=256, dropout=0.0)


def layouts(device: str) -> list[RunConfig]:
    """Build the runs: five layouts, each with two micro-batch sizes and two kinds of recomputation.

    Two layouts have two tensor ranks, without and with sequence parallelism. Three have two data ranks, unsharded and
    sharded.
    """
    cut = [Layout(tensor=RANKS), Layout(tensor=RANKS, sequence_parallel=True)]
    copied = [Layout(data=RANKS), Layout(data=RANKS, sharding="zero2"), Layout(data=RANKS, sharding="zero3")]
    precision = "bfloat16" if device == "cuda" else "float32"
    training = TrainingConfig(batch_size=8, sequence_length=256, precision=precision, device=device)
    return [
        RunConfig(model=MODEL, layout=layout, training=replace(training, micro_batch_size=micro, recompute=recompute))
        for layout, micro, recompute in product([*cut, *copied], (4, 2), ("none", "full"))
    ]


def measure(runs: Sequence[RunConfig], rounds: int) -> list[list[float]]:
    """Time every round of every run on this rank."""
    device = choose_device(runs[0].training.device)
    with process_group(device):
        trainers = [trainer_of(run, device) for run in runs]
        seconds: list[list[float]] = [[] for _ in runs]
        for round_number in range(rounds + 1):  # the first is warm-up
            for index, trainer in enumerate(trainers):
                batches = random_batches(runs[index], seed=round_number, device=device)
                taken = seconds_of_step(trainer, round_number, batches, device)
                if round_number:
                    seconds[index].append(taken)
        return seconds


def report(runs: Sequence[RunConfig], measured: Sequence[float], forecast: Sequence[float]) -> None:
    rows = []
    for run, seen, told in sorted(zip(runs, measured, forecast, strict=True), key=lambda row: row[2]):
        figures = (f"{told:.3f}", f"{seen:.3f}", f"{told / seen - 1:+.0%}")
        rows.append([run.layout, run.micro_batch_size, run.training.recompute, *figures])
    head = ("layout", "micro-batch", "recompute", "forecast s", "measured s", "error")
    print(f"\n{markdown(head, rows)}")
    errors = [abs(told / seen - 1) for seen, told in zip(measured, forecast, strict=True)]
    first = measured[forecast.index(min(forecast))]
    print(f"\nMedian error {median(errors):.0%}, largest {max(errors):.0%}.")
    print(f"The first choice of the forecast is {first / min(measured) - 1:.0%} slower than the fastest layout.")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--gpu", help="device file of this machine; by default the machine is calibrated first")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each layout that are counted")
    options = parser.parse_args()
    hardware = hardware_of(options.gpu)
    print_machine("torch", device="" if hardware.device == "cpu" else hardware.name)
    runs = layouts(hardware.device)
    seconds = launch(measure, (runs, options.rounds), num_ranks=RANKS)
    report(runs, [median(taken) for taken in seconds], [step_time(run, hardware).total for run in runs])


if __name__ == "__main__":
    main()
