"""One training step of the same model by Crosscut, transformers, litgpt and a plain program, in turns on this machine.

    make benchmarks                                             # sets up .venv-benchmarks and runs this command, too
    .venv-benchmarks/bin/python benchmarks/training/train_step.py
    .venv-benchmarks/bin/python benchmarks/training/train_step.py --model bert-base
    .venv-benchmarks/bin/python benchmarks/training/train_step.py --model bert-classes
    .venv-benchmarks/bin/python benchmarks/training/train_step.py --model mamba2-4096
    .venv-benchmarks/bin/python benchmarks/training/train_step.py --model mixture

The model is a GPT-2 of 30 million parameters. `bert-base` is BERT-base on masked tokens, in sequences of 512,
compared with transformers. `bert-classes` is BERT-base on labelled texts of 128 tokens, compared with the `Trainer` of
transformers. `mamba2-1024`, `mixtral-1024` and `qwen3-moe-1024` are one Mamba-2 mixer, one mixture of 8 experts and one
of 32, of hidden size 512, on one text of so many tokens: forward and backward pass. `mixture` is a small Mixtral. These
are eager, with one thread.

Every contender (`benchmarks/contenders/`), eager and compiled, has a process of its own, is built once, and takes steps
in turn, in float32 on random tokens. A round is one step of each contender, so a slow moment of the machine slows all
of them. The first rounds are not counted: in them the compiled contenders compile. Memory is the peak of the whole
process, Python and PyTorch included; for a sublayer, it is what the peak adds to the memory before the first step.
With one thread, the processor time of a step is told, too, since it depends less on other work of the machine.
Crosscut is also measured with recomputation.

The last line compares layouts: Crosscut over two processes with one thread each against one process with two threads.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import TINY_HELP, aligned, command_line, print_figures
from benchmarks.contenders.programs import PEERS_OF, is_installed, make_step, require_compiled
from benchmarks.contenders.task import Shape, Way, draw
from benchmarks.machine import one_line
from benchmarks.processes import free_port, join_ranks, memory_of, reset_peak
from benchmarks.turns import CORES, Contender, figures_of, table_of, take_turns

PEERS = PEERS_OF["GPT-2"]
"""All peers. A model is compared with the peers that train this model."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender: a program and its settings."""

    program: str
    compiled: bool = False
    num_ranks: int = 1
    recompute: str = "none"
    """Value of Crosscut's `training.recompute`."""


ENTRIES: dict[str, Entry] = {
    "crosscut": Entry(program="crosscut"),
    "crosscut compiled": Entry(program="crosscut", compiled=True),
    "crosscut tensor=2": Entry(program="crosscut", num_ranks=2),
    **{f"crosscut {mode}": Entry(program="crosscut", recompute=mode) for mode in ("operators", "full")},
    **{peer: Entry(program=peer) for peer in PEERS},
    **{f"{peer} compiled": Entry(program=peer, compiled=True) for peer in PEERS},
}

WHOLE = tuple(name for name, entry in ENTRIES.items() if entry.program == "crosscut" and entry.num_ranks == 1)
"""Contenders that are Crosscut in one process. These are compared with the peers."""

_BERT: dict[str, Any] = {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": 30_522, "family": "BERT"}
_SUBLAYERS: dict[str, Any] = {
    "mamba2": {"family": "Mamba-2"},
    "mixtral": {"family": "Mixtral", "num_experts": 8, "experts_per_token": 2, "expert_size": 1024},
    "qwen3-moe": {"family": "Qwen3-MoE", "num_experts": 32, "experts_per_token": 4, "expert_size": 256},
}
SHAPES = {
    "gpt2": Shape(),
    "bert-base": Shape(**_BERT, sequence_length=512, batch_size=2),
    "bert-classes": Shape(**_BERT, sequence_length=128, batch_size=8, num_classes=2),
    **{
        f"{name}-{length}": Shape(
            num_layers=1, hidden_size=512, num_heads=8, sequence_length=length, batch_size=1, vocab_size=8,
            is_sublayer=True, **sizes,
        )
        for length in (1024, 4096)
        for name, sizes in _SUBLAYERS.items()
    },
    "mixture": Shape(
        num_layers=4, hidden_size=256, num_heads=4, sequence_length=256, batch_size=8, vocab_size=8_192,
        family="Mixtral", num_experts=8, experts_per_token=2, expert_size=512,
    ),
}  # fmt: skip

TINY_SHAPE = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "sequence_length": 32, "batch_size": 2,
              "vocab_size": 512}  # fmt: skip

PACKAGES = ("torch", "transformers", "litgpt")

MEASURE = {"time": "median_seconds", "processor time": "processor_seconds", "memory": "peak_bytes"}
GOALS = {("eager", "time"): 0.88, ("compiled", "time"): 1.0, ("eager", "memory"): 0.55, ("compiled", "memory"): 0.55}
"""Highest ratio to the fastest peer (time) or the leanest peer (memory)."""
_EXPERTS = {("eager", "time"): 1.0, ("eager", "processor time"): 1.0, ("eager", "memory"): 0.85}
GOALS_OF_ONE_THREAD = {
    "Mamba-2": {("eager", "time"): 0.75, ("eager", "processor time"): 0.75, ("eager", "memory"): 0.6},
    "Mixtral": _EXPERTS,
    "Qwen3-MoE": _EXPERTS,
    "mixture": {("eager", "time"): 0.9, ("eager", "processor time"): 0.9},
}
"""Highest ratios of what runs with one thread: a sublayer, by its family, and a whole model, by its name."""
CUT_GOAL = 0.95
"""Lowest ratio of the speed of two ranks to the speed of one process with both cores."""


class Turn(NamedTuple):
    """Figures of one step in one process."""

    seconds: float
    processor_seconds: float
    """Processor time of all threads."""
    loss: float
    idle_bytes: int
    """Memory of the process before the first step, if one sublayer is measured, and otherwise 0."""


def has_one_thread(shape: Shape) -> bool:
    """Whether the contenders run eager and with one thread: a sublayer, or a model with experts."""
    return shape.is_sublayer or shape.num_experts > 0


@contextmanager
def take_part(entry: Entry, rank: int, port: int, shape: Shape) -> Iterator[Callable[[int], "Turn"]]:
    """One process of a contender. It answers the number of a step with the figures of the step."""
    if entry.num_ranks > 1:
        os.environ.update(join_ranks(rank, entry.num_ranks, port))
    import torch

    torch.manual_seed(0)
    overrides = (f"layout.tensor={entry.num_ranks}", f"training.recompute={entry.recompute}")
    way = Way(compiled=entry.compiled, overrides=overrides)
    with ranks_group(entry.program):
        step = make_step(entry.program, shape, way)
        torch.set_num_threads(1 if has_one_thread(shape) else CORES // entry.num_ranks)
        generator = torch.Generator().manual_seed(1)
        if shape.is_sublayer:
            reset_peak("self")
        idle = memory_of("self", "VmRSS") if shape.is_sublayer else 0

        def answer(number: int) -> Turn:
            batch = draw(shape, generator)
            start, used = time.perf_counter(), time.process_time()
            loss = step(number, [batch])()
            elapsed, used = time.perf_counter() - start, time.process_time() - used
            if entry.compiled and not number:
                require_compiled()
            return Turn(elapsed, used, loss, idle)

        yield answer


def ranks_group(program: str) -> AbstractContextManager[None]:
    """Process group of Crosscut's ranks. The peers need none."""
    if program != "crosscut":
        return nullcontext()
    import torch

    from crosscut.launch import process_group

    return process_group(torch.device("cpu"))


def run(shape: Shape, names: list[str], *, rounds: int, warmup: int) -> dict[str, Any]:
    """Let the contenders step in turns and return the figures of each by name."""
    contenders = {}
    for name in names:
        entry, port = ENTRIES[name], free_port()
        processes = [(entry, rank, port, shape) for rank in range(entry.num_ranks)]
        contenders[name] = Contender(take_part, *processes)
    turns = take_turns(contenders, range(warmup + rounds))
    figures = {}
    for name, contender in contenders.items():
        counted: list[list[Turn]] = turns[name][warmup:]
        timed = [max(turn.seconds for turn in step) for step in counted]
        first = turns[name][0][0] if turns[name] else Turn(0.0, 0.0, 0.0, 0)
        found = figures_of(contender, timed, shape.batch_size * shape.sequence_length, first_loss=first.loss)
        if "failure" not in found:
            found["processor_seconds"] = median(sum(turn.processor_seconds for turn in step) for step in counted)
            found["peak_bytes"] -= first.idle_bytes
        figures[name] = found
    return figures


def report(figures: dict[str, Any], goals: dict[tuple[str, str], float]) -> None:
    """Print the table and the ratios that have goals."""
    print(table_of(figures))
    ran = {name: f for name, f in figures.items() if "failure" not in f}
    if table := ratios(ran, goals):
        print(aligned(table))
    if {"crosscut", "crosscut tensor=2"} <= ran.keys():
        ratio = ran["crosscut"]["median_seconds"] / ran["crosscut tensor=2"]["median_seconds"]
        print(f"tensor=2 on two cores: {ratio:.2f} of the speed of one process with two threads (goal {CUT_GOAL})")


def ratios(figures: dict[str, Any], goals: dict[tuple[str, str], float]) -> list[list[str]]:
    """Table of the ratios of Crosscut to the best peer that ran; empty if none ran."""
    kinds = {"eager": PEERS, "compiled": [f"{peer} compiled" for peer in PEERS]}
    best = {}
    for kind, what in goals:
        if peers := [name for name in kinds[kind] if name in figures]:
            best[kind, what] = min(peers, key=lambda name: figures[name][MEASURE[what]])
    if not best:
        return []
    table = [
        ["of the best peer", *(f"{kind} {what}" for kind, what in best)],
        ["", *(name.removesuffix(" compiled") for name in best.values())],
        ["goal", *(f"{goals[column]:.2f}" for column in best)],
    ]
    for mine in (name for name in WHOLE if name in figures):
        of_best = (figures[mine][MEASURE[what]] / figures[name][MEASURE[what]] for (_, what), name in best.items())
        table.append([mine, *(f"{ratio:.2f}" for ratio in of_best)])
    return table


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__, tiny=TINY_HELP, figures="print")
    parser.add_argument(
        "--only", nargs="+", choices=list(ENTRIES), help="contenders to run; by default all that are installed"
    )
    parser.add_argument("--model", choices=list(SHAPES), default="gpt2", help="model and what it is trained on")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each contender that are counted")
    parser.add_argument("--warmup", type=int, default=2, help="first steps that are not counted")
    options = parser.parse_args(arguments)
    shape = replace(SHAPES[options.model], **TINY_SHAPE) if options.tiny else SHAPES[options.model]
    programs = [name for name in ("crosscut", *PEERS_OF[shape.family]) if is_installed(name)]
    names = (
        programs if has_one_thread(shape) else [name for name, entry in ENTRIES.items() if entry.program in programs]
    )
    names = options.only or names
    figures = run(shape, names, rounds=options.rounds, warmup=options.warmup)
    if not print_figures(options, PACKAGES, {"shape": asdict(shape), "figures": figures}):
        print(one_line(asdict(shape)))
        name = shape.family if shape.is_sublayer else options.model
        report(figures, GOALS_OF_ONE_THREAD.get(name, GOALS))


if __name__ == "__main__":
    sys.exit(main())
