"""Cost of comparing replicas while training: time of a comparison, relative to the steps between two comparisons.

    python benchmarks/recovery/guard.py                                        # model of the demo, two CPU ranks
    python benchmarks/recovery/guard.py --device cuda --preset megatron-355m  # one GPU

On several ranks the whole comparison is timed: hashes, messages and verdict. A single rank has no replica, so only the
hashes are timed. The rest of a comparison takes microseconds. Steps and comparisons alternate in one run, and the
figures are medians.
"""

import argparse
import statistics
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line, write_figures
from benchmarks.machine import describe_machine, print_machine
from benchmarks.recovery.runs import LAYOUTS
from benchmarks.training.ranks import random_batches, rank_of, seconds_of_step
from crosscut.config import RunConfig, load_run
from crosscut.launch import launch
from crosscut.launch.processes import choose_device
from crosscut.parallel.state.agreement import find_drift, hash_of
from crosscut.planner import count_parameters, parameters_per_rank


def make_run(options: argparse.Namespace, layout: tuple[str, ...]) -> RunConfig:
    """Build the run of the demo with its vocabulary, or the run of a preset in bfloat16."""
    overrides = [f"training.device={options.device}", *layout]
    if options.preset:
        overrides += [f"model.preset={options.preset}", "training.precision=bfloat16", "training.sequence_length=1024"]
        table: dict[str, Any] = {"training": {"batch_size": 8}}
        return load_run(table, overrides)
    return load_run(Path(str(files("crosscut.config") / "demo.toml")), ["model.vocab_size=4096", *overrides])


def measure(run: RunConfig, repeats: int) -> dict[str, float]:
    """Measure the median seconds of a step and of a comparison, on the first rank."""
    device = choose_device(run.training.device)
    with rank_of(run, device) as trainer:
        parameters = dict(trainer.model.named_parameters())
        steps, comparisons = [], []
        for number in range(repeats + 2):
            batches = random_batches(run, seed=1000 * number + trainer.mesh.data.rank, device=device)
            steps.append(seconds_of_step(trainer, number, batches, device))
            between = time.perf_counter()
            if run.layout.world_size > 1:
                assert find_drift(parameters, trainer.mesh) is None
            else:
                torch.stack([hash_of(parameter) for parameter in parameters.values()]).tolist()
            comparisons.append(time.perf_counter() - between)
    return {"step": statistics.median(steps[2:]), "comparison": statistics.median(comparisons[2:])}


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__, figures="write")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--preset", help="model preset; by default the model of the demo")
    parser.add_argument("--repeats", type=int, default=20, help="steps and comparisons to time")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("`--device` must be available on this machine, but there is no CUDA device. Try --device cpu.")
    layouts, device = {name: LAYOUTS[name] for name in ("tensor 2", "data 2")}, ""
    if options.device == "cuda":
        layouts, device = {"one rank": ("layout.tensor=1",)}, torch.cuda.get_device_name()
    print_machine("torch", device=device)
    rows = {}
    table: list[list[object]] = [["layout", "parameters", "on a rank", "step ms", "comparison ms", "every", "cost"]]
    for name, layout in layouts.items():
        run = make_run(options, layout)
        row: dict[str, Any] = launch(measure, (run, options.repeats), num_ranks=run.layout.world_size)
        every = run.training.compare_replicas_every
        row |= {"every": every, "cost": row["comparison"] / (every * row["step"])}
        rows[name] = row
        parameters = (count_parameters(run.model), parameters_per_rank(run.model, run.layout))
        times = (f"{1000 * row['step']:.1f}", f"{1000 * row['comparison']:.2f}")
        table.append([name, *(f"{number:,}" for number in parameters), *times, every, f"{row['cost']:.3%}"])
    print(aligned(table))
    write_figures(options.json, {"machine": describe_machine("torch", device=device), "layouts": rows})


if __name__ == "__main__":
    sys.exit(main())
