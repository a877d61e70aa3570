"""Timing of several pieces of work on a device, in turns.

If a machine is slow for some seconds, this affects a few turns of every piece, instead of all turns of one piece. The
median over the turns is then not affected. Within a turn, a piece is repeated and the mean is used, because the time of
a step is the sum of its pieces' times.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from statistics import mean, median

import torch

_SECONDS = 0.004
"""Minimum time in seconds for which a turn repeats a piece."""
_MOST = 1000

Times = Callable[[], list[float]]
"""One turn of a piece of work, which returns the seconds of each repeat."""


def in_turns(pieces: Sequence[Times], turns: int) -> list[list[list[float]]]:
    """Measure the pieces in turns. Returns the seconds as `[piece][turn][repeat]`, without a first warm-up turn."""
    taken: list[list[list[float]]] = [[] for _ in pieces]
    for turn in range(turns + 1):
        for piece, so_far in zip(pieces, taken, strict=True):
            seconds = piece()
            if turn:
                so_far.append(seconds)
    return taken


def typical(turns: Iterable[Sequence[float]]) -> float:
    """Median over turns of the mean over each turn's repeats."""
    return median(mean(repeats) for repeats in turns)


def repeated(work: Callable[[], object], device: torch.device) -> Times:
    """A measurement that times `work` alone. Work that is too short to be timed is repeated, and the mean represents
    all repeats.
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
