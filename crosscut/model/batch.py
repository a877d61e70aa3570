"""Input of a model: tensors for the fields of a batch (`architecture.inputs`)."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.architecture.inputs import FIELDS, Inputs, Per
from crosscut.config import IGNORED, ConfigError
from crosscut.config.checks import divisors, listed
from crosscut.config.conventions import predicted_rows
from crosscut.model.documents import find_documents
from crosscut.parallel import Axis
from crosscut.parallel.context import split_zigzag


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch(Inputs[Tensor]):
    """Sequences that one rank's model reads together, as tensors. A model reads the fields that its parts list, and
    ignores labels and targets unless it computes the loss.

    Raises `ConfigError` if only one of documents and positions is given.
    """

    def __post_init__(self) -> None:
        if (self.documents is None) != (self.positions is None):
            given, missing = ("documents", "positions") if self.positions is None else ("positions", "documents")
            raise ConfigError(f"A batch with {given} must have {missing}, too, but has none. Give both or none.")

    @classmethod
    def of(cls, arrays: Inputs[npt.NDArray[Any]], names: Collection[str] = FIELDS) -> Self:
        """Make a batch from the fields `names` of NumPy arrays. The batch shares the memory of the arrays."""
        return cls(**{name: torch.from_numpy(array) for name, array in arrays.given().items() if name in names})

    @classmethod
    def from_ids(cls, ids: Tensor) -> Self:
        """Make a batch from `ids` [B, S + 1]. Every token except the first is predicted from the earlier tokens."""
        return cls(tokens=ids[:, :-1], targets=ids[:, 1:])

    def count(self, name: str) -> Tensor:
        """Return the number of rows of a field that hold something to predict: an integer scalar on the device. Rows
        with `IGNORED` or NaN hold nothing, and so does a field that is not given. For the spans of a text, a row counts
        once.
        """
        values: Tensor | None = getattr(self, name)
        if values is None:
            return self.tokens.new_zeros(())
        first = values[:, 0] if name == "labels" and values.dim() > 1 else values
        return (~first.isnan() if first.is_floating_point() else first != IGNORED).sum()

    @property
    def num_targets(self) -> Tensor:
        """Number of targets to predict or, for a task, number of labels: an integer scalar on the device."""
        return self.count("targets" if self.labels is None else "labels")

    def with_predicted(self, fraction: float) -> Self:
        """Return the batch with the indexes of the tokens whose logits are computed. These are all tokens with a
        target, and a few other tokens that round up the number of indexes (`config.conventions.predicted_rows`).
        `fraction` is the expected fraction of tokens with a target. Call this while the batch is on the host, because
        the number of indexes depends on the targets.
        """
        assert self.targets is not None, "the batch has no targets"
        has_none = (self.targets == IGNORED).flatten()
        count = predicted_rows(int((~has_none).sum()), has_none.numel(), fraction)
        return replace(self, predicted=has_none.int().argsort(stable=True)[:count])

    def with_documents(self, end_of_text: int) -> Self:
        """Return the batch with the documents that the tokens contain, and with positions that restart at each
        document. `end_of_text` is the id of the end-of-text token.
        """
        documents = find_documents(self.tokens, end_of_text=end_of_text)
        return replace(self, documents=documents.numbers, positions=documents.positions)

    def padded(self, num_filled: int, *, hides: bool) -> Self:
        """Return the same sequences with `num_filled` padding tokens at the end of each. With `hides`, a mask hides the
        padding from the other tokens.
        """
        if not num_filled:
            return self
        fields = self._with_rows({Per.TOKEN})
        if hides:
            fields.setdefault("mask", torch.ones_like(self.tokens, dtype=torch.bool))
        end = (0, num_filled)
        return replace(self, **{name: F.pad(each, end, value=FIELDS[name].padding) for name, each in fields.items()})

    def part_of_rank(self, axis: Axis) -> Self:
        """Return the rank's part of sequences that the ranks of `axis` share: an early and a late piece of each
        sequence (`parallel.context.zigzag`). If the axis has one rank, return the batch itself.

        Call this on whole sequences, after `with_documents` if documents are needed. Raises `LayoutError` unless the
        length of the sequences is a multiple of 2 x the number of ranks.
        """
        if axis.size == 1:
            return self
        divided = self._with_rows({per for per in Per if per.is_divided_by_context})
        assert divided.keys() == self.given().keys(), "fields of whole sequences would be lost"
        places = split_zigzag(torch.arange(self.tokens.shape[1], device=self.tokens.device), axis.size, 0)[axis.rank]
        parts = {name: split_zigzag(tensor, axis.size, 1)[axis.rank] for name, tensor in divided.items()}
        return replace(self, **parts, places=places)

    def chunk(self, num_parts: int) -> list[Self]:
        """Split the sequences into `num_parts` equal parts, in order. Sequences that share a label stay together.
        Raises `ConfigError` if the number of sequences, or of labels, is not a multiple of `num_parts`. Call
        `with_predicted` on the parts, not on the whole batch.
        """
        divided = self._with_rows({per for per in Per if per.is_divided_by_micro_batches})
        assert divided.keys() == self.given().keys(), "the indexes of a whole batch are not those of its parts"
        what, number = "sequences", len(self.tokens)
        if self.labels is not None:
            what, number = "labels", len(self.labels)
        if number % num_parts:
            raise ConfigError(
                f"`num_parts` must divide the batch's number of {what} ({number}), but is {num_parts}. "
                f"Try {listed(divisors(number))}."
            )
        parts = {name: tensor.chunk(num_parts) for name, tensor in divided.items()}
        return [replace(self, **{name: part[i] for name, part in parts.items()}) for i in range(num_parts)]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the batch that are not None, in the order of the fields."""
        return iter(self.given().values())

    def to_device(self, device: torch.device) -> Self:
        """Copy the batch to a device. The copy to a GPU goes through pinned memory and is queued on the current stream,
        so the host does not wait for it.
        """
        return replace(self, **{name: _on_device(tensor, device) for name, tensor in self.given().items()})

    def record_stream(self, stream: "torch.cuda.Stream") -> None:
        """Tell PyTorch that `stream` uses the tensors. If another stream allocated their memory, PyTorch then does not
        reuse this memory before `stream` has finished with the tensors.
        """
        for tensor in self.tensors():
            tensor.record_stream(stream)

    def _with_rows(self, kinds: Collection[Per]) -> dict[str, Tensor]:
        """Return the given fields that have these kinds of rows."""
        return {name: tensor for name, tensor in self.given().items() if FIELDS[name].per in kinds}


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # A copy of a non-contiguous tensor would use extra memory, and the host would wait for the copy.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
