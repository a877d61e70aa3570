"""The time of pieces of work on a device, measured in turns.

A machine that slows down for some seconds slows down a few turns of every piece, not all turns of one: the median over
the turns does not see it. Within a turn a piece is repeated and the mean counts, since a step takes the sum of what its
pieces take.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from statistics import mean, median

import torch

_SECONDS = 0.004
"""Least time for which a turn repeats a piece."""
_MOST = 1000

Times = Callable[[], list[float]]
"""One turn of a piece of work: the seconds of each repeat."""


def in_turns(pieces: Sequence[Times], turns: int) -> list[list[list[float]]]:
    """The seconds of every repeat of every turn of each piece, `[piece][turn][repeat]`; a first turn is not counted."""
    taken: list[list[list[float]]] = [[] for _ in pieces]
    for turn in range(turns + 1):
        for piece, so_far in zip(pieces, taken, strict=True):
            seconds = piece()
            if turn:
                so_far.append(seconds)
    return taken


def typical(turns: Iterable[Sequence[float]]) -> float:
    """The median over turns of the mean over a turn's repeats."""
    return median(mean(repeats) for repeats in turns)


def repeated(work: Callable[[], object], device: torch.device) -> Times:
    """`work` by itself; what is too short to be timed once is repeated, and the mean stands for all repeats."""

    def turn() -> list[float]:
        once = _seconds(work, 1, device)
        repeats = min(_MOST, ceil(_SECONDS / max(once, 1e-9)))
        return [once if repeats == 1 else _seconds(work, repeats, device) / repeats]

    return turn


def _seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait_for(device)
    return time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
