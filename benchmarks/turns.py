"""Contenders that are processes and work in turns, so that a slow moment of the machine slows all of them alike."""

import multiprocessing as mp
import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, TypeVar

from benchmarks.commands import aligned

_T = TypeVar("_T")

CORES = 2
"""Threads of a contender, over all its processes."""

Prepare = Callable[..., AbstractContextManager[Callable[[Any], Any]]]
"""Function that builds a contender in its process: a context whose value is the function from orders to answers."""


@dataclass(frozen=True)
class Failure:
    """Answer of a process that cannot run: the reason."""

    reason: str
    out_of_memory: bool = False


class Contender:
    """All processes of one contender, controlled from outside."""

    def __init__(self, prepare: Prepare, *processes: tuple[Any, ...]) -> None:
        """Start a process for each of the tuples of arguments of `prepare`."""
        self.failure = ""
        context = mp.get_context("spawn")
        self._connections: list[Connection] = []
        for arguments in processes:
            here, there = context.Pipe()
            context.Process(target=_work, args=(prepare, arguments, there), daemon=True).start()
            there.close()  # a process that dies then closes the connection
            self._connections.append(here)
        self._answers()

    def ask(self, order: Any) -> list[Any]:
        """Answers of all processes to an order; empty for a contender that has failed."""
        if self.failure:
            return []
        for connection in self._connections:
            connection.send(order)
        return self._answers()

    def finish(self) -> int:
        """End the processes and return the sum of their peak memory, in bytes."""
        return sum(self.ask(None))

    def _answers(self) -> list[Any]:
        answers = []
        for connection in self._connections:
            try:
                answer = connection.recv()
            except EOFError:
                answer = Failure("its process died")
            if isinstance(answer, Failure):
                self.failure = answer.reason
                return []
            answers.append(answer)
        return answers


def take_turns(contenders: Mapping[str, Contender], orders: Iterable[Any]) -> dict[str, list[list[Any]]]:
    """Let all contenders answer each order, one after another. Returns the answers by the contender's name."""
    turns: dict[str, list[list[Any]]] = {name: [] for name in contenders}
    for order in orders:
        for name, contender in contenders.items():
            if answers := contender.ask(order):
                turns[name].append(answers)
    return turns


def figures_of(contender: Contender, seconds: Sequence[float], num_tokens: int, **more: Any) -> dict[str, Any]:
    """Speed and memory of a contender that reads `num_tokens` in each turn, or the reason why it has none."""
    if contender.failure:
        return {"failure": contender.failure}
    return {
        "median_seconds": median(seconds),
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
        "tokens_per_second": num_tokens / median(seconds),
        "peak_bytes": contender.finish(),
        **more,
    }


def table_of(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Table of the figures of all contenders."""
    rows: list[list[str]] = [["", "median s", "min s", "max s", "tokens/s", "peak MiB"]]
    for name, found in figures.items():
        if "failure" in found:
            rows.append([name, found["failure"]])
            continue
        seconds = (f"{found[f'{kind}_seconds']:.3f}" for kind in ("median", "min", "max"))
        rows.append([name, *seconds, f"{found['tokens_per_second']:,.0f}", f"{found['peak_bytes'] / 2**20:,.0f}"])
    return aligned(rows)


def alternate(contenders: Mapping[str, Callable[[], _T]], turns: int) -> dict[str, list[_T]]:
    """Results of all contenders by name. Each turn starts with another contender, so none always runs first."""
    found: dict[str, list[_T]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(turns):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            found[name].append(contenders[name]())
    return found


def _work(prepare: Prepare, arguments: tuple[Any, ...], orders: Connection) -> None:
    """Answer each order, and the last order, None, with the peak memory."""
    try:
        with prepare(*arguments) as answer:
            orders.send("ready")
            while (order := orders.recv()) is not None:
                orders.send(answer(order))
            orders.send(peak_bytes())
    except Exception as error:  # of any kind, so that the other contenders go on
        orders.send(Failure(f"{type(error).__name__}: {error}".splitlines()[0]))


def peak_bytes() -> int:
    """Peak of this process's resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
