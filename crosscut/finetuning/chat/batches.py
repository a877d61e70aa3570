"""Batches of packed conversations, for the training loop."""

from collections.abc import Iterator

import numpy as np

from crosscut.config import RunConfig
from crosscut.data.sampler import Ids, share_of_batch
from crosscut.finetuning.chat.packing import PackedChats
from crosscut.model import Batch
from crosscut.parallel import ParallelMesh
from crosscut.training.batches import BatchSource


class ChatBatches(BatchSource):
    """Training and validation batches of one rank."""

    validation_bytes = 0
    """Always 0. The bytes of the answers are not counted, so validation reports no bits per byte."""

    def __init__(self, run: RunConfig, training: PackedChats, validation: PackedChats, mesh: ParallelMesh) -> None:
        super().__init__(run, mesh)
        self.training, self.validation = training, validation

    def share(self, step: int) -> Batch:
        """Return this data rank's share of the batch of a step, in host memory."""
        return self._batch(self.training, self._indices(step))

    def validation_batches(self) -> Iterator[Batch]:
        """Yield this data rank's validation batches. Every rank gets the same number of batches."""
        limit, size = self.run.training.validation_sequences, self.run.micro_batch_size
        number = min(limit or self.validation.num_sequences, self.validation.num_sequences)
        reader = self.mesh.reader
        for first in range(0, number, size * reader.size):
            own = np.arange(size) + first + reader.rank * size
            yield self.on_device(self._batch(self.validation, np.where(own < number, own, -1)))

    def documents(self, step: int, micro_batch: int) -> list[tuple[str, int]]:
        """Return the conversations in one of this rank's micro-batches, each as (name of the file, line)."""
        size = self.run.micro_batch_size
        own = self._indices(step)[micro_batch * size : (micro_batch + 1) * size]
        places = (place.rpartition(":") for index in own for place in str(self.training.places[index]).splitlines())
        return list(dict.fromkeys((name, int(line)) for name, _, line in places if line.isdigit()))

    def _indices(self, step: int) -> Ids:
        training = self.run.training
        count, first = share_of_batch(training.batch_size_at(step), *self.mesh.reader)
        return self.training.indices(self.order.first_sample(step) + first, count, seed=training.seed)

    def _batch(self, packed: PackedChats, indices: Ids) -> Batch:
        return Batch.of(packed.rows(indices))
