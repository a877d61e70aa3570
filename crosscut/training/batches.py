"""From the data's samplers to tensors on this rank's device."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from crosscut.config import RunConfig
from crosscut.data import Sampler, TokenFolder, ValidationSampler
from crosscut.parallel import ParallelMesh
from crosscut.training.step import Batch

Ids = npt.NDArray[np.int64]


class Batches:
    """The training and validation batches of one data rank, as functions of the seed and the step alone."""

    def __init__(self, run: RunConfig, tokens: TokenFolder, mesh: ParallelMesh) -> None:
        self.run, self.mesh = run, mesh
        length, seed = run.training.sequence_length, run.training.seed
        self.training = Sampler(tokens.train, sequence_length=length, seed=seed)
        self.validation = ValidationSampler(tokens.validation, sequence_length=length)

    def micro_batches(self, step: int) -> list[Batch]:
        """This data rank's part of the batch of step `step`, in micro-batches of [micro-batch, S]."""
        tokens, targets = self.training.batch(
            step, batch_size=self.run.training.batch_size, rank=self.mesh.data.rank, size=self.mesh.data.size
        )
        size = self.run.micro_batch_size
        return [self._to_device(tokens[i : i + size], targets[i : i + size]) for i in range(0, tokens.shape[0], size)]

    def validation_batches(self) -> Iterator[Batch]:
        """This data rank's validation batches, in order; every rank gets the same number of them."""
        for tokens, targets in self.validation.batches(
            batch_size=self.run.micro_batch_size * self.mesh.data.size,
            rank=self.mesh.data.rank,
            size=self.mesh.data.size,
            limit=self.run.training.validation_sequences,
        ):
            yield self._to_device(tokens, targets)

    def documents(self, step: int, micro_batch: int) -> list[tuple[str, int]]:
        """Source and record number of every document in this rank's micro-batch of a step."""
        batch_size, data = self.run.training.batch_size, self.mesh.data
        first = step * batch_size + data.rank * (batch_size // data.size) + micro_batch * self.run.micro_batch_size
        found: dict[tuple[str, int], None] = {}
        for index in range(first, first + self.run.micro_batch_size):
            found.update(dict.fromkeys(self.training.documents(index)))
        return list(found)

    def _to_device(self, tokens: Ids, targets: Ids) -> Batch:
        device = self.mesh.device
        return torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device)
