"""Depth and the place of the norms: models of 4, 12 and 24 layers, with norms after and before the sublayers.

    python benchmarks/training/depth.py BOOKS.jsonl.zst --results depth.json --figure depth.png

The later version of the Megatron paper (arXiv 1909.08053v4, section 5.3) reports that deeper BERTs get worse with norms
after the residual sums, and better with norms before the sublayers. This command measures it at a width of 64: every
depth and place of the norms with the same learning rates and the same seeds, all for the same number of steps. The
optimizer's settings are those of the paper's BERT (AdamW, weight decay 0.01, clipping at 1.0, linear decay to zero
after a warm-up); the warm-up is a tenth of the steps, and there is no dropout. They were fixed before the first run.

The models predict the next token, which gives every token a loss, and a token is a byte: with a vocabulary of 4,096 and
300 steps, models with norms after the sums did not leave the level of a guess at any depth. With masked tokens, only
one token in seven has a loss, and a model of this size does not leave the level of a guess from the tokens' frequencies
within the steps that a CPU can make in some hours, whatever the place of its norms.

Each run takes one thread. Finished runs are kept in the results, so an interrupted command continues where it was.
"""

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line, progress_bar, subplots
from benchmarks.machine import describe_machine, print_machine
from crosscut.config import DataConfig, ResolvedRun, TrainingError, load_run, write_whole
from crosscut.data import Tokens, prepare
from crosscut.evaluation.perplexity import evaluate_loss
from crosscut.launch import process_group
from crosscut.parallel import ParallelMesh, make_mesh
from crosscut.training.batches import TokenBatches, batches_of, samples_of
from crosscut.training.precision import resolve_on
from crosscut.training.step import Trainer

DEPTHS = (4, 12, 24)
PLACES = ("after", "before")
RATES = (3e-4, 1e-3, 3e-3)
VOCABULARY = 257
"""The bytes and the end of a text, so that 1,000 steps are enough for more than the frequencies of the tokens."""

COLORS = {"after": "#9a6a3a", "before": "#1f5f99"}
EVERY = 10
"""Steps whose mean loss is one point of a run's curve."""


class Case(NamedTuple):
    """One run of the study."""

    seed: int
    rate: float
    place: str
    depth: int

    @property
    def name(self) -> str:
        """Key of the run in the results."""
        return f"{self.depth} layers, norm {self.place}, rate {self.rate:g}, seed {self.seed}"


def run_of(case: Case, tokens: Tokens, steps: int, precision: str = "float32") -> ResolvedRun:
    """Return the settings of a run."""
    table = {
        "model": {
            "num_layers": case.depth, "hidden_size": 64, "num_heads": 4, "max_sequence_length": 128, "dropout": 0.0,
            "norm_place": case.place, "vocab_size": tokens.tokenizer().vocab_size,
        },
        "data": {"tokens": str(tokens.path)},
        "training": {
            "steps": steps, "batch_size": 8, "sequence_length": 128, "seed": case.seed, "precision": precision,
            "validation_sequences": 256, "compile": "off",
        },
        "optimizer": {
            "learning_rate": case.rate, "schedule": "linear", "min_learning_rate": 0.0, "warmup_steps": steps // 10,
            "weight_decay": 0.01, "clip_norm": 1.0,
        },
    }  # fmt: skip
    return resolve_on(load_run(table, ()), torch.device("cpu"))


def train(case: Case, tokens: Tokens, steps: int, mesh: ParallelMesh) -> dict[str, Any]:
    """Train one run. Return its curve and its validation loss, in nats, which is None if the run diverged."""
    run = run_of(case, tokens, steps)
    trainer, batches = Trainer(run, mesh), batches_of(run.config, samples_of(run.config, tokens), mesh)
    losses, norms, begin = [], [], time.perf_counter()
    try:
        for step in range(steps):
            result = trainer.step(step, batches.micro_batches(step)).wait()
            losses.append(result.loss)
            norms.append(result.gradient_norm)
        validation = evaluate_loss(trainer.model, batches.validation_batches()).loss
    except TrainingError:  # a loss or a gradient norm that is not finite
        validation = None
    return {
        "validation_loss": validation,
        "losses": [round(statistics.mean(losses[i : i + EVERY]), 4) for i in range(0, len(losses), EVERY)],
        "largest_gradient_norm": max(norms),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def gradient_norms(case: Case, tokens: Tokens, mesh: ParallelMesh) -> list[float]:
    """Norm of the gradient of each layer before the first step, in float64, from the first batch of the run."""
    run = run_of(case, tokens, 1, precision="float64")
    trainer, batches = Trainer(run, mesh), batches_of(run.config, samples_of(run.config, tokens), mesh)
    trainer.accumulate(0, batches.micro_batches(0))
    return [
        math.sqrt(sum(float(each.grad.square().sum()) for each in block.parameters() if each.grad is not None))
        for block in trainer.model.blocks
    ]


def frequency_loss(batches: TokenBatches, vocab_size: int, steps: int) -> float:
    """Validation loss, in nats, of a guess from the frequencies of the targets in the run's training batches."""
    counts = torch.ones(vocab_size, dtype=torch.float64)
    for step in range(steps):
        for batch in batches.micro_batches(step):
            counts += torch.bincount(batch.targets[batch.targets >= 0], minlength=vocab_size)
    guesses = (counts / counts.sum()).log()
    targets = torch.cat([batch.targets[batch.targets >= 0] for batch in batches.validation_batches()])
    return -float(guesses[targets].mean())


def cases(seeds: int) -> list[Case]:
    """All runs, the first seed of each before the second of any."""
    return [Case(*one) for one in product(range(1, seeds + 1), RATES, PLACES, DEPTHS)]


def study(tokens: Tokens, results: Path, *, steps: int, seeds: int) -> dict[str, Any]:
    """Train all runs that the results do not have yet. Return all results."""
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    if found and found["steps"] != steps:
        raise SystemExit(f"`{results}` must hold runs of {steps} steps, but has {found['steps']}. Name another file.")
    device = torch.device("cpu")
    with process_group(device), progress_bar() as progress:
        first = run_of(cases(1)[0], tokens, steps).config
        mesh = make_mesh(first.layout, device)
        if not found:
            loss = frequency_loss(batches_of(first, samples_of(first, tokens), mesh), first.model.vocab_size, steps)
            norms = {
                f"{place} {depth}": gradient_norms(Case(1, RATES[0], place, depth), tokens, mesh)
                for place, depth in product(PLACES, DEPTHS)
            }
            machine = describe_machine("torch")
            found = {"machine": machine, "steps": steps, "frequency_loss": loss, "gradient_norms": norms, "runs": {}}
        left = [case for case in cases(seeds) if case.name not in found["runs"]]
        task = progress.add_task("runs", total=len(left), told="")
        for case in left:
            progress.update(task, told=case.name)
            found["runs"][case.name] = train(case, tokens, steps, mesh)
            write_whole(results, json.dumps(found, indent=1) + "\n")
            progress.advance(task)
    return found


def groups(found: Mapping[str, Any], seeds: int) -> dict[tuple[str, int, float], list[dict[str, Any]]]:
    """Finished runs of each place of the norms, depth and learning rate, by seed."""
    wanted = product(PLACES, DEPTHS, RATES)
    names = {(place, depth, rate): [Case(i, rate, place, depth).name for i in range(1, seeds + 1)]
             for place, depth, rate in wanted}  # fmt: skip
    return {key: [found["runs"][name] for name in each if name in found["runs"]] for key, each in names.items()}


def is_stable(runs: Sequence[Mapping[str, Any]], frequency_loss: float) -> bool:
    """Whether every seed ended with a finite loss that is at least 1% below that of a guess from the tokens'
    frequencies.
    """
    return all(one["validation_loss"] is not None and one["validation_loss"] < 0.99 * frequency_loss for one in runs)


def table_of(found: Mapping[str, Any], seeds: int) -> str:
    """Build the table of validation losses: the median over the seeds, with the lowest and the highest."""
    table = [["norm", "layers", *(f"rate {rate:g}" for rate in RATES), "largest stable rate"]]
    by_case, level = groups(found, seeds), found["frequency_loss"]
    for place, depth in product(PLACES, DEPTHS):
        told, stable = [], []
        for rate in RATES:
            runs = by_case[place, depth, rate]
            losses = [one["validation_loss"] for one in runs if one["validation_loss"] is not None]
            lost = f", {len(runs) - len(losses)} diverged" if len(losses) < len(runs) else ""
            spread = f"{statistics.median(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})" if losses else "none"
            told.append(spread + lost)
            stable += [rate] if runs and is_stable(runs, level) else []
        table.append([place, str(depth), *told, f"{max(stable):g}" if stable else "none"])
    return aligned(table)


def draw(found: Mapping[str, Any], seeds: int, path: Path) -> None:
    """Draw the validation loss over the depth at the best learning rate of each, the same over the learning rate at
    the greatest depth, the curves of the best rates, and the gradient norms of the layers before the first step.
    """
    figure, ((depths, rates), (curves, norms)) = subplots(2, 2, figsize=(10, 7.5))
    by_case, level = groups(found, seeds), found["frequency_loss"]
    shades = dict(zip(DEPTHS, (0.35, 0.65, 1.0), strict=True))
    for place in PLACES:
        color, ends = COLORS[place], {}
        for depth in DEPTHS:
            medians = {rate: _median(by_case[place, depth, rate]) for rate in RATES}
            best = min(medians, key=medians.__getitem__)
            ends[depth] = [one["validation_loss"] for one in by_case[place, depth, best] if one["validation_loss"]]
            label = f"norm {place}, {depth} layers"
            style: dict[str, Any] = {"color": color, "alpha": shades[depth], "linewidth": 1.4, "label": label}
            rates.plot(RATES, [medians[rate] for rate in RATES], marker="o", markersize=3, **style)
            losses = by_case[place, depth, best][0]["losses"]
            curves.plot([EVERY * (i + 1) for i in range(len(losses))], losses, **style)
            layers = found["gradient_norms"][f"{place} {depth}"]
            norms.plot([(i + 0.5) / depth for i in range(depth)], layers, **style)
        depths.plot(DEPTHS, [statistics.median(ends[depth]) for depth in DEPTHS], color=color, label=f"norm {place}")
        for depth in DEPTHS:
            depths.plot([depth] * len(ends[depth]), ends[depth], "o", color=color, markersize=4)
    for axes in (depths, rates):
        axes.axhline(level, color="#888888", linestyle=":", linewidth=1, label="guess from frequencies")
    depths.set(
        xlabel="number of layers",
        ylabel="validation loss (nats per token)",
        title="Best learning rate of each depth: seeds and median",
    )
    depths.set_xticks(DEPTHS)
    rates.set(
        xlabel="learning rate",
        ylabel="validation loss (nats per token)",
        xscale="log",
        title="Every learning rate: median of the seeds",
    )
    rates.minorticks_off()
    rates.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    curves.set(
        xlabel="training step",
        ylabel="training loss (nats per token)",
        title=f"Training at the best rate, first seed, mean of {EVERY} steps",
    )
    norms.set(xlabel="place of the layer, from input to output", ylabel="norm of its gradient", yscale="log",
              title="Gradients before the first step, float64")  # fmt: skip
    for axes in (depths, rates, curves, norms):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    depths.legend(frameon=False)
    norms.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def _median(runs: Sequence[Mapping[str, Any]]) -> float:
    """Median of the validation losses of some runs; infinite for a run that diverged."""
    return statistics.median(math.inf if one["validation_loss"] is None else one["validation_loss"] for one in runs)


def main() -> None:
    """Run the study from the command line and print its table."""
    parser = command_line(__doc__)
    parser.add_argument("text", help="text file, such as a .jsonl.zst of books")
    parser.add_argument("--results", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--tokens", type=Path, help="folder for the tokens; by default, a temporary one")
    parser.add_argument("--steps", type=int, default=1000, help="number of steps of each run")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of each depth, place and rate")
    parser.add_argument("--figure", type=Path, help="PNG file for the figure")
    chosen = parser.parse_args()
    print_machine("torch")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        data = DataConfig(text=(chosen.text,), vocab_size=VOCABULARY)
        tokens = prepare(data, chosen.tokens or Path(scratch) / "tokens", seed=1)
        found = study(tokens, chosen.results, steps=chosen.steps, seeds=chosen.seeds)
    print(table_of(found, chosen.seeds))
    print(f"A guess from the frequencies of the tokens has a loss of {found['frequency_loss']:.3f}.")
    if chosen.figure:
        draw(found, chosen.seeds, chosen.figure)


if __name__ == "__main__":
    main()
