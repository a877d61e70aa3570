"""Training and validation batches as tensors on this rank's device; training batches are fetched one step ahead."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import torch

from crosscut.architecture import describe
from crosscut.config import RunConfig
from crosscut.config.data import Objective
from crosscut.data import (
    MaskedSampler,
    MaskedValidation,
    Tokens,
    masked_samples,
    masked_validation,
    training_samples,
    validation_samples,
)
from crosscut.data.logits import LogitStore
from crosscut.data.sampler import Arrays, Samples, share_of_batch
from crosscut.data.validation import ValidationSamples
from crosscut.flight import RECORD, RunPhase
from crosscut.model import Batch
from crosscut.parallel import ParallelMesh
from crosscut.training.spikes.order import SampleOrder
from crosscut.training.teachers.cache import stored_fields

_TOKENS_DESCRIBED = 64
"""Maximum number of tokens that the description of a sequence shows."""


class BatchSource(ABC):
    """Training and validation batches of one rank, as the training loop reads them. Training batches depend only on the
    seed and the step. If context ranks share the sequences, each rank gets its own part of each sequence.
    """

    def __init__(self, run: RunConfig, mesh: ParallelMesh) -> None:
        self.run, self.mesh = run, mesh
        self.reads = describe(run.model).reads(document_mask=run.training.document_mask)
        """Fields of a batch that the model reads, by name."""
        self.order = SampleOrder(run.training)
        """Position of each step's batch in the sequence of samples. Code that replaces this attribute must also call
        `BatchesAhead.forget`, because the next batch may already be fetched."""

    @property
    @abstractmethod
    def validation_bytes(self) -> int:
        """Number of UTF-8 bytes in the text of all validation targets, over all ranks; 0 if they are not counted."""

    @abstractmethod
    def share(self, step: int) -> Batch:
        """Return this data rank's share of the batch of a step, in host memory."""

    @abstractmethod
    def validation_batches(self) -> Iterator[Batch]:
        """Yield this data rank's validation batches, in order. Every rank gets the same number of batches."""

    @abstractmethod
    def documents(self, step: int, micro_batch: int) -> list[tuple[str, int]]:
        """Return the documents in one of this rank's micro-batches, each as (name of the file, number in the file)."""

    def complete(self, batch: Batch) -> Batch:
        """Return the micro-batch with additional fields, which are computed only after the batch has been split. By
        default, no fields are added.
        """
        return batch

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this data rank's share of the batch of a step, split into micro-batches of shape [micro-batch size,
        S].
        """
        return [self.on_device(part) for part in self.share(step).chunk(self.num_micro_batches(step))]

    def num_micro_batches(self, step: int) -> int:
        """Number of micro-batches of a step on each data rank."""
        return self.run.training.batch_size_at(step) // (self.mesh.reader.size * self.run.micro_batch_size)

    def num_tokens(self, step: int) -> int:
        """Number of tokens that all ranks read in a step, including padding."""
        return self.run.training.batch_size_at(step) * self.run.training.sequence_length

    def on_device(self, batch: Batch) -> Batch:
        """Return this rank's part of a micro-batch, on the rank's device."""
        return self.complete(batch).part_of_rank(self.mesh.context).to_device(self.mesh.device)


class Described(NamedTuple):
    """Description of a training sequence for people to read."""

    position: int
    """Position of the sequence in the order of the samples."""
    documents: list[tuple[str, int]]
    """Documents of the sequence, each as (name of the file, number in the file)."""
    text: str
    """Beginning of the text that the model reads."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RunSamples:
    """Training and validation samples of a run, from its token folders. A rank calls `samples_of` only once, because
    finding the samples can require reading all tokens (`data.masked.pairs`).
    """

    tokens: Tokens
    training: Samples | MaskedSampler
    validation: ValidationSamples | MaskedValidation


class TokenBatches(BatchSource):
    """Training and validation batches of one rank, from token shards."""

    def __init__(self, run: RunConfig, mesh: ParallelMesh, samples: RunSamples) -> None:
        super().__init__(run, mesh)
        self.training, self.validation, self._tokens = samples.training, samples.validation, samples.tokens
        is_taught = bool(run.teacher.cache) and mesh.has_loss
        self._logits = LogitStore.open(Path(run.teacher.cache)) if is_taught else None
        """Stored logits of the run's teacher. None if there are none, or if this rank computes no loss."""

    def batch(self, rows: Arrays) -> Batch:
        """Make a batch on the host, with the fields that the model reads. The batch shares the memory of the arrays."""
        return Batch.of(rows, self.reads)

    def share(self, step: int) -> Batch:
        """Return this data rank's share of the batch of a step, in host memory."""
        batch_size, (rank, size) = self.run.training.batch_size_at(step), self.mesh.reader
        first = self.order.first_sample(step)
        batch = self.batch(self.training.batch_from(first, batch_size=batch_size, rank=rank, size=size))
        if self._logits is None:
            return batch
        count, own = share_of_batch(batch_size, rank, size)
        return replace(batch, **stored_fields(self._logits, first + own, count))

    def validation_batches(self) -> Iterator[Batch]:
        """Yield this data rank's validation batches, in order. Every rank gets the same number of batches. The
        prediction of the order of segments is not scored.
        """
        rank, size = self.mesh.reader
        for rows in self.validation.batches(
            batch_size=self.run.micro_batch_size * size,
            rank=rank,
            size=size,
            limit=self.run.training.validation_sequences,
        ):
            yield self.on_device(replace(self.batch(rows), order=None))

    def documents(self, step: int, micro_batch: int) -> list[tuple[str, int]]:
        """Return the documents in one of this rank's micro-batches of step `step`, each as (name of the file, record
        number in the file). `micro_batch` is the index of the micro-batch.
        """
        _, own = share_of_batch(self.run.training.batch_size_at(step), *self.mesh.reader)
        first = self.order.first_sample(step) + own + micro_batch * self.run.micro_batch_size
        found: dict[tuple[str, int], None] = {}
        for index in range(first, first + self.run.micro_batch_size):
            found.update(dict.fromkeys(self.training.documents(index)))
        return list(found)

    def describe(self, first: int, count: int) -> list[Described]:
        """Describe `count` sequences, starting at position `first` in the order of the samples."""
        tokens = self.batch(self.training.batch_from(first, batch_size=count, rank=0, size=1)).tokens
        tokenizer = self._tokens.tokenizer()
        beginnings = tokens[:, :_TOKENS_DESCRIBED].tolist()
        return [
            Described(first + number, self.training.documents(first + number), tokenizer.decode(beginning))
            for number, beginning in enumerate(beginnings)
        ]


class Batches(TokenBatches):
    """Batches for the prediction of the next token."""

    def batch(self, rows: Arrays) -> Batch:
        """Make a batch. With `training.document_mask`, the batch says which document each token belongs to."""
        batch = super().batch(rows)
        return batch.with_documents(self._tokens.end_of_text) if self.run.training.document_mask else batch

    @cached_property
    def validation_bytes(self) -> int:
        """Number of UTF-8 bytes in the text of all validation targets, over all ranks."""
        assert isinstance(self.validation, ValidationSamples)
        return self.validation.num_bytes(self._tokens.tokenizer(), limit=self.run.training.validation_sequences)


class MaskedBatches(TokenBatches):
    """Batches for models that predict masked tokens, and possibly the order of two segments."""

    validation_bytes = 0
    """Always 0, because bits per byte are not defined for masked tokens: the model also reads the tokens that follow a
    masked token."""

    def complete(self, batch: Batch) -> Batch:
        """Return a micro-batch with the indexes of the tokens that the model predicts."""
        return batch.with_predicted(self.run.mask_fraction)


def batches_of(run: RunConfig, samples: RunSamples, mesh: ParallelMesh) -> TokenBatches:
    """Return the batches of a run from its samples."""
    kind = MaskedBatches if run.data.objective is Objective.MASKED else Batches
    return kind(run, mesh, samples)


def samples_of(run: RunConfig, tokens: Tokens) -> RunSamples:
    """Find the samples of a run, for its `data.objective`. Raises `DataError` if the tokens do not fit the run."""
    length, seed = run.training.sequence_length, run.training.seed
    if run.data.objective is Objective.MASKED:
        return RunSamples(
            tokens=tokens,
            training=masked_samples(tokens, run.data, sequence_length=length, seed=seed),
            validation=masked_validation(tokens, run.data, sequence_length=length, seed=seed),
        )
    return RunSamples(
        tokens=tokens,
        training=training_samples(tokens, sequence_length=length, seed=seed),
        validation=validation_samples(tokens, sequence_length=length),
    )


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

    def __exit__(self, *_: object) -> None:
        self._next = None
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int) -> list[Batch]:
        """Return `Batches.micro_batches(step)` and start fetching the batch of the next step. Raises any error of the
        fetch.
        """
        RECORD.phase(RunPhase.DATA, step)
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

    def forget(self) -> None:
        """Drop the batch that has been fetched ahead, after the order of the batches has changed."""
        if self._next is not None:
            self._next[1].exception()  # wait, so that two threads never read the samples at once
        self._next = None

    def _fetch(self, step: int) -> _Fetched:
        if self._stream is None:
            return _Fetched(self.batches.micro_batches(step), None)
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            micro_batches = self.batches.micro_batches(step)
            ready = torch.cuda.Event()
            ready.record(self._stream)
        return _Fetched(micro_batches, ready)
