"""Restarts by torchrun after a failure (`--max-restarts`), and the store through which the restarted ranks find each
other.

By default, torchrun uses the same store for every start of the ranks. After a restart, ranks then find the addresses of
ranks that have ended, and wait for them (PyTorch issue 135712). On one machine, Crosscut avoids this: each start uses
its own keys in the store. On several machines, the machines may count the starts differently, so torchrun must create a
new store for each start. torchrun does so with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, but not with its static
rendezvous.
"""

import os

import torch.distributed as dist

from crosscut.config import LayoutError


def keeps_store() -> bool:
    """Whether the launcher uses the same store for every start of the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def require_new_store() -> None:
    """Check that the ranks can find each other after a restart.

    Raises `LayoutError` if torchrun runs on several machines, may restart the ranks, and uses the same store for every
    start.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and keeps_store() and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise LayoutError(
            "With --max-restarts on several machines, torchrun needs `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, but the "
            "variable is not 1. Without it, restarted ranks find the addresses of ranks that have ended, and wait for "
            "them. Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend=c10d, or with "
            "--max-restarts=0."
        )


def store_of_restart() -> dist.Store | None:
    """Return the store for the process group after a restart, with keys that no other start uses.

    Returns None if the process group needs no such store: at the first start, or if each start has a new store. The
    process group then connects to its store itself.
    """
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not start or not keeps_store():
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=dist.distributed_c10d.default_pg_timeout)
    return dist.PrefixStore(f"crosscut/start-{start}", store)
