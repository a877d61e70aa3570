"""Rates of the matrix products of all models, by their real shapes: in bfloat16, in 8 bits, and with a float32 result.

A layer's product [m, k] x [k, n] has two more in its backward pass, whose factors lie differently in memory. The
planner describes the shapes (`crosscut.architecture`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders.programs import crosscut_run
from benchmarks.gpu.measuring.timing import seconds_of, tried
from benchmarks.gpu.plan import CHUNK_TOKENS, SHAPES, TINY, Entry, step, tiny

PASSES = ("forward", "input gradient", "weight gradient")


class Shaped(NamedTuple):
    """A product of a model: [m, k] x [k, n]."""

    model: str
    name: str
    m: int
    k: int
    n: int


def measure_products(entry: Entry, device: torch.device) -> dict[str, Any]:
    """Measure the FLOP/s of all products in all passes and ways. A way that the device lacks has the reason instead."""
    rows = []
    for product in shaped_products(is_tiny=entry.shape.num_layers == TINY.num_layers):
        for kind in PASSES:
            ways = _ways(product, kind, device)
            flops = 2 * product.m * product.k * product.n
            rates = {way: tried(partial(_rate, make, flops, device)) for way, make in ways.items()}
            rows.append({**product._asdict(), "pass": kind, **rates})
    return {"products": rows}


def shaped_products(*, is_tiny: bool = False) -> Iterator[Shaped]:
    """Yield the products of a layer of each model, and of its head: with the tokens of a chunk of the loss, and with
    all tokens of a micro-batch.
    """
    from crosscut.architecture import Target, describe, flat, lower
    from crosscut.architecture.steps import Multiply
    from crosscut.planner.candidate import target_of

    for model in SHAPES:
        entry = tiny(step(model)) if is_tiny else step(model)
        run = crosscut_run(entry.shape, entry.way("cuda"))
        target: Target = target_of(run, device="cuda")
        decoder = describe(run.model)
        for made in flat(lower(decoder.layers[0], target)):
            if isinstance(made, Multiply):
                for product in made.products(target):
                    yield Shaped(model, made.matrix.weight.name, product.m, product.k, product.n)
        for product in decoder.head.products(target):
            for tokens in sorted({min(product.m, CHUNK_TOKENS), product.m}):
                yield Shaped(model, "head", tokens, product.k, product.n)


def _rate(make: Callable[[], Callable[[], object]], flops: float, device: torch.device) -> float:
    return flops / seconds_of(make(), device)


def _ways(product: Shaped, kind: str, device: torch.device) -> dict[str, Callable[[], Callable[[], object]]]:
    """Functions that make a product in each way, with factors that lie in memory as in a layer."""
    _, _, m, k, n = product
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    first, second = {
        "forward": lambda: (draw(m, k), draw(n, k).t()),
        "input gradient": lambda: (draw(m, n), draw(n, k)),
        "weight gradient": lambda: (draw(m, n).t(), draw(m, k)),
    }[kind]()
    wide = partial(torch.mm, out_dtype=torch.float32)
    ordinary = partial(F.linear, first, second.t()) if kind == "forward" else partial(torch.mm, first, second)
    return {
        "bfloat16": lambda: ordinary,
        "float32 result": lambda: partial(wide, first, second),
        "8 bits": lambda: _in_8_bits(first, second, is_gradient=kind != "forward"),
    }


def _in_8_bits(first: Tensor, second: Tensor, *, is_gradient: bool) -> Callable[[], object]:
    """Return the product in 8 bits as `kernels.products` computes it. Casts are not part of it."""
    a = first.to(torch.float8_e5m2 if is_gradient else torch.float8_e4m3fn).contiguous()
    b = second.t().to(torch.float8_e4m3fn).contiguous().t()
    one = torch.ones((), device=first.device)
    return partial(torch._scaled_mm, a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=not is_gradient)
