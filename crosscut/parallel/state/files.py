"""Transfer of files between ranks, in blocks, through a gloo group on the CPU.

A rank that cannot read or write its file still sends or receives all blocks. Otherwise, the other rank would wait
forever.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from crosscut.config.system.deletion import remove_file
from crosscut.parallel.collectives import own_rank

_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class Transfer:
    """A file that one rank sends to another rank."""

    name: str
    size: int
    """Size in bytes."""
    source: int
    target: int


def transfer_files(transfers: Sequence[Transfer], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Send and receive files in `folder`. The ranks may pass different folders. Every rank of the group must call this
    function with the same transfers. The default group consists of all ranks.

    Raises `OSError`, after all transfers, on a rank that could not read or write a file.
    """
    rank = own_rank()
    failed: list[OSError] = []
    for transfer in transfers:
        with _noting(failed):
            if rank == transfer.source:
                _send(transfer, folder / transfer.name, group)
            elif rank == transfer.target:
                _receive(transfer, folder / transfer.name, group)
    if failed:
        raise failed[0]


@contextmanager
def _noting(failed: list[OSError]) -> Iterator[None]:
    """Context that adds an `OSError` to `failed` instead of raising it."""
    try:
        yield
    except OSError as error:
        failed.append(error)


def share_sizes(size: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Gather `size` from every rank of the group, and return the values in the order of the ranks. Every rank must call
    this function.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [size]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([size], dtype=torch.int64), group=group)
    return [int(each) for each in sizes]


def _send(transfer: Transfer, path: Path, group: dist.ProcessGroup | None) -> None:
    failed: list[OSError] = []
    with ExitStack() as stack:
        with _noting(failed):
            file = stack.enter_context(path.open("rb"))
        for part in _parts(transfer.size):
            if not failed:
                with _noting(failed):
                    file.readinto(part.numpy())  # type: ignore[arg-type]  # an array is a buffer
            dist.send(part, transfer.target, group=group)
    if failed:
        raise failed[0]


def _receive(transfer: Transfer, path: Path, group: dist.ProcessGroup | None) -> None:
    failed: list[OSError] = []
    with ExitStack() as stack:
        with _noting(failed):
            remove_file(path)
            file = stack.enter_context(path.open("xb", buffering=0))
        for part in _parts(transfer.size):
            dist.recv(part, transfer.source, group=group)
            if not failed:
                with _noting(failed):
                    file.write(memoryview(part.numpy()))  # type: ignore[arg-type]  # an array is a buffer
    if failed:
        raise failed[0]


def _parts(size: int) -> list[torch.Tensor]:
    """Cut a file of `size` bytes into pieces as long as a buffer, and return one view of the buffer for each piece. The
    last view may be shorter.
    """
    block = torch.zeros(min(_BLOCK_BYTES, size), dtype=torch.uint8)
    return [block[: min(len(block), size - start)] for start in range(0, size, _BLOCK_BYTES)]
