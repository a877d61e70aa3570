"""Measurements of a single device: matrix products (by shape), attention, memory, GeLU, and the time to start
operators.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.calibration.timing import Times, in_turns, repeated, typical
from crosscut.kernels import ORDINARY
from crosscut.kernels.products import add_product, multiply_into
from crosscut.parallel import (
    ColumnParallelLinear,
    LayerNorm,
    RowParallelLinear,
    global_gradient_norm,
    make_lone_mesh,
)
from crosscut.parallel.state.gradient_norm import clip_factor
from crosscut.parallel.state.parameters import local_part

_KERNELS = 200
_VOCABULARY = 8192
"""Minimum width at which a matrix is treated as the output projection."""
_ELSEWHERE = 1 << 24
"""Number of float32 elements in 64 MiB, which exceeds one core's share of the cache on most CPUs."""
_HALVES, _PARAMETERS = 8, 6
"""Number of `_HalfLayer` modules whose parameters the measured optimizer updates, and number of parameters of each
module."""


class Rates(NamedTuple):
    """Measured rates of a device, for one rank or for all ranks together."""

    measured: dict[str, list[tuple[int, int, int, float]]]
    """Measured matrix products as tuples (m, k, n, TFLOP/s), keyed by precision."""
    attention: float
    """TFLOP/s of attention, in the last precision of `measured`."""
    memory: float
    """Memory bandwidth in GB/s."""
    start: float
    """Seconds to start one kernel."""
    gelu: float = 0.0
    """Rate of GeLU's arithmetic in 10^9 elements per second, without the time to read and write the elements. 0 if the
    arithmetic takes no additional time."""
    host: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds of work on the host, excluding the computation itself. There are three figures: one layer's operators in
    the forward pass, one layer's operators in the backward pass, and one parameter tensor in the optimizer. All are 0
    on a GPU, because the host runs ahead of the GPU.
    """


class Sizes(NamedTuple):
    """Sizes of the tensors with which a device's rates are measured."""

    tokens: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    """(k, n) of the products [m, k] x [k, n]. Each pair is combined with every number in `tokens` as m."""
    elements: int
    """Number of elements in each float32 vector of the memory measurement. The vectors do not fit in the caches."""
    attention: tuple[int, int, int, int]
    """Sizes of the attention measurement: sequences, heads, tokens and head size."""
    turns: int = 8


ON_CPU = Sizes(
    tokens=(256, 1024, 4096),
    widths=(
        *((64, 256), (128, 128), (256, 64), (256, 256), (256, 1024), (1024, 256), (1024, 1024)),
        *((256, 8192), (8192, 256)),
    ),
    elements=1 << 22,
    attention=(2, 4, 512, 64),
)
ON_GPU = Sizes(
    tokens=(2048, 8192, 32768),
    widths=((1024, 1024), (1024, 4096), (4096, 1024), (4096, 512), (4096, 4096), (4096, 16384), (8192, 8192)),
    elements=1 << 28,
    attention=(4, 16, 4096, 128),
    turns=5,
)


def sizes_for(device: torch.device) -> Sizes:
    """Return the tensor sizes for measurements on this kind of device. All measurements together take less than a
    minute.
    """
    return ON_GPU if device.type == "cuda" else ON_CPU


def measure(device: torch.device, sizes: Sizes) -> Rates:
    """Measure those rates of a device that can be measured with one rank."""
    seconds = in_turns(pieces(device, sizes), sizes.turns)
    return rates_of([typical(turns) for turns in seconds], device, sizes)


def pieces(device: torch.device, sizes: Sizes) -> list[Times]:
    """Return one function per measurement. Each function runs and times one piece of work on a rank's device.

    `rates_of` expects the seconds of the pieces in the same order.
    """
    products = [
        repeated(_product(shape, numbers, is_of_weight=is_of_weight), device)
        for dtype in dtypes_of(device)
        for numbers in [_numbers(device, dtype, sizes)]
        for shape, is_of_weight in zip(shapes(sizes), cycle((False, True)), strict=False)
    ]
    works = [_attention(device, dtypes_of(device)[-1], sizes), _memory(device, sizes), _start(device)]
    if device.type == "cpu":
        works += [partial(F.gelu, torch.ones(sizes.elements), approximate="tanh"), *_on_host(device)]
    return [*products, *(repeated(work, device) for work in works)]


def rates_of(seconds: list[float], device: torch.device, sizes: Sizes) -> Rates:
    """Compute the rates of the device. `seconds` has one value for each piece of work, in the order of `pieces`."""
    rest = iter(seconds)
    measured = {
        str(dtype).removeprefix("torch."): [(m, k, n, 2 * m * k * n / next(rest) / 1e12) for m, k, n in shapes(sizes)]
        for dtype in dtypes_of(device)
    }
    batch, heads, length, head = sizes.attention
    attention = 2 * batch * heads * length**2 * head / next(rest) / 1e12
    memory = 12 * sizes.elements / next(rest)
    start = next(rest) / _KERNELS
    if device.type != "cpu":
        return Rates(measured, attention, memory / 1e9, start)
    # The time of GeLU's arithmetic is the measured time minus the time to read and write float32 elements at the
    # memory's rate.
    arithmetic = next(rest) - 8 * sizes.elements / memory
    gelu = sizes.elements / arithmetic / 1e9 if arithmetic > 0 else 0.0
    forward, both, optimizer = next(rest), next(rest), next(rest)
    host = (2 * forward, 2 * max(both - forward, 0.0), optimizer / _HALVES / _PARAMETERS)
    return Rates(measured, attention, memory / 1e9, start, gelu, host)


def dtypes_of(device: torch.device) -> list[torch.dtype]:
    """Return the data types of the measured products. The last data type is the usual one for training."""
    if device.type == "cpu":
        return [torch.float32]
    return [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_bf16_supported() else [])]


def shapes(sizes: Sizes) -> list[tuple[int, int, int]]:
    """Return the shapes (m, k, n) of the measured products [m, k] x [k, n].

    Each forward product is followed by the product of equal size that computes the weight gradient.
    """
    return [shape for tokens in sizes.tokens for k, n in sizes.widths for shape in ((tokens, k, n), (k, tokens, n))]


def _numbers(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Tensor:
    """Return random numbers for the factors of all matrix products.

    All products share these numbers, because memory that was used before is faster than new pages. On a CPU, there are
    enough numbers to give many small products different factors.
    """
    largest = max(m * k + k * n + m * n for m, k, n in shapes(sizes))
    return torch.randn(max(largest, _ELSEWHERE if device.type == "cpu" else 0), device=device).to(dtype)


def _product(shape: tuple[int, int, int], numbers: Tensor, *, is_of_weight: bool) -> Callable[[], object]:
    """Return a function that computes a matrix product with the same operator as training. If one side is very long,
    this is the operator of the loss; otherwise, it is the operator of a layer.

    If there are enough numbers, each call uses different numbers, so that the factors are not in the cache, as in a
    training step.
    """
    m, k, n = shape
    is_of_loss = max(m if is_of_weight else k, n) >= _VOCABULARY
    works: list[Callable[[], object]] = []
    for a, b, result in _parts(numbers, (m, k), (k, n), (m, n)):
        if is_of_weight and is_of_loss:
            works.append(partial(add_product, result, a.view(k, m).t(), b, is_first=True))
        elif is_of_weight:
            works.append(partial(ORDINARY.weight_gradient, a.view(k, m), b))
        elif is_of_loss:
            works.append(partial(multiply_into, result, a, b.view(n, k)))
        else:
            works.append(partial(ORDINARY.output, a, b.view(n, k)))
    next_work = cycle(works)
    return torch.no_grad()(lambda: next(next_work)())


def _parts(numbers: Tensor, *shapes: tuple[int, int]) -> Iterator[list[Tensor]]:
    """Yield matrices of the given shapes, cut from `numbers`, until the numbers are used up."""
    sizes = [rows * columns for rows, columns in shapes]
    for part in numbers.split(sum(sizes)):
        if len(part) == sum(sizes):
            yield [x.view(shape) for x, shape in zip(part.split(sizes), shapes, strict=True)]


def _attention(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Callable[[], object]:
    """Return a function that computes causal attention. FLOPs are counted only for the unmasked half of the scores."""
    query, key, value = (torch.randn(*sizes.attention, device=device).to(dtype) for _ in range(3))
    return partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)


def _memory(device: torch.device, sizes: Sizes) -> Callable[[], object]:
    """Return a function that adds two vectors into a third vector, as a residual connection does."""
    a, b, result = (torch.ones(sizes.elements, device=device) for _ in range(3))
    return partial(torch.add, a, b, out=result)


def _start(device: torch.device) -> Callable[[], object]:
    """Return a function that starts many small kernels, one after another."""
    x = torch.zeros(8, device=device)

    def many() -> None:
        for _ in range(_KERNELS):
            x.add_(1.0)

    return many


class _HalfLayer(nn.Module):
    """Half of a layer, with few elements: a norm, two matrices with an activation between them, and a residual sum."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        mesh, width = make_lone_mesh(device), 32
        self.norm = LayerNorm(width, mesh=mesh)
        self.expand = ColumnParallelLinear(width, width, mesh=mesh)
        self.contract = RowParallelLinear(width, width, mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.contract(F.gelu(self.expand(self.norm(x)), approximate="tanh"))
        return y


def _on_host(device: torch.device) -> list[Callable[[], object]]:
    """Return three pieces of work that show how long the host takes to start operators. The tensors are tiny, so that
    the operators themselves take almost no time. The first piece is the forward pass of one `_HalfLayer`, and the
    second is a forward and a backward pass of this module. The third piece computes gradient norm, clipping and AdamW
    for the parameters of eight such modules (`_HALVES`).
    """
    layers, x = nn.Sequential(*(_HalfLayer(device) for _ in range(_HALVES))), torch.ones(1, 8, 32, device=device)
    layers(x).sum().backward()
    parameters = list(layers.parameters())
    own = [nn.Parameter(local_part(parameter.detach())) for parameter in parameters]
    for mine, parameter in zip(own, parameters, strict=True):
        mine.grad = local_part(cast(Tensor, parameter.grad))
    optimizer = torch.optim.AdamW(own, fused=True)

    def both() -> None:
        layers[0](x).sum().backward()

    def step() -> None:
        factor = clip_factor(global_gradient_norm(parameters), 1.0)
        optimizer.grad_scale = factor.reciprocal().float()  # type: ignore[attr-defined]
        optimizer.step()

    return [partial(layers[0], x), both, step]
