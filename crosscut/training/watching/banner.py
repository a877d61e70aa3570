"""Facts about a run, printed before its first step: model, layout, corpus, folder and expected time."""

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TypedDict

import torch
from rich.console import Console

from crosscut.architecture.words import model_in_words
from crosscut.config import ResolvedRun, RunConfig
from crosscut.config.data import Objective
from crosscut.config.recipes import describe_recipe
from crosscut.config.system.console import facts_panel
from crosscut.config.system.machine import processor_name
from crosscut.config.system.wording import counted, short
from crosscut.data import folders_of
from crosscut.planner import count_parameters
from crosscut.planner.hardware import Hardware
from crosscut.training.batches import RunSamples
from crosscut.training.optimization.averaging import SCORED
from crosscut.training.watching.forecast import expected_seconds

_MOST_FILES = 3
"""Maximum number of files whose names the banner gives."""

COUNTS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
"""Unit letters with which `short` formats numbers of parameters and tokens."""


class MixtureFacts(TypedDict):
    """Facts about a token folder of a mixture."""

    folder: str
    share: float
    training_tokens: int
    epochs: float


def print_banner(
    run: ResolvedRun,
    samples: RunSamples,
    hardware: Hardware | None,
    device: torch.device,
    console: Console,
    *,
    done: int,
) -> None:
    """Print the facts about a run before its first step. `hardware` is the result of `hardware_for`, and `done` is the
    number of steps that were done before a restart.
    """
    config, training = run.config, run.training
    folders = folders_of(samples.tokens)
    corpus = sum(shard.num_tokens for folder in folders for shard in folder.train)
    epochs = f"{_epochs(config, samples, corpus):.3g}"
    validated = short(sum(folder.validation.num_tokens for folder in folders), COUNTS)
    first = f"{training.initial_batch_size:,} to " if training.initial_batch_size else ""
    batch = f"{first}{training.batch_size:,} x {training.sequence_length:,}"
    rows = [
        *model_rows(config),
        ("device", device_name(device)),
        ("corpus", f"{short(corpus, COUNTS)} tokens for training, {validated} for validation"),
        ("validation", _validated(config, samples)),
        ("training", f"{_steps(done, training.steps)} of {batch} tokens: {epochs} epoch{'' if epochs == '1' else 's'}"),
        ("recipe", describe_recipe(config)),
        *_teacher_rows(config),
        *_context_rows(config),
        *mixture_rows(mixture_facts(config, samples)),
        *average_rows(config),
        ("folder", config.output.folder),
    ]
    if expected := expected_seconds(run.config, samples, hardware, done=done):
        rows.append(("expected time", str(timedelta(seconds=round(expected)))))
    console.print(facts_panel("run", rows))


def _validated(run: RunConfig, samples: RunSamples) -> str:
    """Text that says how many sequences a validation pass reads, and from which held-out documents and files."""
    folders, validation = folders_of(samples.tokens), samples.validation
    files = [Path(name).name for folder in folders for name in folder.validation.files()]
    documents = counted(sum(folder.validation.num_documents for folder in folders), "held-out document")
    chosen, every = validation.count(run.training.validation_sequences), validation.count(0)
    kind = "random " if run.data.objective is Objective.MASKED else "evenly spread "
    sequences = f"{chosen:,} {kind}sequences" if chosen < every else f"all {counted(every, 'sequence')}"
    where = ", ".join(files) if len(files) <= _MOST_FILES else f"{len(files):,} files"
    return f"{sequences} of {documents} from {where}"


def _teacher_rows(run: RunConfig) -> list[tuple[str, str]]:
    """Return a row that names the teacher and its loss, or no row."""
    teacher = run.teacher
    if not teacher.teaches:
        return []
    told = f"{teacher.loss} at temperature {teacher.temperature:g}, {teacher.alpha:.0%} of the loss"
    return [("teacher", f"{teacher.cache or teacher.folder}: {told}")]


def _context_rows(run: RunConfig) -> list[tuple[str, str]]:
    """Return a row that says how context ranks compute attention over the sequences that they share, and why. The list
    is empty if the run has no context ranks.
    """
    if run.layout.context == 1:
        return []
    way, reason = run.context_attention
    tokens = run.training.sequence_length // run.layout.context
    return [("context", f"{tokens:,} tokens of each sequence per rank; {way.replace('_', '-')}, because {reason}")]


def _epochs(run: RunConfig, samples: RunSamples, corpus: int) -> float:
    """Return how many times the run goes through its corpus, which has `corpus` tokens. For masked tokens, samples are
    counted instead of tokens, because samples of segment pairs contain padding.
    """
    num_samples = run.training.samples_before(run.training.steps)
    if run.data.objective is Objective.MASKED and not run.data.mixture:
        return samples.training.epochs(num_samples)[0]
    return num_samples * run.training.sequence_length / corpus


def _steps(done: int, steps: int) -> str:
    return f"steps {done + 1:,} to {steps:,}" if done else counted(steps, "step")


def mixture_facts(run: RunConfig, samples: RunSamples) -> list[MixtureFacts]:
    """Return the facts about each token folder of a mixture: its share of the training tokens, and its epochs over all
    steps of the run. Empty if the run has no mixture.
    """
    if not run.data.mixture:
        return []
    training = run.training
    epochs = samples.training.epochs(training.samples_before(training.steps))
    return [
        {
            "folder": str(folder.path),
            "share": share,
            "training_tokens": sum(shard.num_tokens for shard in folder.train),
            "epochs": times,
        }
        for (folder, share), times in zip(folders_of(samples.tokens).items(), epochs, strict=True)
    ]


def mixture_rows(facts: Iterable[MixtureFacts]) -> list[tuple[str, str]]:
    """Return the rows for the token folders of a mixture, from `mixture_facts`. Empty without a mixture."""
    lines = [f"{each['share']:.3g} of {each['folder']}: {each['epochs']:.3g} epochs" for each in facts]
    return [("mixture", "\n".join(lines))] if lines else []


def average_rows(run: RunConfig) -> list[tuple[str, str]]:
    """Return a row that says that scores and samples use the averaged weights. Empty without `optimizer.ema_decay`."""
    decay = run.optimizer.ema_decay
    return [("weights", f"scores and samples are {SCORED} (decay {decay:g})")] if decay else []


def model_rows(run: RunConfig) -> list[tuple[str, str]]:
    """Return the rows for the model and the layout of a run."""
    model, layout = run.model, run.layout
    parameters = short(count_parameters(model), COUNTS)
    processes = f"{layout.world_size} process{'es' if layout.world_size > 1 else ''}"
    return [
        ("model", model_in_words(model, parameters, f"vocabulary {model.vocab_size:,}")),
        ("layout", f"{layout}: {processes}"),
    ]


def device_name(device: torch.device) -> str:
    """Name of the GPU or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
