"""A rank of a run on this machine: its trainer, and batches of random tokens."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch

from benchmarks.processes import memory_of, reset_peak
from crosscut.calibration import calibrate
from crosscut.config import Layout, RunConfig
from crosscut.launch import process_group
from crosscut.model import Batch
from crosscut.parallel import ParallelMesh, make_mesh
from crosscut.parallel.collectives import gather_to_first
from crosscut.planner.hardware import Hardware, named_hardware
from crosscut.training.precision import resolve_on
from crosscut.training.step import Trainer
from crosscut.training.watching.throughput import synchronize

_T = TypeVar("_T")
CPU = torch.device("cpu")
Figures = dict[str, float]


@contextmanager
def rank_of(run: RunConfig, device: torch.device = CPU, *, threads: int = 0) -> Iterator[Trainer]:
    """Trainer of this rank, in a process group of its own. With `threads`, PyTorch computes in as many threads."""
    with process_group(device):
        if threads:
            torch.set_num_threads(threads)
        yield trainer_of(run, device)


def trainer_of(run: RunConfig, device: torch.device = CPU) -> Trainer:
    """Trainer of this rank, in the process group that exists."""
    return Trainer(resolve_on(run, device), make_mesh(run.layout, device))


def random_batches(run: RunConfig, *, seed: int = 1, device: torch.device = CPU) -> list[Batch]:
    """Micro-batches of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    size = (run.micro_batch_size, run.training.sequence_length + 1)
    ids = [torch.randint(0, run.model.vocab_size, size, generator=generator) for _ in range(run.num_micro_batches)]
    return [Batch.from_ids(tokens.to(device)) for tokens in ids]


def figures_of_loading(layout: Layout, load: Callable[[_T, ParallelMesh], Figures], *models: _T) -> list[Figures]:
    """Build and load a small model, so that PyTorch has loaded everything that it loads at first use, and then a large
    one. Returns the figures of the large one on all ranks, and its `peak`: the highest resident memory above the
    memory before it, in bytes. The list is empty except on the first rank.
    """
    small, large = models
    with process_group(CPU):
        mesh = make_mesh(layout, CPU)
        load(small, mesh)
        before = memory_of("self", "VmRSS")
        reset_peak("self")
        figures = load(large, mesh)
        return gather_to_first({**figures, "peak": memory_of("self", "VmHWM") - before}) or []


def hardware_of(gpu: str | None) -> Hardware:
    """Device file that the user names, or a calibration of this machine."""
    if gpu is not None:
        return named_hardware(gpu)
    with TemporaryDirectory() as folder:
        calibrate(Path(folder) / "device.toml")
        return named_hardware(str(Path(folder) / "device.toml"))


def seconds_of_step(trainer: Trainer, step: int, batches: list[Batch], device: torch.device = CPU) -> float:
    """Time one optimizer step."""
    synchronize(device)
    start = time.perf_counter()
    trainer.step(step, batches)
    synchronize(device)
    return time.perf_counter() - start
