"""Training and validation batches as tensors on this rank's device; training batches are fetched one step ahead."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from crosscut.config import RunConfig
from crosscut.data import Tokens, training_samples, validation_samples
from crosscut.model import Batch
from crosscut.parallel import ParallelMesh

Ids = npt.NDArray[np.int64]


class BatchSource(Protocol):
    """Training and validation batches of one data rank, as the training loop reads them."""

    @property
    def mesh(self) -> ParallelMesh:
        """Mesh of the run."""

    @property
    def validation_bytes(self) -> int:
        """Number of UTF-8 bytes of the text of all validation targets, over all ranks; 0 if they are not counted."""

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this data rank's share of the batch of a step, split into micro-batches."""

    def num_micro_batches(self, step: int) -> int:
        """Number of micro-batches of a step on each data rank."""

    def validation_batches(self) -> Iterator[Batch]:
        """Yield this data rank's validation batches. Every rank gets the same number of batches."""

    def documents(self, step: int, micro_batch: int) -> list[tuple[str, int]]:
        """Return the documents in one of this rank's micro-batches, each as (name of the file, number in the file)."""


class Batches:
    """Training and validation batches of one data rank. Training batches depend only on the seed and the step."""

    def __init__(self, run: RunConfig, tokens: Tokens, mesh: ParallelMesh) -> None:
        self.run, self.mesh, self._tokens = run, mesh, tokens
        length, seed = run.training.sequence_length, run.training.seed
        self.training = training_samples(tokens, sequence_length=length, seed=seed)
        self.validation = validation_samples(tokens, sequence_length=length)

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this data rank's share of the batch of step `step`, split into micro-batches of shape [micro-batch
        size, S].
        """
        tokens, targets = self.training.batch_from(
            self.run.training.samples_before(step),
            batch_size=self.run.training.batch_size_at(step),
            rank=self.mesh.data.rank,
            size=self.mesh.data.size,
        )
        micro_batches = self._batch(tokens, targets).chunk(self.num_micro_batches(step))
        return [batch.to_device(self.mesh.device) for batch in micro_batches]

    def num_micro_batches(self, step: int) -> int:
        """Number of micro-batches of step `step` on each data rank."""
        return self.run.training.batch_size_at(step) // (self.mesh.data.size * self.run.micro_batch_size)

    def validation_batches(self) -> Iterator[Batch]:
        """Yield this data rank's validation batches, in order. Every rank gets the same number of batches."""
        for tokens, targets in self.validation.batches(
            batch_size=self.run.micro_batch_size * self.mesh.data.size,
            rank=self.mesh.data.rank,
            size=self.mesh.data.size,
            limit=self.run.training.validation_sequences,
        ):
            yield self._batch(tokens, targets).to_device(self.mesh.device)

    def _batch(self, tokens: Ids, targets: Ids) -> Batch:
        """Make a batch on the host that shares the memory of the arrays. With `training.document_mask`, the batch says
        which document each token belongs to.
        """
        batch = Batch(tokens=torch.from_numpy(tokens), targets=torch.from_numpy(targets))
        return batch.with_documents(self._tokens.end_of_text) if self.run.training.document_mask else batch

    @cached_property
    def validation_bytes(self) -> int:
        """Number of UTF-8 bytes of the text of all validation targets, over all ranks."""
        return self.validation.num_bytes(self._tokens.tokenizer(), limit=self.run.training.validation_sequences)

    def documents(self, step: int, micro_batch: int) -> list[tuple[str, int]]:
        """Return the documents in one of this rank's micro-batches of step `step`, each as (name of the file, record
        number in the file). `micro_batch` is the index of the micro-batch.
        """
        data, own = self.mesh.data, self.run.training.batch_size_at(step) // self.mesh.data.size
        first = self.run.training.samples_before(step) + data.rank * own + micro_batch * self.run.micro_batch_size
        found: dict[tuple[str, int], None] = {}
        for index in range(first, first + self.run.micro_batch_size):
            found.update(dict.fromkeys(self.training.documents(index)))
        return list(found)


class _Fetched(NamedTuple):
    """Micro-batches of a step. `ready` is the event after which a GPU may use them; None on the CPU."""

    micro_batches: list[Batch]
    ready: "torch.cuda.Event | None"


class BatchesAhead:
    """Training batches of a run, fetched in a background thread while the previous step runs.

    Use the object as a context manager: leaving the context ends the thread. `take` raises the errors of the thread.
    """

    def __init__(self, batches: BatchSource, *, num_steps: int) -> None:
        self.batches, self.num_steps = batches, num_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[int, Future[_Fetched]] | None = None
        device = batches.mesh.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._next = None
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int) -> list[Batch]:
        """Return `Batches.micro_batches(step)` and start to fetch the batch of the next step. Raises any error of the
        fetch.
        """
        expected, future = self._next or (step, self._thread.submit(self._fetch, step))
        if expected != step:
            future = self._thread.submit(self._fetch, step)
        self._next = None
        fetched = future.result()
        if step + 1 < self.num_steps:
            self._next = step + 1, self._thread.submit(self._fetch, step + 1)
        if fetched.ready is not None:
            stream = torch.cuda.current_stream(self.batches.mesh.device)
            stream.wait_event(fetched.ready)
            for batch in fetched.micro_batches:
                batch.record_stream(stream)  # do not reuse its memory before this stream is done
        return fetched.micro_batches

    def _fetch(self, step: int) -> _Fetched:
        if self._stream is None:
            return _Fetched(self.batches.micro_batches(step), None)
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            micro_batches = self.batches.micro_batches(step)
            ready = torch.cuda.Event()
            ready.record(self._stream)
        return _Fetched(micro_batches, ready)
