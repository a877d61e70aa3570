"""Measurement of the cases of a scaling study. Every case trains on real ranks, and the cases take turns."""

import time
from collections.abc import Sequence
from functools import partial

import torch

from crosscut.config import ConfigError, Layout
from crosscut.evaluation.progress import Bar, progress
from crosscut.launch import Ranks, in_ranks
from crosscut.launch.processes import started_world_size, was_started
from crosscut.model import Batch
from crosscut.parallel import ParallelMesh, make_repeated_mesh
from crosscut.parallel.collectives import all_gather_objects
from crosscut.scaling.cases import Case, Devices
from crosscut.training.requirements import require_capabilities
from crosscut.training.step import Trainer
from crosscut.training.watching.throughput import synchronize

_WARM_UP = 1
"""Number of turns at the start that are not counted, because memory is allocated and the optimizer creates its
moments."""
_STEPS = 2
"""Number of steps of a case in one turn. Only the last step is counted."""


def measure(cases: Sequence[Case], devices: Devices, *, turns: int) -> list[list[float]]:
    """Return the seconds per step of each case, with one value per turn. A step takes as long as its slowest rank.

    All ranks are started once. In each turn, every case takes two steps, and ranks that the case does not use wait.
    Only the second step is counted, because the first step after another case also spends time on allocating memory.
    Each turn starts with a different case, so that other load on the machine affects all cases. Raises `ConfigError`,
    before a rank starts, if the machine does not support a run or if torchrun has started this process. Raises
    `RankFailure` if a rank fails.
    """
    if was_started():
        raise ConfigError(
            "`crosscut study measure` must start its ranks itself, but torchrun has started several. Run the command "
            "without torchrun."
        )
    for case in cases:
        require_capabilities(case.run)
    ranks = Ranks(layout=Layout(data=devices.most), device=devices.kind)
    return in_ranks(ranks, partial(_train_on_rank, turns), prepare=lambda: list(cases))


def _train_on_rank(turns: int, cases: list[Case], device: torch.device) -> list[list[float]]:
    return train_in_turns(cases, turns, make_repeated_mesh(Layout(data=started_world_size()), device))


def train_in_turns(cases: Sequence[Case], turns: int, everyone: ParallelMesh) -> list[list[float]]:
    """Measure the cases on ranks that have already started, and return the same values as `measure`. The mesh
    `everyone` has all ranks along its data axis. Every rank must call this function.
    """
    rank = everyone.data.rank
    stepping = [Stepping(case, everyone.device, rank) for case in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    num_tokens = (_WARM_UP + turns) * _STEPS * sum(one.num_tokens for one in stepping)
    with progress(Bar("scaling", rank == 0), num_tokens) as advance:
        for turn in range(_WARM_UP + turns):
            for index in order(turn, len(cases)):
                for _ in range(_STEPS):
                    slowest = max(all_gather_objects(stepping[index].step(turn), everyone.data))
                    advance(stepping[index].num_tokens)
                if turn >= _WARM_UP:
                    seconds[index].append(slowest)
    return seconds


def order(turn: int, num_cases: int) -> list[int]:
    """Return the indices of the cases in the order in which they run in a turn. Each turn starts one case later than
    the previous turn.
    """
    return [(turn + place) % num_cases for place in range(num_cases)]


class Stepping:
    """Training steps of one case on one rank. Ranks that the case does not use do nothing."""

    def __init__(self, case: Case, device: torch.device, rank: int) -> None:
        run = case.run
        self.num_tokens = run.training.batch_size * run.training.sequence_length
        self._device, self._threads = device, case.threads
        mesh = make_repeated_mesh(run.layout, device)
        self._trainer = Trainer(run, mesh) if rank < run.layout.world_size else None

    def step(self, number: int) -> float:
        """Run one optimizer step. Returns the seconds of the step on this rank, or 0 if the case does not use this
        rank.
        """
        if self._trainer is None:
            return 0.0
        if self._device.type == "cpu":
            torch.set_num_threads(self._threads)
        batches = _random_batches(self._trainer, number)
        synchronize(self._device)
        start = time.perf_counter()
        self._trainer.step(number, batches)
        synchronize(self._device)
        return time.perf_counter() - start


def _random_batches(trainer: Trainer, step: int) -> list[Batch]:
    run = trainer.run
    generator = torch.Generator().manual_seed(step)
    size = (run.config.num_micro_batches, run.config.micro_batch_size, run.training.sequence_length + 1)
    tokens = torch.randint(0, run.model.vocab_size, size, generator=generator).to(trainer.mesh.device)
    return [Batch.from_ids(ids).part_of_rank(trainer.mesh.context) for ids in tokens]
