"""Explain why the paper's measured steps take more seconds than the forecast.

The program of the paper was published together with the paper (NVIDIA/Megatron-LM of 2019, for PyTorch 1.1, see its
issue 7). Each term in this module is work that the paper's program did and that Crosscut does not do, so the forecast
in `planner.time` does not contain the terms. The terms are counted from the published source files. After the terms
are added, the share of the peak that products attain is calibrated again with the paper's result on one GPU.

The source files do not say how fast the copies between the device and pageable host memory were. The account is
therefore computed for several rates, beginning with the stated rate of the link.
"""

from collections.abc import Callable
from typing import NamedTuple

from crosscut.architecture import Product, describe
from crosscut.architecture.readings import attention_products
from crosscut.config import RunConfig
from crosscut.planner.candidate import target_of
from crosscut.planner.compute import flops_per_step
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware
from crosscut.planner.paper.runs import (
    PAPER_FLOPS_PER_SECOND,
    attaining,
    paper_run,
    paper_seconds,
    solve_attained,
)
from crosscut.planner.parameters import parameters_per_rank

V100 = KNOWN_HARDWARE["v100-32gb-dgx2h"]
"""GPU of the paper's machines."""
_MEMORY_RATE = V100.memory_bandwidth * V100.memory_attained

COPY_RATES = (V100.host_bandwidth, 4e9, 2e9)
"""Assumed bytes per second of copies between device and host: the stated rate of the link, and a quarter and an eighth
of this rate. The fractions are round numbers and not fitted to any figure."""

STATE_BYTES = 824_016
"""Bytes of the random generator's state on the device before PyTorch 1.2: 200 states of 4,120 bytes, a seed and an
offset."""

COPIES = 12
"""Number of copies of the random generator's state per layer. Dropout of the scores switches to the rank's own random
stream and back: four copies in the forward pass and four in the recomputed forward pass. Activation checkpointing adds
one copy in the forward pass and three in the recomputed forward pass."""

HOST_WAIT = 20e-6
"""Assumed seconds until the host has read a number from the device and has launched the next kernel."""


class Term(NamedTuple):
    """Work of the paper's program that takes time in every step."""

    name: str
    formula: str
    """Formula for the bytes or the waits, printed in the report. L is the number of layers, E the size of the residual
    stream in bytes, T the number of tensor ranks."""
    seconds: Callable[[RunConfig, float], float]
    """Function that returns the seconds of the term on one rank in one step. The arguments are a run and the rate of
    copies in bytes per second."""


def _copies(run: RunConfig, rate: float) -> float:
    return run.model.num_layers * COPIES * STATE_BYTES / rate


def _waits(run: RunConfig, _: float) -> float:
    return (
        12 * run.model.num_layers + 4
    ) * HOST_WAIT  # one wait per parameter tensor; queries, keys, values share one weight


def _optimizer(run: RunConfig, _: float) -> float:
    # bytes per parameter: gradients cast and summed 2 + 4 + 4, copied 2 + 4, unscaled 4 + 4; weights copied back 4 + 2
    return 30 * parameters_per_rank(run.model, run.layout) / _MEMORY_RATE


def _scaled_scores(run: RunConfig, _: float) -> float:
    # The forward pass, the recomputed forward pass and the backward pass each read and write 2 bytes per element.
    return 6 * 2 * sum(each.elements for each in _attention(run)[::2]) / _MEMORY_RATE


def _heads_apart(run: RunConfig, _: float) -> float:
    # Tensors moved: the forward pass reads and writes queries, keys, values and results (8), and so does recomputation
    # (8). The backward pass reads and writes one gradient and joins the other three (8).
    return 24 * 2 * sum(each.elements for each in _attention(run)[1::2]) / _MEMORY_RATE


def _attention(run: RunConfig) -> list[Product]:
    """Products of attention in all layers: in turn, the scores and the weighted values."""
    target = target_of(run, device="cuda")
    return [each for layer in describe(run.model).layers for each in attention_products(layer, target)]


TERMS = (
    Term("copies of the random state to the host and back", "12 L x 824,016 B / copy rate", _copies),
    Term("waits of the host for the sum of each gradient tensor", "12 L + 4 waits of 20 microseconds", _waits),
    Term("casting, checking and unscaling gradients; casting weights", "30 B per parameter of the rank", _optimizer),
    Term("separate scaling of the attention scores", "6 passes over the scores", _scaled_scores),
    Term("rearranging queries, keys, values and results by head", "24 L E / T", _heads_apart),
)


def account(run: RunConfig, copy_rate: float) -> dict[str, float]:
    """Seconds of each term in one step, keyed by the name of the term, with copies at `copy_rate` bytes per second."""
    return {term.name: term.seconds(run, copy_rate) for term in TERMS}


class Accounted:
    """Step times of the paper's program: the forecast of `planner.time` plus the seconds of all `TERMS`.

    The share of the peak that products attain is solved from the paper's result on one GPU (`PAPER_FLOPS_PER_SECOND`),
    as it is for the forecast without the terms. `copy_rate` is the rate of copies between device and host in bytes per
    second.
    """

    def __init__(self, copy_rate: float) -> None:
        self.copy_rate = copy_rate
        one = paper_run("megatron-1.2b", 1)
        flops = flops_per_step(one, recompute=True)
        self.attained = solve_attained(V100, lambda v100: flops / self._seconds(one, v100), PAPER_FLOPS_PER_SECOND)
        """Share of the V100's peak that its matrix products attain."""
        self._hardware = attaining(V100, self.attained)

    def seconds(self, run: RunConfig) -> float:
        """Seconds of one step of `run`, including all `TERMS`."""
        return self._seconds(run, self._hardware)

    def _seconds(self, run: RunConfig, hardware: Hardware) -> float:
        return paper_seconds(run, hardware) + sum(account(run, self.copy_rate).values())
