"""Batches of packed conversations, for the training loop."""

from collections.abc import Iterator

import numpy as np
import torch

from crosscut.config import RunConfig
from crosscut.data.sampler import share_of_batch
from crosscut.finetuning.chat.packing import Ids, Packed
from crosscut.model import Batch
from crosscut.parallel import ParallelMesh
from crosscut.training.spikes.order import SampleOrder


class ChatBatches:
    """Training and validation batches of one rank. Training batches depend only on the seed and the step. If context
    ranks share the sequences, each rank gets its own part of each sequence.
    """

    validation_bytes = 0
    """Always 0. The bytes of the answers are not counted, so validation reports no bits per byte."""

    def __init__(self, run: RunConfig, training: Packed, validation: Packed, mesh: ParallelMesh) -> None:
        self.run, self.mesh, self.order = run, mesh, SampleOrder(run.training)
        self.training, self.validation = training, validation

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this data rank's share of the batch of a step, split into micro-batches."""
        batch = self._batch(self.training, self._indices(step))
        return [self._on_device(each) for each in batch.chunk(self.num_micro_batches(step))]

    def num_micro_batches(self, step: int) -> int:
        """Number of micro-batches per step on each data rank."""
        return self.run.training.batch_size_at(step) // (self.mesh.data.size * self.run.micro_batch_size)

    def num_tokens(self, step: int) -> int:
        """Number of tokens that all ranks read in a step, including padding."""
        return self.run.training.batch_size_at(step) * self.run.training.sequence_length

    def validation_batches(self) -> Iterator[Batch]:
        """Yield this data rank's validation batches. Every rank gets the same number of batches."""
        limit, size = self.run.training.validation_sequences, self.run.micro_batch_size
        number = min(limit or self.validation.num_sequences, self.validation.num_sequences)
        data = self.mesh.data
        for first in range(0, number, size * data.size):
            own = np.arange(size) + first + data.rank * size
            yield self._on_device(self._batch(self.validation, np.where(own < number, own, -1)))

    def documents(self, step: int, micro_batch: int) -> list[tuple[str, int]]:
        """Return the conversations in one of this rank's micro-batches, each as (name of the file, line)."""
        size = self.run.micro_batch_size
        own = self._indices(step)[micro_batch * size : (micro_batch + 1) * size]
        places = (place.rpartition(":") for index in own for place in str(self.training.places[index]).splitlines())
        return list(dict.fromkeys((name, int(line)) for name, _, line in places if line.isdigit()))

    def _indices(self, step: int) -> Ids:
        training, data = self.run.training, self.mesh.data
        count, first = share_of_batch(training.batch_size_at(step), data.rank, data.size)
        return self.training.indices(self.order.first_sample(step) + first, count, seed=training.seed)

    def _batch(self, packed: Packed, indices: Ids) -> Batch:
        return Batch(**{name: torch.from_numpy(array) for name, array in packed.rows(indices)._asdict().items()})

    def _on_device(self, batch: Batch) -> Batch:
        return batch.part_of_rank(self.mesh.context).to_device(self.mesh.device)
