"""Files whose reading may never end, for tests of everything that reads files."""

import os
import socket
from collections.abc import Callable
from pathlib import Path


def make_socket(path: Path) -> None:
    """Create a socket like one that a dead server has left."""
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_RDONLY)  # an address is at most 107 bytes long
        try:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)


def link_device(path: Path) -> None:
    """Create a link to a device that gives zeros forever."""
    path.symlink_to("/dev/zero")


ENDLESS: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a socket": make_socket,
    "a device": link_device,
}
"""Functions that make such a file, by the name of its kind in messages."""
