"""Checks that the machine has room for the connections and the shared memory of ranks, before or while they start.

Without these checks, PyTorch would retry a connection without a free port for half an hour, and an error about shared
memory would not say which memory is full.
"""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from crosscut.config import ConfigError

_PORTS_PER_RANK = 8
"""Number of ports that must be free for each rank: for the store, for the process groups and for their connections."""
_MOST_PORTS = 64
"""Maximum number of ports to check."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the name in a message
_NO_ROOM = frozenset({errno.ENOSPC, errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOSYS})


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
                    f"The connections of {num_ranks} ranks must have at least {needed} {what} at {address}, but only "
                    f"{found} are there: {error.strerror}. {remedy}"
                ) from None


@contextmanager
def shared_memory_told() -> Iterator[None]:
    """Convert the error of a semaphore that does not fit into shared memory to a `ConfigError`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_ROOM:
            raise
        raise ConfigError(
            f"`{_SHARED_MEMORY}` must have room for the semaphores of the ranks, but has not: {error.strerror}. Free "
            f"some space in `{_SHARED_MEMORY}`, or give the container more (`--shm-size`)."
        ) from None
