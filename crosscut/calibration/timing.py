"""Time several pieces of work on a device in turns. Each turn runs every piece once.

If the machine is slow for some seconds, the delay affects a few turns of every piece, instead of all turns of one
piece. The median over the turns then ignores the delay. The time of a piece in one turn is the mean over the repeats of
the piece, because the time of a training step is a sum over many pieces.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from statistics import mean, median

import torch

_SECONDS = 0.004
"""Minimum seconds for which a turn repeats a piece of work."""
_MOST = 1000

Times = Callable[[], list[float]]
"""Function that runs one turn of a piece of work and returns the seconds of each repeat."""


def in_turns(pieces: Sequence[Times], turns: int) -> list[list[list[float]]]:
    """Measure the pieces in turns. Return the seconds as `[piece][turn][repeat]`.

    One additional warm-up turn comes first and is not returned.
    """
    taken: list[list[list[float]]] = [[] for _ in pieces]
    for turn in range(turns + 1):
        for piece, so_far in zip(pieces, taken, strict=True):
            seconds = piece()
            if turn:
                so_far.append(seconds)
    return taken


def typical(turns: Iterable[Sequence[float]]) -> float:
    """Return the typical seconds of a piece of work: the mean over the repeats of each turn, then the median over the
    turns.
    """
    return median(mean(repeats) for repeats in turns)


def repeated(work: Callable[[], object], device: torch.device) -> Times:
    """Return a function that runs and times one turn of `work`.

    If one call of `work` is too short to time, a turn repeats the call. In any case, the function returns a list with
    one value: the seconds per call.
    """

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
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
