"""Messages between two ranks of this machine: what a small all-reduce takes, and what a large one moves in a second."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from crosscut.calibration.timing import repeated_seconds
from crosscut.config import Layout
from crosscut.parallel import launch, make_mesh, process_group
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.processes import choose_device, is_first_started

_RANKS = 2
_SMALL, _LARGE = 16, {"cpu": 1 << 23, "cuda": 1 << 27}
"""Elements of float32."""


class LinkRate(NamedTuple):
    """What a ring has of a link."""

    gigabytes_per_second: float
    """That one rank sends."""
    latency_microseconds: float
    """Of one of a ring's steps."""


def link_rate(device: str) -> LinkRate:
    """Of two ranks on this machine: gloo on `cpu`, nccl on `cuda`."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rates.json"
        launch(_measure, (device, str(file)), num_ranks=_RANKS)
        return LinkRate(*json.loads(file.read_text(encoding="utf-8")))


def _measure(name: str, file: str) -> None:
    """On each rank; the first one writes. With two ranks a ring has two steps, and each sends what is reduced once."""
    device = choose_device(name)
    with process_group(device):
        tensor = make_mesh(Layout(tensor=_RANKS), device).tensor
        small, large = (torch.ones(size, device=device) for size in (_SMALL, _LARGE[device.type]))
        latency = repeated_seconds(lambda: all_reduce(small, tensor), device) / 2
        seconds = repeated_seconds(lambda: all_reduce(large, tensor), device)
        if is_first_started():
            rates = (large.nbytes / max(seconds - 2 * latency, 1e-9) / 1e9, latency * 1e6)
            Path(file).write_text(json.dumps(rates), encoding="utf-8")
