"""Library that causes faults of the disk and of the clock in every process of a run (`shim.c`), and its settings."""

import errno
import mmap
import struct
import subprocess
from pathlib import Path
from typing import Self

_FORM = "=qqqq256s"
_SOURCE = Path(__file__).with_name("shim.c")


class Shim:
    """The compiled library, and the settings that all processes with the library share.

    Raises `SystemExit` if this machine has no C compiler.
    """

    def __init__(self, folder: Path) -> None:
        self.library, self.settings = folder / "shim.so", folder / "shim.settings"
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(self.library), str(_SOURCE), "-ldl", "-lpthread"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise SystemExit("faults: `cc` must be installed to build the library of faults, but is not.") from None
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"faults: the library of faults must compile, but does not:\n{error.stderr}") from None
        self.settings.write_bytes(bytes(struct.calcsize(_FORM)))
        with self.settings.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.set()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that load the library into a new process and into all its children."""
        return {"LD_PRELOAD": str(self.library), "FAULTS_SETTINGS": str(self.settings)}

    def set(
        self, *, clock: int = 0, delay: float = 0.0, room: int = -1, error: int = errno.ENOSPC, pattern: str = ""
    ) -> Self:
        """Replace all settings. Without arguments, there is no fault.

        `clock` is the number of seconds by which the clock jumps. Files whose path contains `pattern` take `room` more
        bytes and then fail with `error`, and each of their writes and flushes waits `delay` seconds. A negative `room`
        is unlimited.
        """
        content = struct.pack(_FORM, clock, int(delay * 1e6), room, error, pattern.encode())
        self._map[:] = content
        return self

    @property
    def room(self) -> int:
        """Number of bytes that matching files may still take."""
        return int(struct.unpack(_FORM, self._map[:])[2])
