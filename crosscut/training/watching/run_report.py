"""Report of a finished run: a plot of its losses, samples of its text and a summary."""

import dataclasses
import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from crosscut.architecture import Ability, describe
from crosscut.checkpoint import list_checkpoints
from crosscut.checkpoint.format.manifest import current_versions
from crosscut.config import ConfigError, DataError, GenerationError, RunConfig, write_whole
from crosscut.config.conventions import CHECKPOINTS_FOLDER, CONFIG_FILE
from crosscut.config.system.console import facts_panel
from crosscut.config.system.terminal import new_console, typed_command
from crosscut.config.system.wording import RATES, short
from crosscut.data import Tokens
from crosscut.evaluation.score_table import in_a_line
from crosscut.generation import Sampling, continue_text
from crosscut.generation.text import Around, SpecialIds
from crosscut.logbook.contents import read_metrics
from crosscut.logbook.objects import write_object
from crosscut.logbook.rows import Row
from crosscut.logbook.schema import (
    LOADS_PLOT_FILE,
    PLOT_FILE,
    RUN_FILES,
    SAMPLE_FILE,
    SPIKES_FOLDER,
    SUMMARY_FILE,
)
from crosscut.logbook.skips import Event, own_record
from crosscut.model import GPT
from crosscut.planner import count_parameters
from crosscut.pretrained import speech_of_run
from crosscut.training.batches import RunSamples
from crosscut.training.evaluations import last_figures
from crosscut.training.loads.picture import plot_loads
from crosscut.training.loads.summary import describe_loads, summarize_loads
from crosscut.training.loop import RunOutcome
from crosscut.training.optimization.averaging import SCORED
from crosscut.training.speed.compilation import uncompiled
from crosscut.training.watching.banner import (
    COUNTS,
    average_rows,
    device_name,
    mixture_facts,
    mixture_rows,
    model_rows,
)
from crosscut.training.watching.figures import GREY, frame, write_figure
from crosscut.training.watching.forecast import gain_of_one_rank

RunSummary = dict[str, Any]
"""Content of `summary.json`."""


def write_report(run: RunConfig, model: GPT, samples: RunSamples, outcome: RunOutcome) -> str:
    """Write the report of a run and print its summary, on the first rank. All ranks generate the samples, if
    `output.sample_tokens` is above 0. Every rank must call this function.

    Returns an empty text if all files are written. Otherwise, the first rank returns the reason why a file could not be
    written.
    """
    folder = Path(run.output.folder)
    texts = {_title(prompt): text for prompt, text in draw_samples(run, model, samples.tokens).items()}
    if not model.mesh.is_first_rank:
        return ""
    summary = {
        **summarize(run, outcome, model.mesh.device),
        "mixture": mixture_facts(run, samples),
        "evaluation": last_figures(rows := read_metrics(folder)),
        "experts": summarize_loads(rows, run.training.steps),
        "spikes": [dataclasses.asdict(event) for event in _spikes(folder)],
    }
    unwritten, failure = [PLOT_FILE, LOADS_PLOT_FILE, SAMPLE_FILE, SUMMARY_FILE], ""
    try:
        if texts:
            write_whole(folder / SAMPLE_FILE, "\n\n".join(texts.values()) + "\n")
            unwritten.remove(SAMPLE_FILE)
        plot_losses(folder, scored=f" {SCORED}" if run.optimizer.ema_decay else "")
        unwritten.remove(PLOT_FILE)
        plot_loads(folder)
        unwritten.remove(LOADS_PLOT_FILE)
        write_object(folder / SUMMARY_FILE, summary)  # last: marks a complete report
        unwritten.remove(SUMMARY_FILE)
    except OSError as error:
        failure = error.strerror or str(error)
    print_summary(run, summary, texts, new_console(), unwritten=unwritten)
    return failure


def _title(prompt: str) -> str:
    return f'sample that continues "{prompt}"' if prompt else "sample"


def draw_samples(run: RunConfig, model: GPT, tokens: Tokens, around: Around = iter) -> dict[str, str]:
    """Generate the samples, keyed by prompt: a new document (an empty prompt) and, if the run has a prompt, its
    continuation. Every rank must call this function.
    The samples are not selected: each sample is the first one that is drawn. Returns no samples if none are wanted, if
    the model cannot write, or if the layout has a pipeline.
    """
    output, writes = run.output, Ability.WRITE in describe(run.model).head.abilities
    if not output.sample_tokens or not writes or run.layout.num_stages > 1:
        return {}
    sampling = Sampling(
        num_tokens=output.sample_tokens,
        temperature=output.sample_temperature,
        repetition_penalty=output.sample_repetition_penalty,
        seed=run.training.seed,
    )
    samples = {}
    with uncompiled(model):  # the text grows with each token, and each length would need its own compiled graph
        for prompt in dict.fromkeys(("", output.sample_prompt)):
            try:
                spoken = speech_of_run(run, tokens.path)
                special = SpecialIds(spoken.begin_of_text, spoken.stops) if spoken else None
                samples[prompt] = continue_text(model, tokens, prompt, sampling, special=special, around=around)
            except (
                GenerationError,
                DataError,
            ) as error:  # the run is complete, and its report says why it has no sample
                samples[prompt] = f"No text. {error}"
    return samples


def summarize(run: RunConfig, outcome: RunOutcome, device: torch.device) -> RunSummary:
    """Return the figures of a run, as `summary.json` stores them. Rates are None if this process trained no step."""
    samples, length = run.training.samples_before, run.training.sequence_length
    num_tokens = (samples(run.training.steps) - samples(outcome.first_step)) * length
    rates = outcome.throughput.rates(outcome.seconds, num_tokens=num_tokens) if num_tokens and outcome.seconds else {}
    return {
        "parameters": count_parameters(run.model),
        "vocab_size": run.model.vocab_size,
        "layout": str(run.layout),
        "device": device_name(device),
        "versions": current_versions(),
        "first_step": outcome.first_step,
        "steps": run.training.steps,
        "averaged_weights": bool(run.optimizer.ema_decay),
        "training_tokens": samples(run.training.steps) * length,
        "training_seconds": outcome.seconds,
        "validation_loss_before": outcome.before.loss,
        "validation_loss_after": outcome.after.loss,
        "validation_perplexity_before": outcome.before.perplexity,
        "validation_perplexity_after": outcome.after.perplexity,
        "validation_bits_per_byte_before": outcome.before.bits_per_byte,
        "validation_bits_per_byte_after": outcome.after.bits_per_byte,
        "validation_tokens": outcome.after.num_tokens,
        "validation_bytes": outcome.after.num_bytes,
        "tokens_per_second": rates.get("tokens_per_second"),
        "model_flops_per_second": rates.get("model_flops_per_second"),
        "utilisation": rates.get("utilisation"),
        "peak": outcome.throughput.peak.name,
        "peak_flops_per_second": outcome.throughput.peak.flops_per_second,
        "gain_of_one_rank": gain_of_one_rank(run, outcome.throughput.peak, device),
    }


def plot_losses(folder: Path, *, scored: str = "", per: str = "token") -> None:
    """Plot the training and validation losses of a run's `metrics.jsonl` to `loss.png`. `scored` names the weights that
    were validated; an empty text means the weights of the last step. `per` names what one loss belongs to: a token, or
    an example of a task.

    The curve of the validation begins after the first steps: a line from the untrained model would cross no loss that
    was measured. The legend has the first loss.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_metrics(folder)
    trained = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    validated = [row for row in rows if row.get("validation_loss") is not None]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    if trained:
        axes.plot(*zip(*trained, strict=True), color="#7fa8cd", linewidth=1, label="training, batch of each step")
        label = "training, mean of up to 5% of the steps"
        axes.plot(*zip(*_smoothed(trained), strict=True), color="#1f5f99", linewidth=2, label=label)
    if validated:  # a full disk may have lost the rows
        points = [(row["step"], row["validation_loss"]) for row in validated if row["step"] or len(validated) == 1]
        label = f"validation{scored}, {_first_loss(validated)}at the end {_told(validated[-1], per)}"
        axes.plot(*zip(*points, strict=True), color="#b8431f", marker="o", markersize=4, label=label)
    for number, event in enumerate(_spikes(folder)):
        axes.axvline(event.back_to, color=GREY, linestyle=":", label="" if number else "rollback after a spike")
    axes.set(xlabel="training step", ylabel=f"mean cross entropy per {per} (nats)")
    axes.margins(y=0.12)
    frame(axes)
    axes.legend(frameon=False, loc="upper right")  # a loss falls, so this corner of the plot is empty
    write_figure(figure, folder / PLOT_FILE)


def _first_loss(validated: Sequence[Row]) -> str:
    """Return the text about the validation before the first step for the plot's legend. Empty without one."""
    first = validated[0]
    return "" if first["step"] or len(validated) == 1 else f"{first['validation_loss']:.2f} nats at step 0, "


def _spikes(folder: Path) -> tuple[Event, ...]:
    """Return the spikes after which the run rolled back to an earlier step. Empty if the record cannot be read."""
    with suppress(ConfigError):
        if record := own_record(folder):
            return record.events
    return ()


def _told(row: Row, per: str) -> str:
    """Return the text about the last validation pass for the plot's legend. There are no bits per byte
    if the tokens do not record the bytes of their text.
    """
    if per != "token":
        return f"{row['validation_loss']:.4f}"
    bits = row.get("validation_bits_per_byte")
    perplexity = f"perplexity {math.exp(min(row['validation_loss'], 700)):,.1f}"
    return perplexity if bits is None else f"{perplexity}, {bits:.3f} bits per byte"


def _smoothed(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Average each point with the points before it. The average covers a twentieth of all points, and fewer points at
    the start, where the loss falls fast.
    """
    means = []
    for i in range(len(points)):
        near = points[i - min(i // 4, len(points) // 20) : i + 1]
        means.append((points[i][0], sum(loss for _, loss in near) / len(near)))
    return means


def print_summary(
    run: RunConfig,
    summary: RunSummary,
    samples: Mapping[str, str],
    console: Console,
    *,
    unwritten: Collection[str] = (),
) -> None:
    """Print the samples with their titles, the results of the run, the paths of its files and commands to type next.
    Files that do not exist are left out, and so are the files in `unwritten`, which may belong to an earlier report.
    """
    for title, text in samples.items():
        console.print(Panel(Text(text), title=Text(title), title_align="left", padding=(1, 2), style="dim"))
    console.print(facts_panel("done", _summary_rows(run, summary)))
    folder = run.output.folder
    names = [file.name for file in RUN_FILES if file.is_listed]
    files = [name for name in names if name not in unwritten and (Path(folder) / name).exists()]
    if list_checkpoints(Path(folder) / CHECKPOINTS_FOLDER):
        files.append(CHECKPOINTS_FOLDER)
    lines = [f"files  {folder}/: {', '.join(files)}"]
    for line in _next_commands(run, summary["steps"]):
        lines.append(f"{'next' if len(lines) == 1 else '':7}{line}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _next_commands(run: RunConfig, steps: int) -> Iterator[str]:
    """Commands to type after a run: use the model, train it longer, look at its curves."""
    command, folder = typed_command(), shlex.quote(run.output.folder)
    abilities = describe(run.model).head.abilities
    if Ability.WRITE in abilities:
        options = f" --prompt {shlex.quote(run.output.sample_prompt)}" if run.output.sample_prompt else ""
        for name in ("temperature", "repetition_penalty"):
            if (value := getattr(run.output, f"sample_{name}")) != getattr(Sampling, name):
                options += f" --{name.replace('_', '-')} {value:g}"
        yield f"{command} generate {folder}{options}"
    if Ability.FILL in abilities:
        yield f"{command} generate {folder} --prompt 'It was a [MASK] day.'"
    if Ability.EMBED in abilities:
        yield f"{command} embed {folder} --text 'It was a fine day.'"
        yield f"{command} finetune table --model {folder} --train TRAIN.tsv --dev DEV.tsv --text COLUMN --label COLUMN"
    yield f"{command} train {shlex.quote(f'{run.output.folder}/{CONFIG_FILE}')} --resume training.steps={2 * steps}"
    yield f"{command} watch {folder}"


def _summary_rows(run: RunConfig, summary: RunSummary) -> Iterator[tuple[str, str | Text]]:
    yield from model_rows(run)
    yield from mixture_rows(summary.get("mixture", ()))
    yield from average_rows(run)
    yield "device", f"{summary['device']}; torch {summary['versions']['torch']}"
    before, after = summary["validation_perplexity_before"], summary["validation_perplexity_after"]
    tokens = f"{summary['steps']:,} steps ({short(summary['training_tokens'], COUNTS)} tokens)"
    scored = f"over {summary['validation_tokens']:,} validation tokens"
    when = f"at step {summary['first_step']:,}" if summary["first_step"] else "before"
    yield (
        "perplexity",
        Text.assemble(f"{before:,.1f} {when}, ", (f"{after:,.1f}", "bold"), f" after {tokens}; {scored}"),
    )
    if summary["validation_bytes"]:
        before, after = (f"{summary[f'validation_bits_per_byte_{time}']:.3f}" for time in ("before", "after"))
        scored = f"over {short(summary['validation_bytes'], _SIZES)}B of text"
        yield "bits per byte", Text.assemble(f"{before} {when}, ", (after, "bold"), f" after; {scored}")
    if spikes := summary.get("spikes"):
        sequences = sum(event["sequences"] for event in spikes)
        yield "spikes", f"{len(spikes)}, after which the run left out {sequences:,} sequences ({SPIKES_FOLDER}/)"
    if loads := summary.get("experts"):
        yield "experts", describe_loads(loads)
    if summary["evaluation"]:
        yield "evaluation", Text(in_a_line(summary["evaluation"]))
    if summary["tokens_per_second"]:
        rate, peak = (short(summary[f"{name}flops_per_second"], RATES) for name in ("model_", "peak_"))
        peak, share = f"{peak}FLOP/s ({summary['peak']})", summary["utilisation"]
        told = f": above {peak}, as the machine was busy when this rate was measured, so no share is given"
        if share is not None and share <= 1:
            told = f": {share:.0%} of {peak}"
        yield "speed", Text(f"{summary['tokens_per_second']:,.0f} tokens/s, {rate}FLOP/s{told}")
    if (gain := summary["gain_of_one_rank"]) > 1:
        yield "note", f"one rank would be about {gain:.2f} times as fast here: layout.tensor=1 layout.data=1"


_SIZES = ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, " "))
