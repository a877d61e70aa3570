"""Two ranks of this machine at once: what each has of a processor that they share, and the messages between them.

A processor is measured as training uses it, one rank for a half of the cores; what it does in all is the sum.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from crosscut.calibration.device import Rates, Sizes, measure
from crosscut.calibration.timing import repeated_seconds
from crosscut.config import Layout
from crosscut.parallel import ParallelMesh, launch, make_mesh, process_group
from crosscut.parallel.collectives import all_gather_objects, all_reduce
from crosscut.parallel.processes import choose_device, is_first_started

RANKS = 2
_SMALL, _LARGE = 16, {"cpu": 1 << 20, "cuda": 1 << 27}
"""Elements of float32, the large ones as many as a model for that device sends at once."""


class LinkRate(NamedTuple):
    """What a ring has of a link."""

    gigabytes_per_second: float
    """That one rank sends."""
    latency_microseconds: float
    """Of one of a ring's steps."""


def measure_ranks(device: str, sizes: Sizes | None) -> tuple[list[Rates], LinkRate]:
    """Start two ranks, on gloo or nccl; without `sizes` only the link between them is measured."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rates.json"
        launch(_on_rank, (device, sizes, str(file)), num_ranks=RANKS)
        rates, link = json.loads(file.read_text(encoding="utf-8"))
    return [Rates(*rate) for rate in rates], LinkRate(*link)


def _on_rank(name: str, sizes: Sizes | None, file: str) -> None:
    device = choose_device(name)
    with process_group(device):
        mesh = make_mesh(Layout(tensor=RANKS), device)
        link = _link(mesh)
        mine = [measure(device, sizes)] if sizes else []
        rates = [rate for rank in all_gather_objects(mine, mesh.tensor) for rate in rank]
        if is_first_started():
            Path(file).write_text(json.dumps((rates, link)), encoding="utf-8")


def _link(mesh: ParallelMesh) -> LinkRate:
    """With two ranks a ring has two steps, and each rank sends as much as is reduced."""
    device = mesh.device
    small, large = (torch.ones(size, device=device) for size in (_SMALL, _LARGE[device.type]))
    latency = repeated_seconds(lambda: all_reduce(small, mesh.tensor), device) / 2
    seconds = repeated_seconds(lambda: all_reduce(large, mesh.tensor), device)
    return LinkRate(large.nbytes / max(seconds - 2 * latency, seconds / 10) / 1e9, latency * 1e6)
