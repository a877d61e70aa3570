"""Measure two ranks on this machine: the messages between the ranks and, on a CPU, the rates of the ranks while they
share the CPU.

On a CPU, each of the two ranks uses half of the cores, and both ranks work at the same time, as in training. A training
step waits for the slower rank, so each measurement uses the seconds of the slower rank. The rate of both ranks together
is twice the rate of the slower rank.

Each message follows a matrix product, as in a training step. Each rank measures the time from the end of its own
product to the end of the message. The rank that ends its product first also waits for the other rank, so the
measurement uses the shorter of the two times.
"""

import math
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
from crosscut.parallel import Axis, ParallelMesh, make_mesh
from crosscut.parallel.collectives import all_gather, all_reduce, from_all_ranks, reduce_scatter

RANKS = 2
"""Number of ranks that `crosscut plan --calibrate` starts."""
_SMALL, _LARGE = 16, {"cpu": (1 << 20, 1 << 23), "cuda": (1 << 23, 1 << 27)}
"""Number of float32 elements in a small message, and in two large messages for each kind of device.

One large message has the size of a gradient bucket, 32 MiB; its memory is newly allocated and does not fit in a cache.
The other has the size of an activation: about 4 MiB for models on a CPU, and up to about 512 MiB for models on a GPU.
"""
_MESSAGES = 10
"""Number of messages that one turn of a measurement sends."""
_TURNS = 8
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Number of passes of each operation around a ring of n ranks. A pass has n - 1 steps. In each step, a rank sends one
n-th of the tensor."""


class LinkRate(NamedTuple):
    """Latency and rates of one kind of collective on a link."""

    latency_microseconds: float
    """Latency of one step of a ring."""
    rates: list[tuple[float, float]]
    """Pairs of message size (MB that one rank sends) and rate (GB/s), the smallest message first."""


Links = dict[str, LinkRate]
"""Measured latency and rates of the link, keyed by collective operation."""


def measure_ranks(device: str, sizes: Sizes | None) -> tuple[Rates | None, Links]:
    """Start two ranks, and measure the rates of the device and the link between the ranks.

    The ranks communicate with gloo on a CPU and with NCCL on GPUs. If `sizes` is None, only the link is measured, and
    the returned rates are None.
    """
    ranks = Ranks(layout=Layout(tensor=RANKS), device=device, joins=False)
    seconds, waits = in_ranks(ranks, _seconds, prepare=lambda: sizes)
    rates = rates_of(seconds, torch.device(device), sizes) if sizes else None
    return rates and together(rates, RANKS), links(waits, _LARGE[device], RANKS)


def measure_on(mesh: ParallelMesh, sizes: Sizes, large: Sequence[int]) -> tuple[Rates, Links | None]:
    """Measure the rates of a CPU with the ranks of a mesh, which have already started and all work at the same time.
    Also measure the link between tensor ranks. `large` has the sizes of its large messages, in float32 elements. The
    returned links are None if there is only one tensor rank. Every rank must call this function, and all ranks get the
    same figures.
    """
    axis = mesh.tensor
    messages = _messages(axis, mesh.device, large) if axis.size > 1 else []
    seconds, waits = _slower_and_later(pieces(mesh.device, sizes), messages, sizes.turns, mesh)
    rates = together(rates_of(seconds, mesh.device, sizes), math.prod(axis.size for axis in mesh.axes))
    return rates, links(waits, large, axis.size) if messages else None


def _seconds(sizes: Sizes | None, device: torch.device) -> tuple[list[float], list[float]]:
    """Return the seconds of each piece of work on the slower rank, and the seconds of each message on the rank that
    starts to send last.
    """
    mesh = make_mesh(Layout(tensor=RANKS), device)
    work = pieces(device, sizes) if sizes else []
    messages = _messages(mesh.tensor, device, _LARGE[device.type])
    return _slower_and_later(work, messages, sizes.turns if sizes else _TURNS, mesh)


def _slower_and_later(
    work: Sequence[Times], messages: Sequence[Times], num_turns: int, mesh: ParallelMesh
) -> tuple[list[float], list[float]]:
    """Run all pieces of work, and send all messages, in turns. Return the seconds of each piece of work on the slowest
    rank, and the seconds of each message on the rank that starts to send last.
    """
    turns = in_turns([*work, *messages], num_turns)
    ranks = list(zip(*from_all_ranks(turns, mesh), strict=True))
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


def together(each: Rates, num_ranks: int) -> Rates:
    """Return the total rates of `num_ranks` ranks that work at the same time: `num_ranks` times the rates in `each`,
    which are those of the slowest rank.
    """
    measured = {
        precision: [(m, k, n, num_ranks * rate) for m, k, n, rate in points]
        for precision, points in each.measured.items()
    }
    more = {name: num_ranks * getattr(each, name) for name in ("attention", "memory", "gelu")}
    return each._replace(measured=measured, **more)


def links(seconds: Sequence[float], large: Sequence[int], num_ranks: int) -> Links:
    """Compute latency and rates of the link for each collective operation.

    For each operation in the order of `_PASSES`, `seconds` holds the time of a small message, followed by the times of
    the large messages. `large` holds the number of float32 elements of each large message.
    """
    found: Links = {}
    sizes = 1 + len(large)
    for index, (operation, passes) in enumerate(_PASSES.items()):
        small_one, *large_ones = seconds[index * sizes : (index + 1) * sizes]
        rates = []
        for elements, large_one in zip(large, large_ones, strict=True):
            sent = passes * (num_ranks - 1) * elements * 4 / num_ranks
            rates.append((sent / 1e6, sent / max(large_one - small_one, large_one / 10) / 1e9))
        found[operation] = LinkRate(small_one / passes / (num_ranks - 1) * 1e6, rates)
    return found


def _messages(axis: Axis, device: torch.device, large: Sequence[int]) -> list[Times]:
    """Return functions that send and time the messages of each operation: one small message, and the large messages.
    `large` holds the number of elements of each large message.
    """
    a, b = torch.randn(1024, 256, device=device), torch.randn(256, 1024, device=device)
    send = {
        "all_reduce": lambda x: all_reduce(x, axis),
        "all_gather": lambda x: all_gather(x.chunk(axis.size)[0], axis, 0),
        "reduce_scatter": lambda x: reduce_scatter(x, axis, 0),
    }
    sizes = [torch.ones(size, device=device) for size in (_SMALL, *large)]
    return [
        partial(_sent_after_work, partial(send[op], x), partial(torch.mm, a, b), device)
        for op in _PASSES
        for x in sizes
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
