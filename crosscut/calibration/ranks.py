"""Measure two ranks on this machine: the messages between the ranks and, on a CPU, the rates of the ranks while they
share the CPU.

On a CPU, each of the two ranks uses half of the cores, and both ranks work at the same time, as in training. A training
step waits for the slower rank, so each measurement uses the seconds of the slower rank. The rate of both ranks together
is twice the rate of the slower rank.

Each message follows a matrix product, as in a training step. Each rank times the message from the end of its own
product. The rank that ends its product first also waits for the other rank, so the measurement uses the shorter of the
two times.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from crosscut.calibration.device import Rates, Sizes, pieces, rates_of
from crosscut.calibration.timing import Times, in_turns, typical, wait_for
from crosscut.config import Layout
from crosscut.launch import Ranks, in_ranks
from crosscut.parallel import ParallelMesh, make_mesh
from crosscut.parallel.collectives import all_gather, all_gather_objects, all_reduce, reduce_scatter

RANKS = 2
_SMALL, _LARGE = 16, {"cpu": (1 << 20, 1 << 23), "cuda": (1 << 23, 1 << 27)}
"""Number of float32 elements in a small message, and in two large messages per device.

One large message has the size of a gradient bucket, 32 MiB; its memory is newly allocated and does not fit in a cache.
The other has the size of an activation: about 4 MiB for models on a CPU, and up to about 512 MiB for models on a GPU.
"""
_MESSAGES = 10
"""Number of messages that one turn of a measurement sends."""
_TURNS = 8
_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Number of ring steps of each operation with two ranks. In each step, a rank sends half of the tensor."""


class LinkRate(NamedTuple):
    """Latency and rates of one kind of collective on a link."""

    latency_microseconds: float
    """Latency of one step of a ring."""
    rates: list[tuple[float, float]]
    """Pairs of message size (MB that one rank sends) and rate (GB/s), the smallest message first."""


Links = dict[str, LinkRate]
"""Measured latency and rates of the link, by collective operation."""


def measure_ranks(device: str, sizes: Sizes | None) -> tuple[Rates | None, Links]:
    """Start two ranks, and measure the rates of the device and the link between the ranks.

    The ranks communicate with gloo on a CPU and with NCCL on GPUs. If `sizes` is None, only the link is measured, and
    the returned rates are None.
    """
    ranks = Ranks(layout=Layout(tensor=RANKS), device=device, joins=False)
    seconds, waits = in_ranks(ranks, _seconds, prepare=lambda: sizes)
    rates = rates_of(seconds, torch.device(device), sizes) if sizes else None
    return rates and together(rates), links(waits, _LARGE[device])


def _seconds(sizes: Sizes | None, device: torch.device) -> tuple[list[float], list[float]]:
    """Return the seconds of each piece of work on the slower rank, and the seconds of each message on the rank that
    starts to send last.
    """
    mesh = make_mesh(Layout(tensor=RANKS), device)
    work = pieces(device, sizes) if sizes else []
    turns = in_turns([*work, *_messages(mesh)], sizes.turns if sizes else _TURNS)
    ranks = list(zip(*all_gather_objects(turns, mesh.tensor), strict=True))
    slower = [typical(joined(ranks_turns, max)) for ranks_turns in ranks[: len(work)]]
    later = [typical(joined(ranks_turns, min)) for ranks_turns in ranks[len(work) :]]
    return slower, later


def joined(ranks: Sequence[list[list[float]]], choose: Callable[[Iterable[float]], float]) -> list[list[float]]:
    """Combine the seconds that all ranks measured for one piece of work, [rank][turn][repeat], into one list,
    [turn][repeat].

    A measurement runs several turns, and each turn repeats the work. For each repeat, the function `choose` (such as
    `max`) selects the seconds of one rank.
    """
    return [[choose(repeat) for repeat in zip(*turn, strict=True)] for turn in zip(*ranks, strict=True)]


def together(each: Rates) -> Rates:
    """Return the total rates of all ranks, which work at the same time.

    The argument `each` has the rates of a single rank, measured on the slower rank. The total rates are the rates of
    this rank times the number of ranks.
    """
    measured = {
        precision: [(m, k, n, RANKS * rate) for m, k, n, rate in points] for precision, points in each.measured.items()
    }
    more = {name: RANKS * getattr(each, name) for name in ("attention", "memory", "gelu")}
    return each._replace(measured=measured, **more)


def links(seconds: Sequence[float], large: Sequence[int]) -> Links:
    """Compute latency and rates of the link for each collective operation.

    For each operation in the order of `_STEPS`, `seconds` holds the time of a small message, followed by the times of
    the large messages. `large` holds the number of float32 elements of each large message.
    """
    found: Links = {}
    sizes = 1 + len(large)
    for index, (operation, steps) in enumerate(_STEPS.items()):
        small_one, *large_ones = seconds[index * sizes : (index + 1) * sizes]
        rates = []
        for elements, large_one in zip(large, large_ones, strict=True):
            sent = steps * elements * 4 / RANKS
            rates.append((sent / 1e6, sent / max(large_one - small_one, large_one / 10) / 1e9))
        found[operation] = LinkRate(small_one / steps * 1e6, rates)
    return found


def _messages(mesh: ParallelMesh) -> list[Times]:
    """Return functions that send and time the messages of each operation: a small message and the large messages."""
    device = mesh.device
    a, b = torch.randn(1024, 256, device=device), torch.randn(256, 1024, device=device)
    send = {
        "all_reduce": lambda x: all_reduce(x, mesh.tensor),
        "all_gather": lambda x: all_gather(x.chunk(RANKS)[0], mesh.tensor, 0),
        "reduce_scatter": lambda x: reduce_scatter(x, mesh.tensor, 0),
    }
    sizes = [torch.ones(size, device=device) for size in (_SMALL, *_LARGE[device.type])]
    return [
        partial(_sent_after_work, partial(send[op], x), partial(torch.mm, a, b), device) for op in _STEPS for x in sizes
    ]


def _sent_after_work(send: Callable[[], Tensor], work: Callable[[], Tensor], device: torch.device) -> list[float]:
    """Return the seconds of each message, counted from the end of this rank's work."""
    seconds = []
    for _ in range(_MESSAGES):
        work()
        wait_for(device)
        start = time.perf_counter()
        send()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return seconds
