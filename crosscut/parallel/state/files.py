"""Transfer of files between ranks, in blocks, through a gloo group on the CPU.

A rank that cannot read or write its file still sends or receives all blocks. Otherwise, the other rank would wait
forever.
"""

from collections.abc import Callable, Sequence
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
    rank, failed = own_rank(), []
    for transfer in transfers:
        if rank not in (transfer.source, transfer.target):
            continue
        try:
            (_send if rank == transfer.source else _receive)(transfer, folder / transfer.name, group)
        except OSError as error:
            failed.append(error)
    if failed:
        raise failed[0]


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
    failed: OSError | None = None
    try:
        file = path.open("rb")
    except OSError as error:
        failed = error
    block = torch.zeros(min(_BLOCK_BYTES, transfer.size), dtype=torch.uint8)
    for part in _parts(block, transfer.size):
        if failed is None:
            try:
                file.readinto(part.numpy())  # type: ignore[arg-type]  # an array is a buffer
            except OSError as error:
                failed = error
        dist.send(part, transfer.target, group=group)
    if failed is not None:
        raise failed
    file.close()


def _receive(transfer: Transfer, path: Path, group: dist.ProcessGroup | None) -> None:
    failed: OSError | None = None
    write: Callable[[memoryview], object] = lambda _: None  # noqa: E731 - replaced when the file is open
    try:
        remove_file(path)
        file = path.open("xb", buffering=0)
        write = file.write
    except OSError as error:
        failed = error
    block = torch.zeros(min(_BLOCK_BYTES, transfer.size), dtype=torch.uint8)
    for part in _parts(block, transfer.size):
        dist.recv(part, transfer.source, group=group)
        if failed is None:
            try:
                write(memoryview(part.numpy()))  # type: ignore[arg-type]  # an array is a buffer
            except OSError as error:
                failed = error
    if failed is not None:
        raise failed
    file.close()


def _parts(block: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Cut a file of `size` bytes into pieces as long as the buffer `block`, and return one view of the buffer for each
    piece. The last view may be shorter.
    """
    if not size:
        return []
    return [block[: min(len(block), size - start)] for start in range(0, size, len(block))]
