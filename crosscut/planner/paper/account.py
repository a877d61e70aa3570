"""Account of the seconds that the paper's program spent in a step and its forecast lacks.

The program was published with the paper (NVIDIA/Megatron-LM of 2019), for PyTorch 1.1 (its issue 7), and its files say
what it did; each term here is counted from them. It stands apart from `time`: Crosscut's program does none of this.
With the terms counted, the products' share of the peak is solved anew from the paper's one GPU, and nothing else.

One figure is in no file: how fast copies between the device and the host's pageable memory were. The account is told
for several rates, the link's stated one first.
"""

from collections.abc import Callable
from typing import NamedTuple

from crosscut.config import RunConfig
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
"""The paper's device."""
_MEMORY_RATE = V100.memory_bandwidth * V100.memory_attained

COPY_RATES = (V100.host_bandwidth, 4e9, 2e9)
"""Bytes per second of copies between device and host: the link's stated rate, a quarter and an eighth of it, which are
round numbers and solved from nothing."""

STATE_BYTES = 824_016
"""Bytes of the random generator's state on the device before PyTorch 1.2: 200 states of 4,120 bytes, a seed and an
offset."""

COPIES = 12
"""Copies of the random generator's state in a layer: four where dropout of the scores takes the tensor ranks' own
stream and gives it back, in the forward pass and in its repetition; one where the layer's forward pass is checkpointed,
three where the forward pass is repeated."""

HOST_WAIT = 20e-6
"""Seconds until a number is on the host and the next kernel on the device; assumed."""


class Term(NamedTuple):
    """Something that takes time in every step."""

    name: str
    formula: str
    """In bytes or waits; L layers, E the residual stream in bytes, T tensor ranks."""
    seconds: Callable[[RunConfig, float], float]
    """Seconds of one step of a run on one rank, from the run and the rate of copies in bytes per second."""


def _copies(run: RunConfig, rate: float) -> float:
    return run.model.num_layers * COPIES * STATE_BYTES / rate


def _waits(run: RunConfig, _: float) -> float:
    return (12 * run.model.num_layers + 4) * HOST_WAIT  # its tensors: queries, keys and values are one weight


def _optimizer(run: RunConfig, _: float) -> float:
    # gradients cast and summed 2 + 4 + 4 bytes, copied 2 + 4, unscaled 4 + 4; weights copied back 4 + 2
    return 30 * parameters_per_rank(run.model, run.layout) / _MEMORY_RATE


def _scaled_scores(run: RunConfig, _: float) -> float:
    # read and written forward, again, and backward, in 2 bytes
    heads = run.model.num_heads // run.layout.tensor
    scores = run.micro_batch_size * heads * run.training.sequence_length**2
    return run.model.num_layers * 6 * 2 * scores / _MEMORY_RATE


def _heads_apart(run: RunConfig, _: float) -> float:
    # forward and again the four are read and written; backward one is, and three are put together: 8 + 8 + 8 times
    tokens = run.micro_batch_size * run.training.sequence_length
    return run.model.num_layers * 24 * 2 * tokens * run.model.query_size / run.layout.tensor / _MEMORY_RATE


TERMS = (
    Term("random states to the host and back, the device waiting", "12 L x 824,016 B / copy rate", _copies),
    Term("a sum of each gradient tensor, read by the host", "12 L + 4 waits of 20 microseconds", _waits),
    Term("gradients to float32, tested, unscaled; weights to float16", "30 B a parameter of the rank", _optimizer),
    Term("scores divided by a root in a pass of its own", "6 passes over the scores", _scaled_scores),
    Term("queries, keys, values and results laid out by head", "24 L E / T", _heads_apart),
)


def account(run: RunConfig, copy_rate: float) -> dict[str, float]:
    """Seconds of a step by term."""
    return {term.name: term.seconds(run, copy_rate) for term in TERMS}


class Accounted:
    """Step times of the paper's program with every term, calibrated by the same figure as without."""

    def __init__(self, copy_rate: float) -> None:
        self.copy_rate = copy_rate
        one = paper_run("megatron-1.2b", 1)
        flops = flops_per_step(one, recompute=True)
        self.attained = solve_attained(V100, lambda v100: flops / self._seconds(one, v100), PAPER_FLOPS_PER_SECOND)
        """Share of the V100's peak that its matrix products attain."""
        self._hardware = attaining(V100, self.attained)

    def seconds(self, run: RunConfig) -> float:
        """Seconds of one step with every term."""
        return self._seconds(run, self._hardware)

    def _seconds(self, run: RunConfig, hardware: Hardware) -> float:
        return paper_seconds(run, hardware) + sum(account(run, self.copy_rate).values())
