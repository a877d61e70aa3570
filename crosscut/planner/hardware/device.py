"""One kind of device as the planner knows it: how much it holds, how fast it multiplies, reads and sends.

A peak is the rate of dense matrix products that the maker states. Data sheets since the A100 print the rate with
two-in-four sparsity, which no dense training reaches and which is twice as high: the H100's 1979 TFLOP/s in bfloat16
are 989 here. What is attained of a stated rate is apart from it, so that utilisation is always of the stated one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log
from typing import Literal, NamedTuple

from crosscut.architecture import Device
from crosscut.config.conventions import AMPERE
from crosscut.config.precision import precision_on

Where = Literal["node", "network"]
"""A link inside a node or between nodes."""


class MeasuredMessage(NamedTuple):
    """One kind of collective as `crosscut plan --calibrate` found it."""

    latency: float
    """Seconds of one step around a ring, beside the bytes."""
    rates: tuple[tuple[float, float], ...]
    """Bytes that one rank sends in a message, with the bytes per second of that message; the smallest message first."""

    def rate(self, sent: float) -> float:
        """Bytes per second of a message of which a rank sends so many: between two that were measured, on the straight
        line of their logarithms; beyond them, the nearest one's.
        """
        if sent <= self.rates[0][0]:
            return self.rates[0][1]
        for (fewer, rate), (more, next_rate) in pairwise(self.rates):
            if sent <= more:
                share = log(sent / fewer) / log(more / fewer)
                return exp((1 - share) * log(rate) + share * log(next_rate))
        return self.rates[-1][1]


class MeasuredProduct(NamedTuple):
    """The rate of [m, k] x [k, n] as `crosscut plan --calibrate` found it."""

    m: int
    k: int
    n: int
    flops_per_second: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """Connection through which a rank sends to another rank."""

    bandwidth: float
    """Bytes per second that one rank sends, each way, as stated."""

    attained: float
    """Share of `bandwidth` that a collective's large messages reach."""

    latency: float
    """Seconds of one step around a ring, beside the bytes."""

    measured: Mapping[str, MeasuredMessage] = field(default_factory=dict)
    """Measured messages by operation, where calibration found another time than the ring's bytes and steps give."""

    @property
    def rate(self) -> float:
        """Bytes per second that one rank really sends."""
        return self.bandwidth * self.attained


@dataclass(frozen=True, kw_only=True, eq=False)
class Hardware:
    """One accelerator, or a processor that several ranks share."""

    key: str
    """Name that `--gpu` takes: that of the device's file."""

    name: str
    """Common name of the device."""

    device: Device
    """Kind of the device, as PyTorch calls it. Ranks on a `cpu` share its rates and its memory."""

    device_names: str
    """Regular expression for all of a device's name as torch gives it, without the maker's; empty where it has none."""

    memory: int
    """Bytes, as the maker names them, in GB of 10^9. What torch reports is a few percent more: the chips hold binary
    GB."""

    memory_bandwidth: float
    """Bytes per second of the memory, as stated."""

    memory_attained: float
    """Share of `memory_bandwidth` reached by operators that only read and write."""

    flops: Mapping[str, float]
    """Dense matrix FLOP/s by precision: `float64`, `float32` (true float32), `tf32`, `float16`, `bfloat16`, `float8`. A
    precision that its matrix units lack is missing."""

    multiprocessors: int
    """Multiprocessors that share the tiles of a product; 0 where tiles do not matter."""

    products_attained: float
    """Share of `flops` that large products reach."""

    attention_attained: float
    """Share of `flops` that a fused attention kernel reaches in the half of the square that a causal mask leaves."""

    measured: Mapping[str, tuple[MeasuredProduct, ...]]
    """Rates by shape and precision, which replace `flops` times `products_attained`."""

    start: float
    """Seconds from the end of a kernel to the beginning of the next."""

    gelu: float
    """Elements per second that GeLU computes, beside the time of its bytes; 0 where it takes no longer than these."""

    layer_host: tuple[float, float]
    """Seconds in which a rank's host starts all operators of a layer, forward and backward; 0 where it runs ahead of
    its device."""

    tensor_host: float
    """Seconds that the host takes for each parameter once a step: norm, clipping, AdamW. As `layer_host`."""

    ranks_per_node: int
    """Ranks that reach each other through `node`."""

    node: Link
    """Link inside a node."""

    network: Link | None
    """Link between nodes, for one rank of as many as a node has; None where there is one node."""

    host_bandwidth: float
    """Bytes per second between the device's memory and the host's, each way; 0 where they are the same."""

    sources: Mapping[str, str]
    """Where the figures of each section of the file are stated."""

    @property
    def fast_precision(self) -> str:
        """Precision that `training.precision = "auto"` stands for on this device."""
        return precision_on(self.device, has_bfloat16="bfloat16" in self.flops)

    @property
    def capability(self) -> tuple[int, int]:
        """The lowest compute capability of GPUs that have its types, which decides on the attention kernel."""
        return AMPERE if "bfloat16" in self.flops else (7, 0)

    @property
    def source(self) -> str:
        """Source in which the peaks are stated."""
        return self.sources["products"]
