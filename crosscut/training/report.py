"""What a run leaves for people: a plot of its losses, a sample of its text, a summary."""

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from crosscut.config import RunConfig
from crosscut.data import TokenFolder
from crosscut.generation import Sampling, continue_text
from crosscut.model import GPT
from crosscut.planner import count_parameters
from crosscut.training.loop import Outcome
from crosscut.training.metrics import read_metrics

PLOT_FILE = "loss.png"
SAMPLE_FILE = "sample.txt"
SUMMARY_FILE = "summary.json"


def write_report(run: RunConfig, model: GPT, tokens: TokenFolder, outcome: Outcome) -> None:
    """Sample a text on all ranks; on the first, write the files and print the summary."""
    folder = Path(run.output.folder)
    sampling = Sampling(num_tokens=run.output.sample_tokens, seed=run.training.seed)
    text = continue_text(model, tokens, run.output.sample_prompt, sampling)
    if not model.mesh.is_first_rank:
        return
    (folder / SAMPLE_FILE).write_text(text + "\n", encoding="utf-8")
    plot_losses(folder)
    summary = summarize(run, outcome)
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_summary(run, summary, text, Console())


def summarize(run: RunConfig, outcome: Outcome) -> dict[str, Any]:
    """The figures of a run, as `summary.json` holds them."""
    steps = run.training.steps - outcome.first_step
    rates = outcome.throughput.rates(outcome.seconds / steps) if steps and outcome.seconds else {}
    return {
        "parameters": count_parameters(run.model),
        "vocab_size": run.model.vocab_size,
        "layout": str(run.layout),
        "steps": run.training.steps,
        "training_tokens": run.training.steps * outcome.throughput.tokens_per_step,
        "training_seconds": outcome.seconds,
        "validation_loss_before": outcome.before.loss,
        "validation_loss_after": outcome.after.loss,
        "validation_perplexity_before": outcome.before.perplexity,
        "validation_perplexity_after": outcome.after.perplexity,
        "validation_tokens": outcome.after.num_tokens,
        "tokens_per_second": rates.get("tokens_per_second"),
        "model_flops_per_second": rates.get("model_flops_per_second"),
        "utilisation": rates.get("utilisation"),
        "peak": outcome.throughput.peak.name,
        "peak_flops_per_second": outcome.throughput.peak.flops_per_second,
    }


def plot_losses(folder: Path) -> None:
    """Draw the training and validation losses of a run's `metrics.jsonl` into `loss.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_metrics(folder)
    trained = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    validated = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    if trained:
        axes.plot(*zip(*trained, strict=True), color="#9ec1e0", linewidth=1, label="training, each step")
        axes.plot(*zip(*_smoothed(trained), strict=True), color="#1f5f99", linewidth=2, label="training, smoothed")
    axes.plot(*zip(*validated, strict=True), color="#c8502d", marker="o", markersize=4, label="validation")
    last_step, last_loss = validated[-1]
    axes.annotate(
        f"perplexity {math.exp(last_loss):.1f}", (last_step, last_loss), xytext=(-6, 14), textcoords="offset points",
        ha="right", color="#c8502d",
    )  # fmt: skip
    axes.set(xlabel="step", ylabel="cross entropy per token (nats)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(folder / PLOT_FILE, dpi=150)
    pyplot.close(figure)


def _smoothed(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The mean over a window of a twentieth of the points."""
    window = max(1, len(points) // 20)
    means = []
    for i in range(len(points)):
        near = points[max(0, i - window) : i + window + 1]
        means.append((points[i][0], sum(loss for _, loss in near) / len(near)))
    return means


def print_summary(run: RunConfig, summary: dict[str, Any], text: str, console: Console) -> None:
    """Print what the run came to, where its files are and what to type next."""
    folder = Path(run.output.folder)
    table = Table.grid(padding=(0, 3))
    table.add_column(style="bold")
    table.add_column()
    model = run.model
    table.add_row(
        "model",
        f"GPT-2, {summary['parameters'] / 1e6:,.1f}M parameters ({model.num_layers} layers, hidden "
        f"{model.hidden_size}, {model.num_heads} heads, vocabulary {model.vocab_size:,})",
    )
    table.add_row("layout", f"{summary['layout']}: {run.layout.world_size} processes")
    table.add_row(
        "perplexity",
        f"{summary['validation_perplexity_before']:,.0f} before, [bold green]"
        f"{summary['validation_perplexity_after']:,.2f}[/] after {summary['steps']:,} steps "
        f"({summary['training_tokens'] / 1e6:,.1f}M tokens), on {summary['validation_tokens']:,} validation tokens",
    )
    if summary["tokens_per_second"]:
        table.add_row(
            "speed",
            f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['model_flops_per_second'] / 1e9:,.0f} GFLOP/s, "
            f"{summary['utilisation']:.0%} of {summary['peak_flops_per_second'] / 1e9:,.0f} ({summary['peak']})",
        )
    table.add_row("files", f"{folder}/  {PLOT_FILE}  {SAMPLE_FILE}  metrics.jsonl  config.toml  checkpoints/")
    table.add_row("next", f"crosscut generate {folder} --prompt 'My fellow citizens,'")
    table.add_row("", f"crosscut train {folder}/config.toml --resume training.steps={2 * summary['steps']}")
    table.add_row("", f"tensorboard --logdir {folder}")
    console.print(Panel(text, title="sample", title_align="left", padding=(1, 2), style="dim"), highlight=False)
    console.print(Panel(table, title="done", title_align="left", padding=(1, 2)), highlight=False)
