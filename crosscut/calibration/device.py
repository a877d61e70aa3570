"""One device by itself: products by shape, attention, memory, and the time from one kernel to the next."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from crosscut.calibration.timing import seconds_of

_KERNELS = 200


class Rates(NamedTuple):
    """What one rank has of a device, by itself or beside others on the same processor."""

    measured: dict[str, list[tuple[int, int, int, float]]]
    """m, k, n and TFLOP/s of products, by precision."""
    attention: float
    """TFLOP/s in the last of these precisions."""
    memory: float
    """GB/s."""
    start: float
    """Seconds."""


class Sizes(NamedTuple):
    """How large the work is that tells a device's rates."""

    tokens: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    """k and n of products of so many tokens."""
    elements: int
    """Of the float32 vector that is read and written."""
    attention: tuple[int, int, int, int]
    """Sequences, heads, tokens and head size."""


ON_CPU = Sizes(
    tokens=(256, 1024, 4096),
    widths=((64, 256), (128, 128), (256, 256), (256, 1024), (1024, 256), (1024, 1024), (256, 8192)),
    elements=1 << 20,  # as large as an activation of a model for a processor, which its caches hold
    attention=(2, 4, 512, 64),
)
ON_GPU = Sizes(
    tokens=(2048, 8192, 32768),
    widths=((1024, 1024), (1024, 4096), (4096, 1024), (4096, 512), (4096, 4096), (4096, 16384), (8192, 8192)),
    elements=1 << 28,
    attention=(4, 16, 4096, 128),
)


def sizes_for(device: torch.device) -> Sizes:
    """What a kind of device does in the time that there is."""
    return ON_GPU if device.type == "cuda" else ON_CPU


def measure(device: torch.device, sizes: Sizes) -> Rates:
    """All rates of a rank's device. The precision that most runs train in comes last."""
    dtypes = [torch.float32]
    if device.type == "cuda":
        dtypes += [torch.float16, *([torch.bfloat16] if torch.cuda.is_bf16_supported() else [])]
    return Rates(
        {str(dtype).removeprefix("torch."): product_rates(device, dtype, sizes) for dtype in dtypes},
        attention_rate(device, dtypes[-1], sizes),
        memory_rate(device, sizes),
        start_seconds(device),
    )


def product_rates(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> list[tuple[int, int, int, float]]:
    """TFLOP/s of [m, k] x [k, n], and of the product of the same size that gives a weight's gradient."""
    shapes = [shape for tokens in sizes.tokens for k, n in sizes.widths for shape in ((tokens, k, n), (k, tokens, n))]
    return [(*shape, _product_rate(shape, device, dtype)) for shape in shapes]


def _product_rate(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> float:
    m, k, n = shape
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    return 2 * m * k * n / seconds_of(lambda: a @ b, device) / 1e12


def attention_rate(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """TFLOP/s of causal attention, in the half of the square that is not masked."""
    batch, heads, length, head = sizes.attention
    query, key, value = (torch.randn(batch, heads, length, head, device=device).to(dtype) for _ in range(3))
    seconds = seconds_of(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), device)
    return 2 * batch * heads * length**2 * head / seconds / 1e12


def memory_rate(device: torch.device, sizes: Sizes) -> float:
    """GB/s of a sum that reads two vectors and writes a third, as a residual does."""
    a, b = (torch.ones(sizes.elements, device=device) for _ in range(2))
    result = torch.empty_like(a)
    return 3 * a.nbytes / seconds_of(lambda: torch.add(a, b, out=result), device) / 1e9


def start_seconds(device: torch.device) -> float:
    """From one small kernel to the next, as PyTorch starts them."""
    x = torch.zeros(8, device=device)

    def many() -> None:
        for _ in range(_KERNELS):
            x.add_(1.0)

    return seconds_of(many, device) / _KERNELS
