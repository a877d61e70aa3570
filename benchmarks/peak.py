"""Peak memory of a process and its descendants."""

import threading
from pathlib import Path

import psutil


class Peak:
    """Watch the memory of a process and its descendants, twice a second, until `stop` is called."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._highest = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Stop watching and return the peak in bytes."""
        self._over.set()
        self._thread.join()
        return self._highest

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self._highest = max(self._highest, held_by(self._process))


def held_by(process: int) -> int:
    """Bytes that a process and its descendants hold. A page shared by n processes counts 1/n in each (PSS)."""
    try:
        parent = psutil.Process(process)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_proportional(one.pid) for one in family)


def _proportional(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
