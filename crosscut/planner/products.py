"""Time of a matrix product on one rank, by its shape.

A product of [m, k] and [k, n] takes the longer of its arithmetic and its traffic with memory:

    max(2 m k n / (peak x attained x filled), bytes / memory bandwidth) + start

`attained` is what the device's large products reach of the peak. `filled` is how well the product's tiles fill the
device: an edge that a tile covers in part counts as whole, and so does the last turn of tiles that leaves
multiprocessors idle; a product with few tiles is cut along k as well. Where the device was measured, the rate of the
nearest shapes stands in place of both.

Backward, a product has two of the same size: [m, n] x [n, k] for the gradient of its input and [k, m] x [m, n] for that
of its weight.

Legend: `m` tokens of a micro-batch, `k` and `n` widths on one rank.
"""

from functools import cached_property
from math import ceil, exp, log

from crosscut.architecture import Product
from crosscut.config.precision import PRECISIONS
from crosscut.planner.hardware import Hardware, MeasuredProduct

_TILE = 128
"""Rows and columns of the result that one multiprocessor computes at a time, as cuBLAS and CUTLASS commonly have it."""
_LEAST_K = 512
"""Smallest k of one part where a product is also cut along k."""


class Speed:
    """Seconds in which one of `ranks` ranks on a node multiplies, reads and writes; cached by product shape."""

    def __init__(self, hardware: Hardware, precision: str, *, ranks: int = 1) -> None:
        self.hardware = hardware
        self.size = PRECISIONS[precision].compute_bytes
        self.sharing = ranks if hardware.device == "cpu" else 1
        layers = "float8" if precision == "float8" and "float8" in hardware.flops else ""
        self.peak = hardware.flops[PRECISIONS[precision].compute]
        self.layer_peak = hardware.flops[layers] if layers else self.peak
        self.measured = hardware.measured.get(PRECISIONS[precision].compute, ())
        self.stated_peak = hardware.flops[precision]
        self._known: dict[tuple[Product, bool], float] = {}

    @cached_property
    def memory_rate(self) -> float:
        """Bytes per second that are really read or written."""
        return self.hardware.memory_bandwidth * self.hardware.memory_attained / self.sharing

    def passes(self, num_bytes: float) -> float:
        """Seconds to read or write so many bytes."""
        return num_bytes / self.memory_rate

    def gelu(self, elements: float) -> float:
        """Seconds that so many elements of GeLU compute, beside those of their bytes."""
        return elements * self.sharing / self.hardware.gelu if self.hardware.gelu else 0.0

    def product(self, product: Product, *, in_layer: bool = True) -> float:
        """Seconds of a product; those of a layer are the ones that float8 makes faster."""
        seconds = self._known.get((product, in_layer))
        if seconds is None:
            peak = self.layer_peak if in_layer else self.peak
            m, k, n, batch = product
            moved = batch * (m * k + k * n + m * n) * self.size
            seconds = max(product.flops / self._rate(product, peak), self.passes(moved)) + self.hardware.start
            self._known[product, in_layer] = seconds
        return seconds

    def fused_attention(self, flops: float) -> float:
        """Seconds of an attention kernel that skips what the causal mask hides; `flops` are of the full square."""
        return flops / 2 / (self.peak * self.hardware.attention_attained / self.sharing) + self.hardware.start

    def _rate(self, product: Product, peak: float) -> float:
        if self.measured:
            return _nearest_rate(product, self.measured) / self.sharing * (peak / self.peak)
        return peak * self.hardware.products_attained / self.sharing * filled(product, self.hardware.multiprocessors)


def filled(product: Product, multiprocessors: int) -> float:
    """The share of the device's tiles that does work of this product, in the best of the ways to cut it along k."""
    if not multiprocessors:
        return 1.0
    m, k, n, batch = product
    tiles = batch * ceil(m / _TILE) * ceil(n / _TILE)
    whole = batch * m * n / (tiles * _TILE**2)
    parts = [1 << power for power in range(4) if not power or k >> power >= _LEAST_K]
    return whole * max(tiles * cut / (ceil(tiles * cut / multiprocessors) * multiprocessors) for cut in parts)


def _nearest_rate(product: Product, measured: tuple[MeasuredProduct, ...]) -> float:
    """The measured rates, weighted by how near their shapes are: 1 over the fourth power of the logarithms' distance.

    In three dimensions a power above three lets the many shapes far away weigh less than the few that are near.
    """
    total = weights = 0.0
    for point in measured:
        pairs = zip(product[:3], point[:3], strict=True)
        weight = 1.0 / (1e-6 + sum(log(mine / its) ** 2 for mine, its in pairs) ** 2)
        total, weights = total + weight * log(point.flops_per_second), weights + weight
    return exp(total / weights)
