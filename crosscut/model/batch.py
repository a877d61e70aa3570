"""Input of a model: token ids, target ids and optional information about each token."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from crosscut.config import IGNORED, ConfigError
from crosscut.config.checks import divisors, listed
from crosscut.config.conventions import predicted_rows
from crosscut.model.documents import Context, Documents, find_documents
from crosscut.parallel import Axis
from crosscut.parallel.context import split_zigzag


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Sequences that one rank's model reads together. Tensors are [B, S] unless another shape is given; None means that
    the information is not given.
    """

    tokens: Tensor
    """Token ids."""
    targets: Tensor
    """Target of each token: the id that follows the token, or `IGNORED` if nothing is to be predicted."""
    positions: Tensor | None = None
    """Position of each token in its sequence or document, from 0. None means that positions count from the start of the
    sequence.
    """
    documents: Tensor | None = None
    """Number of the document to which each token belongs. None means that each sequence is one document."""
    segments: Tensor | None = None
    """Number of the segment to which each token belongs, such as one of two sentences. This number is the token's type
    (`model.token_types`). None means that every token has type 0.
    """
    mask: Tensor | None = None
    """Whether each token may be attended to; false for padding. None means that every token may be attended to."""
    order: Tensor | None = None
    """Order of the two segments of each sequence [B]: 0 if they are in their original order, 1 if they are swapped,
    `IGNORED` if the sequence has no order to predict. None means that the order is not predicted."""
    labels: Tensor | None = None
    """Labels for a model that solves a task. Their meaning depends on the model's head. Head `classes`: the class of
    each sequence [B]. Head `number`: the number of each sequence [B], in floating point. Head `choice`: the index of
    the right one of the C texts of each question [B / C]; the C texts of a question are successive sequences. Head
    `spans`: the first and the last token of the answer in each sequence [B, 2]. A missing label is `IGNORED`, and a
    missing number is NaN."""
    predicted: Tensor | None = None
    """Indexes [N] of the tokens whose logits are computed, in the flattened batch (`with_predicted`). None means all
    tokens.
    """
    places: Tensor | None = None
    """Indexes [S/C] of this rank's tokens in the whole sequences, if C context ranks share the sequences
    (`part_of_rank`). None means that the sequences are whole.
    """

    @classmethod
    def from_ids(cls, ids: Tensor) -> Self:
        """Make a batch from `ids` [B, S + 1]. Every token except the first is predicted from the earlier tokens."""
        return cls(tokens=ids[:, :-1], targets=ids[:, 1:])

    @classmethod
    def labelled(cls, tokens: Tensor, labels: Tensor, **rest: Tensor | None) -> Self:
        """Make a batch for a task, with labels and without targets. `rest` holds other fields, such as `mask`."""
        return cls(tokens=tokens, targets=torch.full_like(tokens, IGNORED), labels=labels, **rest)

    @property
    def num_targets(self) -> Tensor:
        """Number of targets to predict or, for a task, number of labels: an integer scalar on the device."""
        if self.labels is None:
            return (self.targets != IGNORED).sum()
        first = self.labels if self.labels.dim() == 1 else self.labels[:, 0]
        return (~first.isnan() if first.is_floating_point() else first != IGNORED).sum()

    @property
    def num_orders(self) -> Tensor:
        """Number of sequences whose order of segments is to be predicted: an integer scalar on the device."""
        return self.targets.new_zeros(()) if self.order is None else (self.order != IGNORED).sum()

    def with_predicted(self, fraction: float) -> Self:
        """Return the batch with the indexes of the tokens whose logits are computed. These are all tokens with a
        target, and a few other tokens that round up the number of indexes (`config.conventions.predicted_rows`).
        `fraction` is the expected fraction of tokens with a target. Call this while the batch is on the host, because
        the number of indexes depends on the targets.
        """
        has_none = (self.targets == IGNORED).flatten()
        count = predicted_rows(int((~has_none).sum()), has_none.numel(), fraction)
        return replace(self, predicted=has_none.int().argsort(stable=True)[:count])

    def plain(self) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, for a model that uses no other tensors. Raises `ConfigError` if the batch has
        other tensors.
        """
        if unread := [name for name in self._given() if name not in ("tokens", "targets")]:
            raise ConfigError(
                "A batch for this model must have only tokens and targets. The model cannot use "
                f"{listed(unread)}. Make the batch from tokens and targets only."
            )
        return self.tokens, self.targets

    def with_documents(self, end_of_text: int) -> Self:
        """Return the batch with the documents that the tokens contain, and with positions that restart at each
        document. `end_of_text` is the id of the end-of-text token.
        """
        documents = find_documents(self.tokens, end_of_text=end_of_text)
        return replace(self, documents=documents.numbers, positions=documents.positions)

    def part_of_rank(self, axis: Axis) -> Self:
        """Return the rank's part of sequences that the ranks of `axis` share: an early and a late piece of each
        sequence (`parallel.context.zigzag`). If the axis has one rank, return the batch itself.

        Call this on whole sequences, after `with_documents` if documents are needed. Raises `LayoutError` unless the
        length of the sequences is a multiple of 2 x the number of ranks.
        """
        if axis.size == 1:
            return self
        assert self.predicted is None and self.labels is None, "the indexes and labels of whole sequences would be lost"
        places = split_zigzag(torch.arange(self.tokens.shape[1], device=self.tokens.device), axis.size, 0)[axis.rank]
        parts = {name: split_zigzag(tensor, axis.size, 1)[axis.rank] for name, tensor in self._given().items()}
        return replace(self, **parts, places=places)

    def with_context(self) -> tuple[Tensor, Tensor, Context]:
        """Return the arguments of `GPT.loss`: tokens, targets and their context. Raises `ConfigError` if only one of
        documents and positions is given.
        """
        documents = None
        if self.documents is not None and self.positions is not None:
            documents = Documents(self.documents, self.positions)
        elif self.documents is not None or self.positions is not None:
            given, missing = ("documents", "positions") if self.positions is None else ("positions", "documents")
            raise ConfigError(f"A batch with {given} must have {missing}, too, but has none. Give both or none.")
        context = Context(documents, self.segments, self.mask, self.predicted, self.order, self.labels, self.places)
        return self.tokens, self.targets, context

    def chunk(self, num_parts: int) -> list[Self]:
        """Split the sequences into `num_parts` equal parts, in order. Sequences that share a label stay together.
        Raises `ConfigError` if the number of sequences, or of labels, is not a multiple of `num_parts`. Call
        `with_predicted` on the parts, not on the whole batch.
        """
        assert self.predicted is None and self.places is None, "the indexes of a whole batch are not those of its parts"
        what, number = "sequences", len(self.tokens)
        if self.labels is not None:
            what, number = "labels", len(self.labels)
        if number % num_parts:
            raise ConfigError(
                f"`num_parts` must divide the batch's number of {what} ({number}), but is {num_parts}. "
                f"Try {listed(divisors(number))}."
            )
        parts = {name: tensor.chunk(num_parts) for name, tensor in self._given().items()}
        return [replace(self, **{name: part[i] for name, part in parts.items()}) for i in range(num_parts)]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the batch that are not None, in the order of the fields."""
        return iter(self._given().values())

    def to_device(self, device: torch.device) -> Self:
        """Copy the batch to a device. The copy to a GPU goes through pinned memory and is queued on the current stream,
        so the host does not wait for it.
        """
        return replace(self, **{name: _on_device(tensor, device) for name, tensor in self._given().items()})

    def record_stream(self, stream: "torch.cuda.Stream") -> None:
        """Tell PyTorch that `stream` uses the tensors. If another stream allocated their memory, PyTorch then does not
        reuse this memory before `stream` has finished with the tensors.
        """
        for tensor in self.tensors():
            tensor.record_stream(stream)

    def _given(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # A copy of a non-contiguous tensor would use extra memory, and the host would wait for the copy.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
