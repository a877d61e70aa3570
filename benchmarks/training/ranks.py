"""A rank of a run on this machine: its trainer, and batches of random tokens."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from benchmarks.processes import memory_of, reset_peak
from crosscut.config import RunConfig
from crosscut.launch import process_group
from crosscut.model import Batch
from crosscut.parallel import make_mesh
from crosscut.training.precision import resolve_on
from crosscut.training.step import Trainer
from crosscut.training.watching.throughput import synchronize

_T = TypeVar("_T")
CPU = torch.device("cpu")


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


def peak_of_loading(small: Callable[[], object], large: Callable[[], _T]) -> tuple[_T, int]:
    """Build and load a small model, so that PyTorch has loaded everything that it loads at first use, and then a large
    one. Returns the result of the large one, and the highest resident memory above the memory before it, in bytes.
    """
    small()
    before = memory_of("self", "VmRSS")
    reset_peak("self")
    return large(), memory_of("self", "VmHWM") - before


def seconds_of_step(trainer: Trainer, step: int, batches: list[Batch], device: torch.device = CPU) -> float:
    """Time one optimizer step."""
    synchronize(device)
    start = time.perf_counter()
    trainer.step(step, batches)
    synchronize(device)
    return time.perf_counter() - start
