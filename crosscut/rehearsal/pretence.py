"""Pretence of a dry run beside the other ranks: tensors without memory, and PyTorch's choices on a GPU.

Tensors are PyTorch's fake ones, which have all but values. They are of the CPU, since PyTorch without CUDA has no
backward pass for others. Where a run is to be on GPUs, five choices that are made there are made here: attention
in a kernel that keeps one number per query and head, keys and values repeated where no such kernel takes shared ones,
a dropout mask of one byte per element, chunks of the loss as large as a GPU's, and no products by oneDNN. The GPU is of
Ampere or later. For the CPU they are this machine's choices.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from crosscut.config.conventions import AMPERE
from crosscut.kernels import onednn
from crosscut.model import attention
from crosscut.parallel.pretended import is_wait

Device = Literal["cpu", "cuda"]


class WithoutMemory(FakeTensorMode):
    """Inside, new tensors have no memory. What is done among tensors that have some, such as the ranks of a mesh and
    the state of a random generator, is really done.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let the operator run, or pretend to."""
        if is_wait(func):
            return args[0]  # as it is when it is really sent; PyTorch's pretence would be a copy
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        if tensors and all(type(x) in (Tensor, nn.Parameter) for x in tensors):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@contextmanager
def as_on(device: Device) -> Iterator[None]:
    """Inside, attention, dropout and products are the operators that are chosen on `device`, by models made here."""
    if device == "cpu":
        yield
        return
    functions: Any = F
    products: Any = onednn
    heads: Any = attention
    plain = functions.scaled_dot_product_attention, functions.dropout
    processor = products.IS_THERE, products.is_faster
    functions.scaled_dot_product_attention, functions.dropout = _fused_attention, _dropout
    products.IS_THERE, products.is_faster = False, lambda: False
    capability_of, heads.capability_of = heads.capability_of, lambda _: AMPERE
    try:
        yield
    finally:
        functions.scaled_dot_product_attention, functions.dropout = plain
        products.IS_THERE, products.is_faster = processor
        heads.capability_of = capability_of


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, dropout_p: float = 0.0, **_grouped: bool
) -> Tensor:
    result: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    return result


def _dropout(x: Tensor, p: float) -> Tensor:
    return torch.native_dropout(x, p, True)[0]
