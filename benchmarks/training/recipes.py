"""Bits per byte that small models reach: the demo, and one model with the paper's recipe and with the modern one.

    python benchmarks/training/recipes.py demo                         # the demo with five seeds
    python benchmarks/training/recipes.py study --figure recipes.png   # both recipes with three seeds each

Every run is a `crosscut train` on the State of the Union addresses that come with Crosscut, and all runs hold out the
same whole documents. The FLOPs are those of the model and, with Muon, of its products, which are counted once and not
on every rank.

The study trains a model of 4 layers of width 128 on one rank. `recipe=small` is the paper's GPT-2 with AdamW and a
cosine. Its learning rate is the best of `RATES` with the first seed. `recipe=modern` is used as it is. Each run has the
number of steps that the given FLOPs allow.

With `--keep FOLDER`, the figures of every finished run stay in the folder. The same command with the same folder takes
them from there, so that a benchmark that was stopped goes on with the run that it was in.
"""

import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line, progress_bar, run_crosscut, subplots, work_folder, write_figures
from benchmarks.machine import describe_machine, print_machine
from crosscut.cli.arguments import DEMO_RUN, run_from
from crosscut.config import Layout, RunConfig
from crosscut.data import prepare
from crosscut.planner.compute import flops_per_step
from crosscut.planner.muon import muon_flops
from crosscut.training.watching.metrics import read_metrics

DEMO = files("crosscut.config") / DEMO_RUN
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
"""Learning rates of which the paper's recipe gets the best."""

SIZES = (
    "model.num_layers=4", "model.hidden_size=128", "model.num_heads=4", "model.max_sequence_length=128",
    "model.dropout=0.0", "training.sequence_length=128", "training.batch_size=8", "training.validation_sequences=256",
    "layout.tensor=1", "output.sample_tokens=0",
)  # fmt: skip
RECIPES = {"paper": ("recipe=small",), "modern": ("recipe=modern",)}
COLORS = {"paper": "#9a6a3a", "modern": "#1f5f99"}


def flops(run: RunConfig) -> int:
    """FLOPs of a step, of all ranks together."""
    return flops_per_step(run) + muon_flops(replace(run, layout=Layout()))


def train(folder: Path, seed: int, settings: Sequence[str], tokens: Path) -> dict[str, Any]:
    """Train one run in a process of its own. Return its summary, its seconds from the command to the exit, its FLOPs,
    and its validations as pairs of step and bits per byte. If the same run has ended in this folder before, return what
    it returned then.
    """
    typed = [*settings, "data.text=[]", f"data.tokens={tokens}", f"training.seed={seed}", f"output.folder={folder}"]
    kept = folder.parent / f"{folder.name}.json"
    if kept.is_file() and (earlier := json.loads(kept.read_text(encoding="utf-8")))["settings"] == typed:
        return earlier["figures"]
    shutil.rmtree(folder, ignore_errors=True)
    begin = time.perf_counter()
    run_crosscut("train", *typed)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    run = run_from((*typed, f"model.vocab_size={summary['vocab_size']}"))
    rows = read_metrics(folder)
    figures = {
        "seed": seed,
        "bits_per_byte": summary["validation_bits_per_byte_after"],
        "perplexity": summary["validation_perplexity_after"],
        "training_seconds": summary["training_seconds"],
        "command_seconds": time.perf_counter() - begin,
        "peak_flops_per_second": summary["peak_flops_per_second"],
        "steps": summary["steps"],
        "flops_per_step": flops(run),
        "model_flops_per_step": flops_per_step(run),
        "validations": [(row["step"], bits) for row in rows if (bits := row.get("validation_bits_per_byte"))],
    }
    kept.write_text(json.dumps({"settings": typed, "figures": figures}), encoding="utf-8")
    return figures


def demo(seeds: int, folder: Path, progress: Progress) -> list[dict[str, Any]]:
    """Train the demo with these many seeds, the demo's own seed first."""
    task, done = progress.add_task("demo", total=seeds, told=""), []
    first = run_from(()).training.seed
    for seed in range(first, first + seeds):
        done.append(train(folder / f"demo-{seed}", seed, (str(DEMO),), folder / "tokens"))
        progress.advance(task)
    return done


def study(tflop: float, seeds: int, points: int, folder: Path, progress: Progress) -> dict[str, list[dict[str, Any]]]:
    """Train both recipes for these FLOPs with these many seeds, and validate each run `points` times. The key "rates"
    has the paper's recipe with the first seed and each learning rate.
    """
    task = progress.add_task("study", total=len(RATES) - 1 + 2 * seeds, told="")

    def runs(name: str, settings: Sequence[str], numbers: Sequence[int]) -> list[dict[str, Any]]:
        one = run_from((*SIZES, *settings, f"data.tokens={folder / 'tokens'}", "model.vocab_size=4096"))
        steps = int(tflop * 1e12 / flops(one))
        validations = f"training.validate_every={max(1, steps // points)}"
        every = (f"training.steps={steps}", validations, f"checkpoint.every={steps}")
        done = []
        for seed in numbers:
            done.append(train(folder / f"{name}-{seed}", seed, (*SIZES, *settings, *every), folder / "tokens"))
            progress.advance(task)
        return done

    papers = {rate: (*RECIPES["paper"], f"optimizer.learning_rate={rate}") for rate in RATES}
    rates = {rate: runs(f"rate-{rate}", settings, [1])[0] for rate, settings in papers.items()}
    best = min(rates, key=lambda rate: rates[rate]["bits_per_byte"])
    return {
        "rates": [{"learning_rate": rate, **one} for rate, one in rates.items()],
        "paper": [{"learning_rate": best, **rates[best]}, *runs("paper", papers[best], range(2, seeds + 1))],
        "modern": runs("modern", RECIPES["modern"], range(1, seeds + 1)),
    }


def table_of(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Build the table of the figures: a row for each group of runs."""
    table = [["run", "steps", "TFLOP", "seconds of training", "seconds of the command", "bits per byte", "spread"]]
    for name, group in runs.items():
        bits = [one["bits_per_byte"] for one in group]
        tflop = f"{group[0]['steps'] * group[0]['flops_per_step'] / 1e12:.2f}"
        keys = ("training_seconds", "command_seconds")
        seconds = (f"{statistics.mean(one[key] for one in group):.0f}" for key in keys)
        figures = (f"{statistics.mean(bits):.3f}", f"{min(bits):.3f} to {max(bits):.3f}")
        table.append([name, f"{group[0]['steps']:,}", tflop, *seconds, *figures])
    return aligned(table)


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw the bits per byte of both recipes over the FLOPs: a line for each seed."""
    figure, axes = subplots(figsize=(8, 4.5))
    for name in ("paper", "modern"):
        for i, one in enumerate(runs[name]):
            points = [(step * one["flops_per_step"] / 1e12, bits) for step, bits in one["validations"]]
            label = f"{name}: {statistics.mean(each['bits_per_byte'] for each in runs[name]):.3f} at the end"
            axes.plot(
                *zip(*points, strict=True), color=COLORS[name], marker="o", markersize=3, linewidth=1.2,
                label=label if i == 0 else None,
            )  # fmt: skip
    axes.set(xlabel="TFLOP", ylabel="bits per byte of documents that were held out")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the command that the user named and print its table."""
    parser = command_line(__doc__, figures="write")
    parser.add_argument("what", choices=("demo", "study"))
    parser.add_argument("--seeds", type=int, help="number of seeds; by default 5 of the demo and 3 of the study")
    parser.add_argument("--tflop", type=float, default=3.0, help="10^12 FLOPs of each run of the study")
    parser.add_argument("--points", type=int, default=8, help="number of validations of each run of the study")
    parser.add_argument("--figure", type=Path, help="PNG file for the study's figure")
    parser.add_argument("--keep", type=Path, help="folder that keeps the figures of finished runs")
    chosen = parser.parse_args()
    print_machine("torch")
    with work_folder(chosen.keep) as folder, progress_bar() as progress:
        demo_run = run_from(())
        prepare(demo_run.data, folder / "tokens", seed=demo_run.training.seed)
        if chosen.what == "demo":
            runs = {"demo": demo(chosen.seeds or 5, folder, progress)}
        else:
            runs = study(chosen.tflop, chosen.seeds or 3, chosen.points, folder, progress)
    named = dict(runs)
    for one in named.pop("rates", ()):
        named[f"paper, learning rate {one['learning_rate']:g}"] = [one]
    print(table_of(named))
    if chosen.figure and chosen.what == "study":
        draw(runs, chosen.figure)
    write_figures(chosen.json, {"machine": describe_machine("torch"), "runs": runs})


if __name__ == "__main__":
    main()
