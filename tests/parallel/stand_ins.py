"""PyTorch's own stand-ins for what only GPUs have, for ranks on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import _symmetric_memory


@contextmanager
def products_in_pieces() -> Iterator[None]:
    """Inside, the operators of `layout.symmetric_memory` do on the CPU what PyTorch's kernels do on GPUs."""
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul_fallback)
    library.impl("fused_matmul_reduce_scatter", _symmetric_memory._fused_matmul_reduce_scatter_fallback)
    try:
        yield
    finally:
        library._destroy()
