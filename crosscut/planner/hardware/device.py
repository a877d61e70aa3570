"""Properties of one type of device: memory, FLOP/s, memory bandwidth and links.

The peak of a device is the rate that its maker states for dense matrix products. Since the A100, data sheets print the
rate with two-in-four sparsity. This rate is twice as high, and dense training cannot reach it. The H100's 1979 TFLOP/s
in bfloat16 are therefore 989 here. The share of the stated rate that programs attain is a separate figure, so
utilisation always refers to the stated rate.
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
"""Place of a link: inside a node, or between nodes."""


class MeasuredMessage(NamedTuple):
    """Latency and rates of one kind of collective, as measured by `crosscut plan --calibrate`."""

    latency: float
    """Seconds of one step around a ring, excluding the time to transfer the bytes."""
    rates: tuple[tuple[float, float], ...]
    """Pairs of message size (bytes that one rank sends) and rate (bytes per second), the smallest message first."""

    def rate(self, sent: float) -> float:
        """Bytes per second at which a rank sends a message of `sent` bytes.

        The rate is interpolated between the two nearest measured sizes, linearly in logarithms. Outside of the measured
        range, the rate of the nearest size applies.
        """
        if sent <= self.rates[0][0]:
            return self.rates[0][1]
        for (fewer, rate), (more, next_rate) in pairwise(self.rates):
            if sent <= more:
                share = log(sent / fewer) / log(more / fewer)
                return exp((1 - share) * log(rate) + share * log(next_rate))
        return self.rates[-1][1]


class MeasuredProduct(NamedTuple):
    """FLOP/s of the product [m, k] x [k, n], as measured by `crosscut plan --calibrate`."""

    m: int
    k: int
    n: int
    flops_per_second: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """Connection through which a rank sends to another rank."""

    bandwidth: float
    """Stated rate: bytes per second that one rank can send in one direction."""

    attained: float
    """Share of `bandwidth` that large messages attain."""

    latency: float
    """Seconds of one step around a ring, excluding the time to transfer the bytes."""

    reducing: float = 0.0
    """Share of `bandwidth` at which the switches of the link sum a tensor of all ranks (NVIDIA's SHARP). A rank sends
    the tensor to the switches once, and they send the sum back. 0 if the switches cannot sum."""

    reducing_latency: float = 0.0
    """Seconds of an all-reduce in the switches, excluding the time to transfer the bytes."""

    measured: Mapping[str, MeasuredMessage] = field(default_factory=dict)
    """Measured latency and rates, keyed by operation. They replace the other figures for this operation."""

    @property
    def rate(self) -> float:
        """Bytes per second that one rank attains with large messages."""
        return self.bandwidth * self.attained

    @property
    def reducing_rate(self) -> float:
        """Bytes per second of one rank's tensor that the switches of the link sum; 0 if they cannot sum."""
        return self.bandwidth * self.reducing


@dataclass(frozen=True, kw_only=True, eq=False)
class Hardware:
    """One accelerator, or a CPU that several ranks share."""

    key: str
    """Name of the device for `--gpu`: the name of its file without `.toml`."""

    name: str
    """Common name of the device."""

    device: Device
    """Kind of the device: "cuda" or "cpu". All ranks on a CPU share its FLOP/s, its bandwidth and its memory."""

    device_names: str
    """Regular expression that matches the whole device name that torch reports, without the maker's name. Empty if
    torch has no name for the device."""

    memory: int
    """Bytes of memory as the maker states them, with 1 GB = 10^9 bytes. torch reports a few percent more, because the
    chips hold binary gigabytes."""

    memory_bandwidth: float
    """Stated memory bandwidth in bytes per second."""

    memory_attained: float
    """Share of `memory_bandwidth` that memory-bound operators attain."""

    flops: Mapping[str, float]
    """Stated FLOP/s of dense matrix products, keyed by precision: `float64`, `float32` (true float32), `tf32`,
    `float16`, `bfloat16`, `float8`. A precision that the device's matrix units do not support is missing."""

    multiprocessors: int
    """Number of multiprocessors that compute the tiles of a product; 0 on devices without tile quantisation."""

    products_attained: float
    """Share of `flops` that large products attain."""

    attention_attained: float
    """Share of `flops` that a fused attention kernel attains. Only FLOPs of the unmasked half of the scores count."""

    measured: Mapping[str, tuple[MeasuredProduct, ...]]
    """Measured FLOP/s of products, keyed by precision. The measured FLOP/s replace `flops` times
    `products_attained`."""

    start: float
    """Seconds between the end of a kernel and the start of the next kernel."""

    gelu: float
    """Rate of GeLU's arithmetic in elements per second. The time of this arithmetic adds to the time of GeLU's memory
    traffic. 0 if the memory traffic hides the arithmetic."""

    layer_host: tuple[float, float]
    """Seconds that the host takes to start all operators of a layer, in the forward and in the backward pass. 0 if the
    host runs ahead of the device."""

    tensor_host: float
    """Seconds per step that the host takes for each parameter tensor (norm, clipping, AdamW); 0 if the host runs ahead
    of the device."""

    ranks_per_node: int
    """Number of ranks in one node. The link `node` connects these ranks."""

    node: Link
    """Link inside a node."""

    network: Link | None
    """Link between nodes: one rank's share of the node's network adapters. None if there is only one node."""

    host_bandwidth: float
    """Bytes per second between device memory and host memory, in one direction; 0 if the device uses host memory."""

    sources: Mapping[str, str]
    """Source of the figures, keyed by section of the file."""

    @property
    def fast_precision(self) -> str:
        """Precision that `training.precision = "auto"` selects on this device."""
        return precision_on(self.device, has_bfloat16="bfloat16" in self.flops)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability that selects the attention kernel: 8.0 if the device has bfloat16, otherwise 7.0."""
        return AMPERE if "bfloat16" in self.flops else (7, 0)

    @property
    def source(self) -> str:
        """Source of the peak FLOP/s."""
        return self.sources["products"]
