"""Rates of PyTorch's kernels of causal attention, forward and backward, for heads of 96 and 128."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.measuring.timing import seconds_of, tried
from benchmarks.gpu.plan import SHAPES, SHORT, TINY, WIDE, Entry

BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def attention_kernel(head_size: int, device: str) -> str:
    """Return PyTorch's name of the kernel that it chooses for causal attention with heads of this size."""
    q = torch.empty(1, 16, 1024, head_size, device=device, dtype=torch.bfloat16)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, None, 0.0, is_causal=True)).name.lower().replace("_", " ")


def measure_attention(entry: Entry, device: torch.device) -> dict[str, Any]:
    """Measure the FLOP/s of each kernel, counted over the whole square. A kernel that the device lacks has the reason
    instead.
    """
    is_tiny = entry.shape.num_layers == TINY.num_layers
    rows = []
    for model, batch in ((SHORT, 16), (WIDE, 4)):
        shape = TINY if is_tiny else SHAPES[model]
        size = (batch, shape.num_heads, shape.sequence_length, shape.hidden_size // shape.num_heads)
        flops = 4.0 * batch * shape.hidden_size * shape.sequence_length**2
        for backend in BACKENDS:
            forward, both = (tried(partial(_seconds, backend, size, device, way)) for way in (False, True))
            rates = {"forward": forward, "backward": both}
            if not isinstance(forward, str) and not isinstance(both, str):
                rates = {"forward": flops / forward, "backward": 2.5 * flops / max(both - forward, 1e-9)}
            rows.append({"model": model, "size": size, "kernel": backend.name.lower(), **rates})
    return {"attention": rows}


def _seconds(backend: SDPBackend, size: tuple[int, ...], device: torch.device, with_backward: bool) -> float:
    """Seconds of the forward pass, or of both passes."""
    q, k, v = (torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=with_backward) for _ in range(3))
    grad = torch.randn(size, device=device, dtype=torch.bfloat16)

    def call() -> None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if with_backward:
            torch.autograd.grad(y, (q, k, v), grad)

    with sdpa_kernel(backend):
        return seconds_of(call, device)
