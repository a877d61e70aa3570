"""Batches of encoded examples, for the training loop."""

from collections.abc import Iterator

import numpy as np

from crosscut.config import RunConfig
from crosscut.data.sampler import Ids, share_of_batch
from crosscut.finetuning.encoding.rows import EncodedRows
from crosscut.model import Batch
from crosscut.parallel import ParallelMesh
from crosscut.training.batches import BatchSource

MULTIPLE = 8
"""Rows are padded to a multiple of this number of tokens, so that kernels run with only a few different shapes."""


class TaskBatches(BatchSource):
    """Training and validation batches of one data rank. Rows are padded to the longest row of the whole batch, on every
    rank.
    """

    validation_bytes = 0
    """Always 0. The loss of a task cannot be given in bits per byte."""

    def __init__(
        self, run: RunConfig, training: EncodedRows, validation: EncodedRows, mesh: ParallelMesh, *, padding: int
    ) -> None:
        """`padding` is the token id that fills up short rows."""
        super().__init__(run, mesh)
        self.training, self.validation, self.padding = training, validation, padding

    def share(self, step: int) -> Batch:
        """Return this data rank's share of the batch of a step, in host memory."""
        return self._batch(self.training, self._indices(step))

    def num_tokens(self, step: int) -> int:
        """Number of tokens that all ranks read in a step, including padding."""
        whole = self._indices(step)
        return len(whole) * self.training.width * self._length(self.training, whole)

    def validation_batches(self) -> Iterator[Batch]:
        """Yield this data rank's validation batches. Every rank gets the same number of batches."""
        limit, size = self.run.training.validation_sequences, self.run.micro_batch_size * self.mesh.reader.size
        number = min(limit or self.validation.num_examples, self.validation.num_examples)
        for first in range(0, number, size):
            whole = np.arange(first, first + size)
            whole[whole >= number] = -1
            yield self.on_device(self._batch(self.validation, whole))

    def documents(self, step: int, micro_batch: int) -> list[tuple[str, int]]:
        """Return the examples in one of this rank's micro-batches, each as ("example", number in the file)."""
        size = self.run.micro_batch_size
        own = self._own(self._indices(step))[micro_batch * size : (micro_batch + 1) * size]
        return [("example", int(self.training.sources[index]) + 1) for index in own if index >= 0]

    def _indices(self, step: int) -> Ids:
        training = self.run.training
        return self.training.batch(step, batch_size=training.batch_size_at(step), seed=training.seed)

    def _own(self, whole: Ids) -> Ids:
        count, first = share_of_batch(len(whole), *self.mesh.reader)
        return whole[first : first + count]

    def _length(self, rows: EncodedRows, whole: Ids) -> int:
        return min(rows.longest(whole, multiple=MULTIPLE), self.run.training.sequence_length)

    def _batch(self, rows: EncodedRows, whole: Ids) -> Batch:
        own = self._own(whole)
        return Batch.of(rows.padded(own, length=self._length(rows, whole), padding=self.padding), self.reads)
