"""PyTorch's own replacements on the CPU for operators that only GPUs have."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import _symmetric_memory


@contextmanager
def products_in_pieces() -> Iterator[None]:
    """Context in which the operators of `layout.symmetric_memory` run on the CPU."""
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul_fallback)
    library.impl("fused_matmul_reduce_scatter", _symmetric_memory._fused_matmul_reduce_scatter_fallback)
    try:
        yield
    finally:
        library._destroy()
