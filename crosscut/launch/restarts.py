"""Ranks that torchrun starts again after a failure (`--max-restarts`), and the store in which they find each other.

By default, torchrun keeps one store for all its starts. Ranks of a later start then find the addresses of ranks that
have ended, and wait for them (PyTorch issue 135712). On one machine, each start therefore uses keys of its own. On
several machines, the number of the start may differ between the machines, so torchrun must make a new store for each
start. It does so with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, but not with its static rendezvous.
"""

import os

import torch.distributed as dist

from crosscut.config import LayoutError


def keeps_store() -> bool:
    """Whether the launcher of this rank keeps one store for all its starts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def require_new_store() -> None:
    """Check that the ranks of a later start can find each other.

    Raises `LayoutError` if torchrun has started several machines, may start their ranks again, and keeps its store.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and keeps_store() and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise LayoutError(
            "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE` must be 1 for torchrun with --max-restarts on several machines, but "
            "is not. Otherwise, ranks that are started again find the addresses of ended ranks, and wait for them. "
            "Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend=c10d, or with "
            "--max-restarts=0."
        )


def store_of_restart() -> dist.Store | None:
    """Store with keys of its own for this start. None for the first start, and if each start has a new store: the
    process group then finds its store itself.
    """
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not start or not keeps_store():
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=dist.distributed_c10d.default_pg_timeout)
    return dist.PrefixStore(f"crosscut/start-{start}", store)
