"""Input of a model: token ids, the ids that are to follow them, and what else a model may be told of them."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from crosscut.config import IGNORED


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Sequences that one rank's model reads together; tensors of dimensions [B, S], None where there is nothing to
    say.
    """

    tokens: Tensor
    """Token ids."""
    targets: Tensor
    """The ids that follow the tokens; `IGNORED` where none is to be predicted."""
    positions: Tensor | None = None
    """Place of each token in its sequence or document, from 0; None counts from the start of the sequence."""
    documents: Tensor | None = None
    """Number of the document that each token is of; None where a sequence is read as one document."""
    segments: Tensor | None = None
    """Number of the segment that each token is of, such as one of two sentences; None where there are no segments."""
    mask: Tensor | None = None
    """Whether each token may be attended to; None where every token may."""

    @classmethod
    def from_ids(cls, ids: Tensor) -> Self:
        """Batch in which every token of `ids` [B, S + 1] but the first is to be predicted from the earlier ones."""
        return cls(tokens=ids[:, :-1], targets=ids[:, 1:])

    @property
    def num_targets(self) -> Tensor:
        """Number of targets that are to be predicted: an integer scalar on the device."""
        return (self.targets != IGNORED).sum()

    def plain(self) -> tuple[Tensor, Tensor]:
        """Tokens and targets, for a model that reads nothing else; an assert fails where more is given."""
        given = list(self._given())
        assert given == ["tokens", "targets"], f"the model reads tokens and targets alone, but the batch has {given}"
        return self.tokens, self.targets

    def chunk(self, num_parts: int) -> list[Self]:
        """Equal parts along the sequences, in their order."""
        parts = {name: tensor.chunk(num_parts) for name, tensor in self._given().items()}
        return [replace(self, **{name: part[i] for name, part in parts.items()}) for i in range(num_parts)]

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that there are, in the order of the fields."""
        return iter(self._given().values())

    def to_device(self, device: torch.device) -> Self:
        """The same batch on a device. The copy to a GPU goes through pinned memory, in its stream's turn: no host
        waits for it.
        """
        return replace(self, **{name: _on_device(tensor, device) for name, tensor in self._given().items()})

    def record_stream(self, stream: "torch.cuda.Stream") -> None:
        """Keep the memory of all tensors until `stream` has used them, where another stream made them."""
        for tensor in self.tensors():
            tensor.record_stream(stream)

    def _given(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # Contiguous, since what is not is copied by way of other memory, and waited for.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
