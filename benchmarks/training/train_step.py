"""One training step of the same model by Crosscut, transformers, litgpt and a plain program, in turns on this machine.

    make benchmarks                                             # sets up .venv-benchmarks and runs this command, too
    .venv-benchmarks/bin/python benchmarks/training/train_step.py
    .venv-benchmarks/bin/python benchmarks/training/train_step.py --model bert-base
    .venv-benchmarks/bin/python benchmarks/training/train_step.py --model bert-classes

The model is a GPT-2 of 30 million parameters. `bert-base` is BERT-base on masked tokens, in sequences of 512,
compared with transformers. `bert-classes` is BERT-base on labelled texts of 128 tokens, compared with the `Trainer` of
transformers.

Every contender (`benchmarks/contenders/`), eager and compiled, has a process of its own, is built once, and takes steps
in turn, in float32 on random tokens. A round is one step of each contender, so a slow moment of the machine slows all
of them. The first rounds are not counted: in them the compiled contenders compile. Memory is the peak of the whole
process, Python and PyTorch included. Crosscut is also measured with recomputation.

The last line compares layouts: Crosscut over two processes with one thread each against one process with two threads.
"""

import argparse
import json
import multiprocessing as mp
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.contenders.programs import PEERS_OF, is_installed, make_step, require_compiled
from benchmarks.contenders.task import Shape, Way, draw
from benchmarks.machine import describe_machine, print_machine
from benchmarks.turns import CORES, Failure, peak_bytes

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
SHAPES = {
    "gpt2": Shape(),
    "bert-base": Shape(**_BERT, sequence_length=512, batch_size=2),
    "bert-classes": Shape(**_BERT, sequence_length=128, batch_size=8, num_classes=2),
}

TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "sequence_length": 32, "batch_size": 2, "vocab_size": 512}

PACKAGES = ("torch", "transformers", "litgpt")

MEASURE = {"time": "median_seconds", "memory": "peak_bytes"}
GOALS = {("eager", "time"): 0.88, ("compiled", "time"): 1.0, ("eager", "memory"): 0.55, ("compiled", "memory"): 0.55}
"""Highest ratio to the fastest peer (time) or the leanest peer (memory)."""
CUT_GOAL = 0.95
"""Lowest ratio of the speed of two ranks to the speed of one process with both cores."""


def work(name: str, rank: int, port: int, shape: Shape, orders: Connection) -> None:
    """Run one process of a contender: answer each order to step with the seconds, and the last order with peak memory.

    A contender that cannot run answers with a `Failure`.
    """
    try:
        take_part(ENTRIES[name], rank, port, shape, orders)
    except Exception as error:  # of any kind, so that the other contenders go on
        orders.send(Failure(f"{type(error).__name__}: {error}".splitlines()[0]))


def take_part(entry: Entry, rank: int, port: int, shape: Shape, orders: Connection) -> None:
    """Do the work of `work`; errors are raised."""
    if entry.num_ranks > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(entry.num_ranks),
            LOCAL_WORLD_SIZE=str(entry.num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.manual_seed(0)
    overrides = (f"layout.tensor={entry.num_ranks}", f"training.recompute={entry.recompute}")
    way = Way(compiled=entry.compiled, overrides=overrides)
    with ranks_group(entry.program):
        step = make_step(entry.program, shape, way)
        torch.set_num_threads(CORES // entry.num_ranks)
        generator = torch.Generator().manual_seed(1)
        orders.send("ready")
        number = 0
        while orders.recv() == "step":
            batch = draw(shape, generator)
            start = time.perf_counter()
            loss = step(number, [batch])()
            elapsed = time.perf_counter() - start
            if entry.compiled and not number:
                require_compiled()
            orders.send((elapsed, loss))
            number += 1
        orders.send(peak_bytes())


def ranks_group(program: str) -> AbstractContextManager[None]:
    """Process group of Crosscut's ranks. The peers need none."""
    if program != "crosscut":
        return nullcontext()
    import torch

    from crosscut.launch import process_group

    return process_group(torch.device("cpu"))


class Contender:
    """All processes of one contender, controlled from outside."""

    def __init__(self, name: str, shape: Shape, port: int) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.failure = ""
        context = mp.get_context("spawn")
        self.connections = []
        for rank in range(ENTRIES[name].num_ranks):
            here, there = context.Pipe()
            context.Process(target=work, args=(name, rank, port, shape, there), daemon=True).start()
            there.close()  # a process that dies then closes the connection
            self.connections.append(here)
        self._answers()

    def step(self) -> None:
        """Do one step and keep the seconds of the slowest process. A contender that has failed does nothing."""
        results = self._ask("step")
        if results:
            self.seconds.append(max(seconds for seconds, _ in results))
            self.losses.append(results[0][1])

    def finish(self) -> int:
        """End the processes and return the sum of their peak memory, in bytes."""
        return sum(self._ask("stop"))

    def _ask(self, order: str) -> list[Any]:
        if self.failure:
            return []
        for connection in self.connections:
            connection.send(order)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for connection in self.connections:
            try:
                answer = connection.recv()
            except EOFError:
                answer = Failure("its process died")
            if isinstance(answer, Failure):
                self.failure = answer.reason
                return []
            answers.append(answer)
        return answers


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def run(shape: Shape, names: list[str], *, rounds: int, warmup: int) -> dict[str, Any]:
    """Let the contenders step in turns and return the figures of each by name."""
    contenders = [Contender(name, shape, _free_port()) for name in names]
    for _ in range(warmup + rounds):
        for contender in contenders:
            contender.step()
    figures = {}
    for contender in contenders:
        if contender.failure:
            figures[contender.name] = {"failure": contender.failure}
            continue
        timed = contender.seconds[warmup:]
        figures[contender.name] = {
            "median_seconds": statistics.median(timed),
            "min_seconds": min(timed),
            "max_seconds": max(timed),
            "tokens_per_second": shape.batch_size * shape.sequence_length / statistics.median(timed),
            "peak_bytes": contender.finish(),
            "first_loss": contender.losses[0],
        }
    return figures


def report(figures: dict[str, Any]) -> None:
    """Print the table and the ratios that have goals."""
    print(f"{'':22}{'median s':>10}{'min s':>9}{'max s':>9}{'tokens/s':>11}{'peak MiB':>10}")
    for name, f in figures.items():
        if "failure" in f:
            print(f"{name:22}{f['failure']}")
            continue
        print(
            f"{name:22}{f['median_seconds']:>10.3f}{f['min_seconds']:>9.3f}{f['max_seconds']:>9.3f}"
            f"{f['tokens_per_second']:>11,.0f}{f['peak_bytes'] / 2**20:>10,.0f}"
        )
    for line in ratios({name: f for name, f in figures.items() if "failure" not in f}):
        print(line)


def ratios(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the ratios: Crosscut to the best peer that ran, then two ranks to one process."""
    kinds = {"eager": PEERS, "compiled": [f"{peer} compiled" for peer in PEERS]}
    best = {}
    for what, (kind, names) in product(("time", "memory"), kinds.items()):
        if peers := [name for name in names if name in figures]:
            best[kind, what] = min(peers, key=lambda name: figures[name][MEASURE[what]])
    if best:
        yield row("of the best peer", (f"{kind} {what}" for kind, what in best))
        yield row("", (name.removesuffix(" compiled") for name in best.values()))
        yield row("goal", (f"{GOALS[column]:.2f}" for column in best))
    for mine in (name for name in WHOLE if name in figures and best):
        of_best = (figures[mine][MEASURE[what]] / figures[name][MEASURE[what]] for (_, what), name in best.items())
        yield row(mine, (f"{ratio:.2f}" for ratio in of_best))
    if {"crosscut", "crosscut tensor=2"} <= figures.keys():
        ratio = figures["crosscut"]["median_seconds"] / figures["crosscut tensor=2"]["median_seconds"]
        yield f"tensor=2 on two cores: {ratio:.2f} of the speed of one process with two threads (goal {CUT_GOAL})"


def row(name: str, columns: Iterable[str]) -> str:
    """Format a line of the second table."""
    return f"{name:22}" + "".join(f"{column:>17}" for column in columns)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=list(ENTRIES), help="contenders to run; by default all that are installed"
    )
    parser.add_argument("--model", choices=list(SHAPES), default="gpt2", help="model and what it is trained on")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each contender that are counted")
    parser.add_argument("--warmup", type=int, default=2, help="first steps that are not counted")
    parser.add_argument(
        "--tiny", action="store_true", help="use a tiny model, to check in seconds that everything runs"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    shape = replace(SHAPES[options.model], **TINY) if options.tiny else SHAPES[options.model]
    programs = [name for name in ("crosscut", *PEERS_OF[shape.family]) if is_installed(name)]
    names = options.only or [name for name, entry in ENTRIES.items() if entry.program in programs]
    figures = run(shape, names, rounds=options.rounds, warmup=options.warmup)
    if options.json:
        result = {"machine": describe_machine(*PACKAGES), "shape": asdict(shape), "figures": figures}
        print(json.dumps(result, indent=2))
        return
    print_machine(*PACKAGES)
    print(", ".join(f"{k} {v}" for k, v in asdict(shape).items()))
    report(figures)


if __name__ == "__main__":
    sys.exit(main())
