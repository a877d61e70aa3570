"""Bits per byte that small models reach: the demo, two recipes, and a hybrid and mixtures beside a transformer.

    python benchmarks/training/small_models.py demo                          # the demo with five seeds
    python benchmarks/training/small_models.py recipes --figure recipes.png  # the paper's recipe and the modern one
    python benchmarks/training/small_models.py hybrid --text BOOKS.jsonl.zst --figure hybrid.png
    python benchmarks/training/small_models.py mixture --text BOOKS.jsonl.zst --figure mixture.png

Every run is a `crosscut train`. All runs of a command have the same text, in a study by default the State of the Union
addresses that come with Crosscut, and hold out the same whole documents. The FLOPs are those of the model and, with
Muon, of its products, which are counted once and not on every rank.

`recipes` trains a model of 4 layers of width 128 for the same FLOPs: with the paper's recipe (`recipe=small`: GPT-2,
AdamW and a cosine), whose learning rate is the best of `RATES` with the first seed, and with `recipe=modern` as it is.

`hybrid` trains two models of 3 million parameters for the same tokens: three layers with a Mamba-2 mixer before each
layer with attention, as in Qwen3-Next and OLMo Hybrid, and attention alone. The transformer has one layer more and the
same FLOPs per token, or the command ends. Everything else is the same, and both get the best of `RATES` in short runs.

`mixture` trains the same transformer beside two mixtures of experts with as many FLOPs per token: in place of each MLP
they have 8 experts of half its width, of which a token uses 2. A loss balances the experts of the one, and biases those
of the other. With the usual coefficient of 0.01, the largest load of the first layer, whose router sees only the token,
stays at 1.45, so the coefficient is 0.03. The table also has the largest load of an expert over the last tenth of the
steps, as a multiple of the mean load: in the tokens of each step (the mean over these steps), and in all tokens of
these steps together. The figure has the first, as means of 20 steps.

With `--keep FOLDER`, the runs stay in the folder. The same command with the same folder keeps finished runs, and
continues the others from their last checkpoints, as in `crosscut study quality`. `OMP_NUM_THREADS=1` and `--at-once 2`
train two runs at a time, with one thread each.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line, subplots, work_folder, write_figures
from benchmarks.machine import describe_machine, print_machine
from crosscut.cli.arguments import DEMO_RUN, run_from
from crosscut.config import RunConfig
from crosscut.data import Tokens, prepare
from crosscut.logbook.contents import read_loads, read_metrics
from crosscut.planner.compute import flops_per_step
from crosscut.scaling.quality.runs import run_in, step_flops, train_all

DEMO = files("crosscut.config") / DEMO_RUN
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
"""Learning rates of which a contender gets the best."""

STRETCH = 20
"""Steps whose largest loads are one point of the figure."""

MOST_UNEQUAL = 1.02
"""Limit of the ratio of the FLOPs per token of contenders that are trained for the same tokens."""

COLORS = ("#9a6a3a", "#1f5f99", "#4c8a4a")
RECIPES = (
    "model.num_layers=4", "model.hidden_size=128", "model.num_heads=4", "model.max_sequence_length=128",
    "model.dropout=0.0", "training.sequence_length=128", "training.batch_size=8",
)  # fmt: skip
LAYERS = (
    "recipe=small", "model.hidden_size=192", "model.num_heads=6", "model.max_sequence_length=256",
    "model.positions=rotary", "model.norm=rms", "model.biases=none", "model.dropout=0.0", "model.mamba2.chunk_size=64",
    "training.sequence_length=256", "training.batch_size=8", "training.precision=float32",
)  # fmt: skip
TRANSFORMER = (*LAYERS, "model.num_layers=5", "model.mlp_size=480", "model.layers=attention swiglu")
HYBRID = ",".join(["mamba2 swiglu"] * 3 + ["attention swiglu"])
MIXTURE = (
    *LAYERS, "model.num_layers=5", "model.layers=attention experts", "model.experts.number=8",
    "model.experts.per_token=2", "model.experts.size=240",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Study:
    """Models or recipes that are trained beside each other."""

    contenders: Mapping[str, tuple[str, ...]]
    """Settings of each contender."""

    tuned: tuple[str, ...]
    """Contenders whose learning rate is the best of `RATES` with the first seed."""

    tuning: float = 1.0
    """Length of a run that tries a rate, as a share of the whole length."""

    equal_tokens: bool = False
    """Whether all contenders are trained for the same tokens, and otherwise for the same FLOPs."""


STUDIES = {
    "recipes": Study(
        contenders={"paper": (*RECIPES, "recipe=small"), "modern": (*RECIPES, "recipe=modern")}, tuned=("paper",)
    ),
    "hybrid": Study(
        contenders={
            "transformer": TRANSFORMER,
            "hybrid": (*LAYERS, "model.num_layers=4", "model.mlp_size=528", f"model.layers={HYBRID}"),
        },
        tuned=("transformer", "hybrid"),
        tuning=0.075,
        equal_tokens=True,
    ),
    "mixture": Study(
        contenders={
            "transformer": TRANSFORMER,
            "experts-loss": (*MIXTURE, "model.experts.balance_loss=0.03"),
            "experts-bias": (*MIXTURE, "model.experts.balance_loss=0", "model.experts.balance_bias=true"),
        },
        tuned=("transformer", "experts-loss", "experts-bias"),
        tuning=0.075,
        equal_tokens=True,
    ),
}


class Run(NamedTuple):
    """One training run."""

    name: str
    seed: int
    steps: int
    settings: tuple[str, ...]


def tokens_of(run: RunConfig) -> int:
    """Tokens of a step."""
    return run.training.batch_size * run.training.sequence_length


def figures_of(run: RunConfig) -> dict[str, Any]:
    """Figures of a finished run: its summary, its FLOPs, its validations as triples of step, bits per byte and loss in
    nats, and the largest loads of the experts of a mixture.
    """
    folder = Path(run.output.folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    keys, rows = ("step", "validation_bits_per_byte", "validation_loss"), read_metrics(folder)
    figures = {
        "seed": run.training.seed,
        "learning_rate": run.optimizer.learning_rate,
        "parameters": summary["parameters"],
        "bits_per_byte": summary["validation_bits_per_byte_after"],
        "loss": summary["validation_loss_after"],
        "perplexity": summary["validation_perplexity_after"],
        "training_seconds": summary["training_seconds"],
        "peak_flops_per_second": summary["peak_flops_per_second"],
        "steps": summary["steps"],
        "tokens_per_step": tokens_of(run),
        "flops_per_step": step_flops(run),
        "model_flops_per_step": flops_per_step(run),
        "validations": [[row[key] for key in keys] for row in rows if keys[1] in row],
        "load_of_all_steps": load_of_all_steps(folder, run.training.steps),
    }
    loads = [[row["step"], round(row["largest_load"], 3)] for row in rows if "largest_load" in row]
    return {**figures, **short_loads(loads, run.training.steps)}


def train(runs: Sequence[Run], folder: Path, tokens: Tokens, *, at_once: int) -> list[dict[str, Any]]:
    """Train runs, this many at a time. Return their figures in the order of the runs."""
    named = [(f"{run.name}-{run.seed}", run_from((*run.settings, f"training.seed={run.seed}"))) for run in runs]
    placed = [run_in(folder, name, run, tokens) for name, run in named]
    train_all(placed, at_once=at_once)
    return [figures_of(run) for run in placed]


def demo(seeds: int, folder: Path, tokens: Tokens, *, at_once: int) -> dict[str, list[dict[str, Any]]]:
    """Train the demo with these many seeds, the demo's own seed first."""
    own = run_from(()).training
    runs = [Run("demo", seed, own.steps, (str(DEMO),)) for seed in range(own.seed, own.seed + seeds)]
    return {"demo": train(runs, folder, tokens, at_once=at_once)}


def run_of(study: Study, name: str, rate: float | None, seed: int, length: argparse.Namespace, share: float) -> Run:
    """One run of a contender, for this share of the FLOPs or tokens of `length`."""
    settings = (*study.contenders[name], *([f"optimizer.learning_rate={rate}"] if rate else []))
    one = run_from((*settings, "data.tokens=tokens", "model.vocab_size=4096"))
    steps = share * (length.tokens / tokens_of(one) if study.equal_tokens else length.tflop * 1e12 / step_flops(one))
    every = max(1, int(steps) // length.points)
    how = (
        f"training.steps={int(steps)}", f"training.validate_every={every if share == 1.0 else 0}",
        "training.validation_sequences=256", f"checkpoint.every={every}", "checkpoint.keep=1", "layout.tensor=1",
        "output.sample_tokens=0", "data.tokens=tokens",
    )  # fmt: skip
    return Run(f"{name}-{rate or 'own'}-{int(steps)}", seed, int(steps), (*settings, *how))


def require_equal(study: Study) -> None:
    """End the command if contenders that are trained for the same tokens have different FLOPs per token."""
    runs = {name: run_from((*s, "data.tokens=tokens", "model.vocab_size=4096")) for name, s in study.contenders.items()}
    costs = {name: step_flops(run) / tokens_of(run) for name, run in runs.items()}
    if study.equal_tokens and max(costs.values()) > MOST_UNEQUAL * min(costs.values()):
        told = ", ".join(f"{name} {cost / 1e6:.2f} million" for name, cost in costs.items())
        sys.exit(f"The FLOPs per token must be equal within {MOST_UNEQUAL - 1:.0%}, but are: {told}. Change a width.")


def train_study(study: Study, chosen: argparse.Namespace, folder: Path, tokens: Tokens) -> dict[str, Any]:
    """Train the contenders of a study, each with all seeds. The key "rates" has the runs that tried learning rates."""
    require_equal(study)
    tries = [(name, rate) for name in study.tuned for rate in RATES]
    runs = [run_of(study, name, rate, 1, chosen, study.tuning) for name, rate in tries]
    tried = train(runs, folder, tokens, at_once=chosen.at_once)
    rates = [{"name": name, **one} for (name, _), one in zip(tries, tried, strict=True)]
    best = {
        name: min((one for one in rates if one["name"] == name), key=lambda one: one["bits_per_byte"])["learning_rate"]
        for name in study.tuned
    }
    seeds = range(1, chosen.seeds + 1)
    named = [(name, seed) for seed in seeds for name in study.contenders]  # all contenders have the first seeds first
    runs = [run_of(study, name, best.get(name), seed, chosen, 1.0) for name, seed in named]
    ended = train(runs, folder, tokens, at_once=chosen.at_once)
    return {"rates": rates, **{name: ended[i :: len(study.contenders)] for i, name in enumerate(study.contenders)}}


def short_loads(loads: Sequence[Sequence[float]], steps: int) -> dict[str, Any]:
    """Largest loads as means of `STRETCH` steps, and `load_of_a_step`: their mean over the last tenth of the steps, or
    None for a model without experts. `loads` has pairs of a step and its largest load.
    """
    last = [load for step, load in loads if step > 0.9 * steps]
    pieces = (list(zip(*loads[i : i + STRETCH], strict=True)) for i in range(0, len(loads), STRETCH))
    short = [[statistics.mean(steps), round(statistics.mean(of), 3)] for steps, of in pieces]
    return {"largest_loads": short, "load_of_a_step": statistics.mean(last) if last else None}


def load_of_all_steps(folder: Path, steps: int) -> float | None:
    """Largest load of an expert of a run in this folder, as a multiple of the mean load of its layer, in the tokens of
    the last tenth of the steps together, of which the run has recorded every n-th. None for a model without experts.
    """
    rows = [row["loads"] for row in read_loads(folder) if row["step"] > 0.9 * steps]
    columns = [zip(*(row[layer] for row in rows), strict=True) for layer in (rows[0] if rows else ())]
    layers = [list(map(sum, loads)) for loads in columns]
    return max((max(loads) / statistics.mean(loads) for loads in layers), default=None)


def table_of(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Build the table of the figures: a row for each group of runs."""
    names = ("run", "steps", "TFLOP", "seconds of training", "bits per byte", "spread")
    table = [[*names, "load of a step", "load of the steps"]]
    for name, group in runs.items():
        bits = [one["bits_per_byte"] for one in group]
        tflop = f"{group[0]['steps'] * group[0]['flops_per_step'] / 1e12:.2f}"
        seconds = f"{statistics.mean(one['training_seconds'] for one in group):.0f}"
        figures = (f"{statistics.mean(bits):.3f}", f"{min(bits):.3f} to {max(bits):.3f}")
        loads = ([one.get(key) for one in group] for key in ("load_of_a_step", "load_of_all_steps"))
        told = (spread_of([load for load in of if load is not None]) for of in loads)
        table.append([name, f"{group[0]['steps']:,}", tflop, seconds, *figures, *told])
    return aligned(table)


def spread_of(loads: Sequence[float]) -> str:
    """Smallest and largest load; empty for models without experts."""
    return f"{min(loads):.2f} to {max(loads):.2f}" if loads else ""


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw the bits per byte of the contenders over the FLOPs, from the first validation of a trained model on, with a
    line for each seed, and below the largest loads of mixtures.
    """
    has_loads = any(one["largest_loads"] for group in runs.values() for one in group)
    figure, panels = subplots(1 + has_loads, 1, figsize=(8, 7.0 if has_loads else 4.5), sharex=True, squeeze=False)
    (curves,), *below = panels
    for (name, group), color in zip(runs.items(), COLORS, strict=False):
        mean = statistics.mean(one["bits_per_byte"] for one in group)
        label = f"{name}: {mean:.3f} at the end, mean of {len(group)} seeds"
        for i, one in enumerate(group):
            tflop = one["flops_per_step"] / 1e12
            points = [(step * tflop, bits) for step, bits, *_ in one["validations"] if step]
            told = label if i == 0 else None
            curves.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, linewidth=1.2, label=told)
            for (loads,) in below if one["largest_loads"] else ():
                points = [(step * tflop, load) for step, load in one["largest_loads"]]
                loads.plot(*zip(*points, strict=True), color=color, linewidth=1.2, label=name if i == 0 else None)
    curves.set_ylabel("bits per byte of held-out documents")
    for (loads,) in below:
        loads.set_ylabel(f"largest load / mean load\n(mean of {STRETCH} steps)")
    for (axes,) in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper right")
    panels[-1][0].set_xlabel("TFLOP of training; a line is a seed")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the command that the user named and print its table."""
    parser = command_line(__doc__, figures="write")
    parser.add_argument("what", choices=("demo", *STUDIES))
    parser.add_argument("--text", default="builtin:state-of-the-union", help="text of a study")
    parser.add_argument("--seeds", type=int, help="number of seeds; by default 5 of the demo and 3 of a study")
    parser.add_argument("--tflop", type=float, default=3.0, help="10^12 FLOPs of each run of `recipes`")
    parser.add_argument("--tokens", type=float, default=4e6, help="tokens of each run of `hybrid`")
    parser.add_argument("--points", type=int, default=8, help="number of validations of each run of a study")
    parser.add_argument("--at-once", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--figure", type=Path, help="PNG file for the figure of a study")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs")
    chosen = parser.parse_args()
    chosen.seeds = chosen.seeds or (5 if chosen.what == "demo" else 3)
    print_machine("torch")
    with work_folder(chosen.keep) as folder:
        demo_run = run_from(())
        text = demo_run.data if chosen.what == "demo" else replace(demo_run.data, text=(chosen.text,))
        tokens = prepare(text, folder / "tokens", seed=demo_run.training.seed)
        if chosen.what == "demo":
            runs = demo(chosen.seeds, folder, tokens, at_once=chosen.at_once)
        else:
            runs = train_study(STUDIES[chosen.what], chosen, folder, tokens)
    named = dict(runs)
    rates = named.pop("rates", ())
    table = {f"{one['name']}, learning rate {one['learning_rate']:g}": [one] for one in rates}
    print(table_of({**table, **named}))
    if chosen.figure and rates:
        draw(named, chosen.figure)
    write_figures(chosen.json, {"machine": describe_machine("torch"), "runs": runs})


if __name__ == "__main__":
    main()
