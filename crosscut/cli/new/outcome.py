"""Output of `crosscut new`: the forecast of the run that it has written, and the next commands."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from crosscut.cli.new.answers import DEMO_TEXT
from crosscut.cli.new.settings import MOST_READINGS, NewRun
from crosscut.cli.plan.ranking import checkpoints_text, duration_text, seconds_text
from crosscut.config.recipes import LARGE
from crosscut.config.system.console import facts_panel
from crosscut.config.system.terminal import new_console, typed_command
from crosscut.config.system.wording import short
from crosscut.planner.facts import budget, three_digits
from crosscut.planner.search import memory_of_rank


def show_new_run(path: Path, made: NewRun) -> None:
    """Print the forecast of memory and time, and the next commands."""
    console = new_console()
    console.print(facts_panel("forecast", _facts(made)))
    if warning := _warning(made):
        console.print(warning)
    console.print(f"file  {path}", soft_wrap=True)
    for title, line in zip(("next", "", ""), _commands(shlex.quote(str(path)), made), strict=False):
        console.print(f"{title:<6}{line}", soft_wrap=True)


def _facts(made: NewRun) -> Iterator[tuple[str, str]]:
    plan, plans, training = made.plan, made.plans, made.run.training
    yield "model", f"{short(made.num_parameters)} parameters: {plans.asked.model.pattern}"
    yield "devices", f"{plans.num_ranks:,} x {plans.hardware.name}"
    yield "layout", f"{made.run.layout}; micro-batches of {training.micro_batch_size}"
    room = memory_of_rank(plans.hardware, plans.num_ranks)
    yield "memory", f"{three_digits(plan.memory.total / 1e9)} of {three_digits(room / 1e9)} GB on each rank"
    yield "tokens", f"{short(made.num_tokens)}: {training.steps:,} steps of {made.step_tokens:,}{_epochs(made)}"
    days = budget(plan, plans.num_ranks, tokens=made.num_tokens, price=None)["days"]
    yield "time", f"{duration_text(days)}, at {seconds_text(plan.time.total)} s for a step"
    yield "checkpoints", checkpoints_text(plans, plan, every=made.run.checkpoint.every, steps=training.steps)


def _epochs(made: NewRun) -> str:
    """Number of times that each token of the data is read, if the size of the data is known."""
    return f"; each token of the data is read {three_digits(made.epochs)} times" if made.epochs >= 1.5 else ""


def _warning(made: NewRun) -> str:
    """Warning about data that are read too often to teach the model much. Empty for enough data."""
    if made.epochs < MOST_READINGS + 0.5:
        return ""
    model = made.plans.asked.model
    vocabulary = (
        f", and a vocabulary of {model.vocab_size:,} tokens is small for this model"
        if DEMO_TEXT in made.run.data.text and made.num_parameters >= LARGE
        else ""
    )
    return (
        f"Warning: the run reads each token of the data {three_digits(made.epochs)} times; more than {MOST_READINGS} "
        f"times teach a model little{vocabulary}. Name more data with `--data` (or `none`, to name them later), or "
        "fewer tokens with `--tokens`."
    )


def _commands(name: str, made: NewRun) -> Iterator[str]:
    hardware = made.plans.hardware
    device, command = hardware.key if hardware.device == "cuda" else "laptop", typed_command()
    yield f"{command} plan {name} --gpu {device}  # compares all layouts"
    if not (made.run.data.text or made.run.data.tokens):
        yield f"# set data.text or data.tokens in {name}"
    if made.run.data.text:
        yield f"{command} prepare {name}  # makes the tokens, which train does, too"
    if made.plans.num_ranks > hardware.ranks_per_node:
        yield f"torchrun ... -m crosscut train {name} --resume auto  # on every node (docs/cluster.md)"
    else:
        yield f"{command} train {name}"
