"""Time of a matrix product on one rank, by the shape of the product.

A product of [m, k] and [k, n] takes as long as its arithmetic or its memory traffic, whichever takes longer:

    max(2 m k n / (peak x attained x filled), bytes / memory bandwidth) + start

`attained` is the share of the peak that large products reach on this device. `filled` is the share of the device that
the product's tiles keep busy: a tile that covers the edge of the result only in part takes the time of a whole tile,
and the last wave of tiles takes the time of a full wave. A product with few tiles is also split along k. If the device
was calibrated, the measured rates of the nearest shapes replace peak x attained x filled. `start` is the time until the
next kernel starts.

The backward pass has two products of the same size: [m, n] x [n, k] for the input gradient and [k, m] x [m, n] for the
weight gradient. A product in groups, such as that of all experts of a rank, is one kernel: each group reads its own
matrix and has its own tiles.

Legend: `m` tokens of a micro-batch, `k` and `n` widths on one rank.
"""

from functools import cached_property
from math import ceil, exp, log

from crosscut.architecture import Product
from crosscut.config.precision import PRECISIONS
from crosscut.planner.hardware import Hardware, MeasuredProduct

_TILE = 128
"""Number of rows, and of columns, of a tile: the part of the result that one multiprocessor computes at a time. The
size is usual in cuBLAS and CUTLASS."""
_LEAST_K = 512
"""Smallest k of one part of a product that is split along k."""


class Speed:
    """Seconds that matrix products and memory traffic take on one rank. Product times are cached by shape.

    `ranks` is the number of ranks that run at the same time. On a CPU, the ranks share the FLOP/s and the memory
    bandwidth of the CPU. `tile` has the rows and columns of a product's tiles.
    """

    def __init__(
        self, hardware: Hardware, precision: str, *, ranks: int = 1, tile: tuple[int, int] = (_TILE, _TILE)
    ) -> None:
        self.hardware = hardware
        self.tile = tile
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
        """Bytes per second that a rank attains when it reads or writes memory."""
        return self.hardware.memory_bandwidth * self.hardware.memory_attained / self.sharing

    def passes(self, num_bytes: float) -> float:
        """Seconds to read or write `num_bytes`."""
        return num_bytes / self.memory_rate

    def gelu(self, elements: float) -> float:
        """Seconds of GeLU's arithmetic on `elements` elements; 0 if memory traffic hides the arithmetic."""
        return elements * self.sharing / self.hardware.gelu if self.hardware.gelu else 0.0

    def product(self, product: Product, *, in_layer: bool = True) -> float:
        """Seconds of a matrix product.

        With float8 precision, only products in a layer run at float8 speed. For products outside of layers, such as the
        logits, `in_layer` is false.
        """
        seconds = self._known.get((product, in_layer))
        if seconds is None:
            peak = self.layer_peak if in_layer else self.peak
            m, k, n, batch = product.of_group
            moved = batch * (m * k + k * n + m * n) * self.size
            seconds = max(product.flops / self._rate(product, peak), self.passes(moved)) + self.hardware.start
            self._known[product, in_layer] = seconds
        return seconds

    def fused_attention(self, flops: float, *, skips_half: bool = True) -> float:
        """Seconds of an attention kernel. `flops` counts the full square of scores. With `skips_half`, the kernel
        computes only the half that a causal mask leaves.
        """
        done = flops / 2 if skips_half else flops
        return done / (self.peak * self.hardware.attention_attained / self.sharing) + self.hardware.start

    def _rate(self, product: Product, peak: float) -> float:
        if self.measured:
            return _nearest_rate(product, self.measured) / self.sharing * (peak / self.peak)
        busy = filled(product, self.hardware.multiprocessors, self.tile)
        return peak * self.hardware.products_attained / self.sharing * busy


def filled(product: Product, multiprocessors: int, tile: tuple[int, int] = (_TILE, _TILE)) -> float:
    """Share of the device that the product's tiles keep busy, with the best split along k into 1, 2, 4 or 8 parts.

    `tile` has the rows and columns of a tile. If `multiprocessors` is 0, the device has no tile quantisation, and the
    share is 1.
    """
    if not multiprocessors:
        return 1.0
    m, k, n, batch = product.of_group
    tiles = batch * ceil(m / tile[0]) * ceil(n / tile[1])
    whole = batch * m * n / (tiles * tile[0] * tile[1])
    parts = [1 << power for power in range(4) if not power or k / 2**power >= _LEAST_K]
    return whole * max(tiles * cut / (ceil(tiles * cut / multiprocessors) * multiprocessors) for cut in parts)


def _nearest_rate(product: Product, measured: tuple[MeasuredProduct, ...]) -> float:
    """FLOP/s of a product: weighted geometric mean of the measured rates.

    The weight of a measured shape is 1 / d^4, where d is the distance between its logarithms and those of the product's
    shape. The power 4 is larger than the number of dimensions (3), so the few near shapes outweigh the many distant
    shapes.
    """
    total = weights = 0.0
    for point in measured:
        pairs = zip(product.of_group[:3], point[:3], strict=True)
        weight = 1.0 / (1e-6 + sum(log(mine / its) ** 2 for mine, its in pairs) ** 2)
        total, weights = total + weight * log(point.flops_per_second), weights + weight
    return exp(total / weights)
