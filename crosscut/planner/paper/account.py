"""Work of the paper's program that Crosscut does not do, and that `planner.time` therefore does not forecast.

The program of the paper was published together with the paper (NVIDIA/Megatron-LM of 2019, for PyTorch 1.1, see its
issue 7). The terms are counted from the published source files. The rates of its copies between the device and pageable
host memory were measured elsewhere in the summer of 2019, and no term is fitted to a figure of the paper.
"""

from collections.abc import Callable
from typing import NamedTuple

from crosscut.architecture import Product, describe
from crosscut.architecture.readings import attention_products
from crosscut.config import RunConfig
from crosscut.planner.candidate import target_of
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.parameters import parameters_per_rank

V100 = KNOWN_HARDWARE["v100-32gb-dgx2h"]
"""GPU of the paper's machines."""
_MEMORY_RATE = V100.memory_bandwidth * V100.memory_attained


class CopyRates(NamedTuple):
    """Bytes per second of copies between the device and pageable memory of the host."""

    to_host: float
    to_device: float


MEASURED = CopyRates(to_host=2**30 / 0.5479, to_device=5.5e9)
"""Rates that the developers of RAPIDS measured in August 2019 (github.com/rapidsai/dask-cuda/pull/98): one GiB from a
GV100 to newly allocated host memory in 0.5479 s, and 5 to 6 GB/s without pinned memory otherwise. Each `get_rng_state`
of PyTorch 1.1 allocates its result."""

STATE_BYTES = 824_016
"""Bytes of the random generator's state on the device before PyTorch 1.2: 200 states of 4,120 bytes, a seed and an
offset."""

COPIES = 12
"""Number of copies of the random generator's state per layer, half of them to the host. Dropout of the scores switches
to the rank's own random stream and back: four copies in the forward pass and four in the recomputed forward pass.
Activation checkpointing adds one copy in the forward pass and three in the recomputed forward pass."""

HOST_WAIT = 20e-6
"""Assumed seconds until the host has read a number from the device and has launched the next kernel."""


class Term(NamedTuple):
    """Work of the paper's program that takes time in every step."""

    name: str
    formula: str
    """Formula for the bytes or the waits, printed in the report. L is the number of layers, E the size of the residual
    stream in bytes, T the number of tensor ranks."""
    seconds: Callable[[RunConfig], float]
    """Function that returns the seconds of the term on one rank in one step."""


def copy_seconds(run: RunConfig, rates: CopyRates = MEASURED) -> float:
    """Seconds of a step in which the random generator's state is copied at these rates."""
    return run.model.num_layers * COPIES / 2 * STATE_BYTES * sum(1 / rate for rate in rates)


def _waits(run: RunConfig) -> float:
    # Each copy waits. So does each parameter tensor, of which a layer has 12 (queries, keys and values share one
    # weight) and the rest 4: once for the check of overflow and once for the norm.
    layers = run.model.num_layers
    return (COPIES * layers + 2 * (12 * layers + 4)) * HOST_WAIT


def _optimizer(run: RunConfig) -> float:
    # bytes per parameter: gradients cast and summed 2 + 4 + 4, copied 2 + 4, unscaled 4 + 4; weights copied back 4 + 2
    return 30 * parameters_per_rank(run.model, run.layout) / _MEMORY_RATE


def _scaled_scores(run: RunConfig) -> float:
    # The forward pass, the recomputed forward pass and the backward pass each read and write 2 bytes per element.
    return 6 * 2 * sum(each.elements for each in _attention(run)[::2]) / _MEMORY_RATE


def _heads_apart(run: RunConfig) -> float:
    # Tensors moved: the forward pass reads and writes queries, keys, values and results (8), and so does recomputation
    # (8). The backward pass reads and writes one gradient and joins the other three (8).
    return 24 * 2 * sum(each.elements for each in _attention(run)[1::2]) / _MEMORY_RATE


def _attention(run: RunConfig) -> list[Product]:
    """Products of attention in all layers: in turn, the scores and the weighted values."""
    target = target_of(run, device="cuda")
    return [each for layer in describe(run.model).layers for each in attention_products(layer, target)]


TERMS = (
    Term("copies of the random state to the host and back", "6 L x 824,016 B in each direction", copy_seconds),
    Term("waits of the host for copies and for sums over gradients", "36 L + 8 waits of 20 microseconds", _waits),
    Term("casting, checking and unscaling gradients; casting weights", "30 B per parameter of the rank", _optimizer),
    Term("separate scaling of the attention scores", "6 passes over the scores", _scaled_scores),
    Term("rearranging queries, keys, values and results by head", "24 L E / T", _heads_apart),
)


def account(run: RunConfig) -> dict[str, float]:
    """Seconds of each term in one step, keyed by the name of the term."""
    return {term.name: term.seconds(run) for term in TERMS}
