"""Checks that the machine has free ports and shared memory for the ranks.

Without these checks, PyTorch would try to connect for half an hour if no port is free. An error about shared memory
would not say which memory is full.
"""

import errno
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from crosscut.config import ConfigError

_PORTS_PER_RANK = 8
"""Number of free ports that each rank needs: for the store, for the process groups and for their connections."""
_MOST_PORTS = 64
"""Maximum number of ports to check."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the name in a message
_NO_ROOM = frozenset({errno.ENOSPC, errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOSYS})


_FILES, _FILES_PER_RANK = 56, 4
"""Number of files and connections that each rank needs, and how many more it needs for each of all ranks."""


def require_files(num_ranks: int) -> None:
    """Raise `ConfigError` unless a process may open enough files for the connections of `num_ranks` ranks. A rank that
    reaches the limit while it starts cannot even write down its error.
    """
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _FILES + _FILES_PER_RANK * num_ranks
    if limit < needed:
        raise ConfigError(
            f"Each of {num_ranks} ranks must be able to open at least {needed} files and connections, but `ulimit -n` "
            f"allows {limit}. Raise the limit: ulimit -n 4096"
        )


def require_ports(address: str, num_ranks: int) -> None:
    """Raise `ConfigError` unless the machine has enough free ports at `address` for the connections of `num_ranks`
    ranks.
    """
    needed = min(_PORTS_PER_RANK * num_ranks, _MOST_PORTS)
    with ExitStack() as sockets:
        for found in range(needed):
            try:
                one = sockets.enter_context(socket.socket())
                one.bind((address, 0))
            except OSError as error:
                what = "free ports" if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) else "sockets"
                remedy = (
                    "End programs that hold ports, or widen `net.ipv4.ip_local_port_range`."
                    if what == "free ports"
                    else "Raise the limit on open files (`ulimit -n`)."
                )
                raise ConfigError(
                    f"At {address}, there must be at least {needed} {what} for the connections of {num_ranks} ranks, "
                    f"but there are only {found}: {error.strerror}. {remedy}"
                ) from None


@contextmanager
def shared_memory_told() -> Iterator[None]:
    """Context that converts an error to a `ConfigError` if the shared memory has no room for a semaphore."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_ROOM:
            raise
        raise ConfigError(
            f"`{_SHARED_MEMORY}` must have room for the semaphores of the ranks, but has none: {error.strerror}. Free "
            f"some space in `{_SHARED_MEMORY}`, or give the container more shared memory (`--shm-size`)."
        ) from None
