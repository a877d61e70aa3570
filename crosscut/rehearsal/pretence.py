"""Fake tensors for the dry run, and the choices that PyTorch would make on a GPU.

A dry run uses PyTorch's fake tensors, which have a shape and a data type but no values. The fake tensors are on the
CPU, because PyTorch without CUDA supports the backward pass only for CPU tensors. A dry run of GPUs makes eight choices
as PyTorch makes them on an Ampere GPU or a later one:

- attention uses a fused kernel, which saves the log-sum-exp of each query and head instead of the scores;
- keys and values are repeated for all query heads if no fused kernel accepts fewer key-value heads;
- a dropout mask has one byte per element;
- the loss uses the chunk size for GPUs;
- products do not use oneDNN, and a product is added to a float32 sum without a copy;
- GeLU is PyTorch's kernel;
- the norm of the gradients takes each gradient whole.

For a dry run of CPUs, PyTorch makes these choices as it does on this machine.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from crosscut.config.conventions import AMPERE
from crosscut.kernels import gelu, onednn, products
from crosscut.model.sublayers import attention
from crosscut.parallel.pretended import is_wait
from crosscut.parallel.state import gradient_norm
from crosscut.training.watching.storages import replaced

Device = Literal["cpu", "cuda"]


class WithoutMemory(FakeTensorMode):
    """Context manager under which new tensors have no memory.

    An operator runs for real if all its input tensors have memory. Examples of such tensors are the ranks of a mesh and
    the state of a random generator. All other operators return fake tensors.
    """

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operator if all its input tensors have memory. Otherwise return a fake result."""
        if is_wait(func):
            return args[0]  # a real wait returns the same tensor, but PyTorch's fake wait would copy it
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        if tensors and all(type(x) in (Tensor, nn.Parameter) for x in tensors):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs or {})


_HAS_WIDE_SUM = torch.ops.aten.addmm.dtype_out in decomposition_table
"""Whether this PyTorch can pretend to add a product in float32, which PyTorch 2.11 only does on a GPU."""


@contextmanager
def as_on(device: Device) -> Iterator[None]:
    """Context manager under which a new model uses the operators that PyTorch would choose on `device`.

    The choice affects attention, dropout, GeLU, matrix products and the norm of the gradients.
    """
    if device == "cpu":
        yield
        return
    with (
        replaced(F, scaled_dot_product_attention=_fused_attention, dropout=_dropout),
        replaced(onednn, IS_THERE=False, is_faster=lambda: False),
        replaced(products, adds_in_float32=lambda total: _HAS_WIDE_SUM and total.dtype == torch.float32),
        replaced(attention, capability_of=lambda _: AMPERE),
        replaced(gelu, MOST_ELEMENTS=0),
        replaced(gradient_norm, NORM_PIECE=sys.maxsize),
    ):
        yield


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    **others: Any,
) -> Tensor:
    scale, is_even = others.get("scale"), q.shape[-1] == v.shape[-1]
    if attn_mask is not None or not is_even:  # FlashAttention needs values as wide as keys, and accepts no mask
        mask = None if attn_mask is None else attn_mask.expand(-1, q.shape[1], -1, -1)
        attend = torch.ops.aten._scaled_dot_product_efficient_attention
        masked: Tensor = attend(q, k, v, mask, True, dropout_p, is_causal, scale=scale)[0]
        return masked
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    result: Tensor = attend(q, k, v, dropout_p, is_causal, scale=scale)[0]
    return result


def _dropout(x: Tensor, p: float) -> Tensor:
    return torch.native_dropout(x, p, True)[0]
