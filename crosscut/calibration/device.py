"""One device by itself: products by shape, attention, memory, GeLU, and the time that it takes to start operators."""

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
    clip_gradients_,
    global_gradient_norm,
    make_lone_mesh,
)
from crosscut.parallel.state.parameters import local_part

_KERNELS = 200
_VOCABULARY = 8192
"""From this width on a matrix counts as the output projection."""
_ELSEWHERE = 1 << 24
"""Numbers of 64 MiB, more than a core's share of most caches."""
_HALVES, _PARAMETERS = 8, 6
"""Half layers whose parameters an optimizer steps over, and how many each has."""


class Rates(NamedTuple):
    """Rates that one rank has of a device, by itself or beside other ranks on the same processor."""

    measured: dict[str, list[tuple[int, int, int, float]]]
    """m, k, n and TFLOP/s of products, by precision."""
    attention: float
    """TFLOP/s of attention in the last precision of `measured`."""
    memory: float
    """GB/s of memory."""
    start: float
    """Seconds to start one kernel."""
    gelu: float = 0.0
    """10^9 elements a second, beside the time of their bytes; 0 where nothing comes on top of that."""
    host: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds of a layer's operators forward and backward, and of a parameter in the optimizer, where there is next to
    nothing to compute; 0 on a GPU, whose host runs ahead."""


class Sizes(NamedTuple):
    """Sizes of the work from which a device's rates are measured."""

    tokens: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    """k and n of products, each with every number of `tokens` as m."""
    elements: int
    """Elements of the float32 vector that is read and written: more than the caches hold."""
    attention: tuple[int, int, int, int]
    """Sequences, heads, tokens and head size."""
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
    """Sizes that suit a kind of device and the time that there is."""
    return ON_GPU if device.type == "cuda" else ON_CPU


def measure(device: torch.device, sizes: Sizes) -> Rates:
    """All rates of a device that one rank has to itself."""
    seconds = in_turns(pieces(device, sizes), sizes.turns)
    return rates_of([typical(turns) for turns in seconds], device, sizes)


def pieces(device: torch.device, sizes: Sizes) -> list[Times]:
    """Everything that is measured of a rank's device; `rates_of` takes the seconds in this order."""
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
    """Rates from the seconds of the `pieces`."""
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
    # GeLU's arithmetic is what it takes beyond reading and writing float32, at the rate of memory.
    arithmetic = next(rest) - 8 * sizes.elements / memory
    gelu = sizes.elements / arithmetic / 1e9 if arithmetic > 0 else 0.0
    forward, both, optimizer = next(rest), next(rest), next(rest)
    host = (2 * forward, 2 * max(both - forward, 0.0), optimizer / _HALVES / _PARAMETERS)
    return Rates(measured, attention, memory / 1e9, start, gelu, host)


def dtypes_of(device: torch.device) -> list[torch.dtype]:
    """Precisions of products; the one that most runs train in comes last."""
    if device.type == "cpu":
        return [torch.float32]
    return [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_bf16_supported() else [])]


def shapes(sizes: Sizes) -> list[tuple[int, int, int]]:
    """m, k, n of [m, k] x [k, n], each followed by the product of equal size that gives a weight's gradient."""
    return [shape for tokens in sizes.tokens for k, n in sizes.widths for shape in ((tokens, k, n), (k, tokens, n))]


def _numbers(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Tensor:
    """Random numbers, enough for the factors of any product: all products use the same ones, as memory that was used
    before costs less than new pages. On a processor they are enough for many small products, too.
    """
    largest = max(m * k + k * n + m * n for m, k, n in shapes(sizes))
    return torch.randn(max(largest, _ELSEWHERE if device.type == "cpu" else 0), device=device).to(dtype)


def _product(shape: tuple[int, int, int], numbers: Tensor, *, is_of_weight: bool) -> Callable[[], object]:
    """A product as training calls it: by a layer, or, where a side is as long as a vocabulary, by the loss. Each call
    takes other numbers than the call before, where there are enough: a step's factors are not in the cache either.
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
    """Matrices of these shapes, as often as there are numbers for all of them."""
    sizes = [rows * columns for rows, columns in shapes]
    for part in numbers.split(sum(sizes)):
        if len(part) == sum(sizes):
            yield [x.view(shape) for x, shape in zip(part.split(sizes), shapes, strict=True)]


def _attention(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Callable[[], object]:
    """Causal attention, counted in the half of the square that is not masked."""
    query, key, value = (torch.randn(*sizes.attention, device=device).to(dtype) for _ in range(3))
    return partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)


def _memory(device: torch.device, sizes: Sizes) -> Callable[[], object]:
    """A sum that reads two vectors and writes a third, as a residual does."""
    a, b, result = (torch.ones(sizes.elements, device=device) for _ in range(3))
    return partial(torch.add, a, b, out=result)


def _start(device: torch.device) -> Callable[[], object]:
    """Small kernels one after the other, as PyTorch starts them."""
    x = torch.zeros(8, device=device)

    def many() -> None:
        for _ in range(_KERNELS):
            x.add_(1.0)

    return many


class _HalfLayer(nn.Module):
    """A norm, two matrices, what is between them, and the residual, of a few numbers each."""

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
    """Work of the host for operators with next to nothing to compute: half a layer forward, the same half forward and
    backward, and the gradient norm, clipping and AdamW of the parameters of `_HALVES` half layers.
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
        clip_gradients_(parameters, global_gradient_norm(parameters), 1.0)
        optimizer.step()

    return [partial(layers[0], x), both, step]
