"""Simulated ranks: PyTorch's fake process group, whose collectives return at once and send nothing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from crosscut.config import LayoutError


@contextmanager
def pretended_ranks(world_size: int, rank: int) -> Iterator[None]:
    """Context in which this process acts as rank `rank` of `world_size` ranks. The other ranks do not exist, and
    collectives return at once.

    Raises `LayoutError` unless `rank` is from 0 to `world_size` - 1.
    """
    if not 0 <= rank < world_size:
        raise LayoutError(
            f"`rank` must be from 0 to {world_size - 1}, the last rank of the layout, but is {rank}. Choose another "
            "rank, or a larger layout."
        )
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    _clear_sharding_prop_cache()  # entries of an earlier mesh with the same ranks name a destroyed process group
    hook = sys.excepthook  # PyTorch's hook would mark later errors of this process as those of a rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        _clear_sharding_prop_cache()


def is_wait(func: Any) -> bool:
    """Whether the operator `func` waits for a collective. In the fake process group, this operator copies the
    tensor.
    """
    return func is torch.ops._c10d_functional.wait_tensor.default


def is_exchange(func: Any) -> bool:
    """Whether an operator is an all-to-all."""
    return func is torch.ops._c10d_functional.all_to_all_single.default


def is_collective(func: Any) -> bool:
    """Whether the operator `func` is a collective, or prepares a collective of sharded parameters."""
    return func.namespace in ("_c10d_functional", "c10d", "fsdp")
