"""Clocks, power and temperature of the GPU while something runs on it. They are only read, never set."""

import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

FIELDS = {"clocks.sm": "SM MHz", "clocks.mem": "memory MHz", "power.draw": "W", "temperature.gpu": "C"}
STATED = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem")
_FORMAT = "--format=csv,noheader,nounits"
_MILLISECONDS = 200

Samples = list[dict[str, float]]


@contextmanager
def sampled() -> Iterator[Samples]:
    """Sample the first GPU in a process of its own. The list is filled when the context ends; without `nvidia-smi` it
    stays empty.
    """
    samples: Samples = []
    command = shutil.which("nvidia-smi")
    if command is None:
        yield samples
        return
    told = [command, "-i", "0", f"--query-gpu={','.join(FIELDS)}", _FORMAT, "-lms", str(_MILLISECONDS)]
    with TemporaryFile("w+") as output:
        process = subprocess.Popen(told, stdout=output, stderr=subprocess.DEVNULL)
        try:
            yield samples
        finally:
            process.terminate()
            process.wait(10)
            output.seek(0)
            samples += filter(None, map(_sample, output))


def _sample(line: str) -> dict[str, float]:
    """Figures of a line; empty if one is missing."""
    try:
        return dict(zip(FIELDS.values(), map(float, line.split(",")), strict=True))
    except ValueError:
        return {}


def summary(samples: Samples) -> dict[str, list[float]]:
    """Smallest, median and largest figure of each field. Empty without samples."""
    columns = {name: [sample[name] for sample in samples] for name in FIELDS.values() if samples}
    return {name: [min(column), statistics.median(column), max(column)] for name, column in columns.items()}


def stated() -> dict[str, str]:
    """Driver, power limit and largest clocks of the first GPU; only "unknown" without an answer."""
    command, unknown = shutil.which("nvidia-smi"), dict.fromkeys(STATED, "unknown")
    if command is None:
        return unknown
    try:
        done = subprocess.run(
            [command, "-i", "0", f"--query-gpu={','.join(STATED)}", _FORMAT], capture_output=True, text=True,
            check=False, timeout=15,
        )  # fmt: skip
        return dict(zip(STATED, (cell.strip() for cell in done.stdout.split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return unknown
