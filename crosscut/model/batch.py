"""Input of a model: token ids, target ids and optional information about each token."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from crosscut.config import IGNORED, ConfigError
from crosscut.config.checks import divisors, listed


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Sequences that one rank's model reads together. All tensors are [B, S]; None means that the information is not
    given.
    """

    tokens: Tensor
    """Token ids."""
    targets: Tensor
    """Ids that follow the tokens; `IGNORED` where nothing is to be predicted."""
    positions: Tensor | None = None
    """Position of each token in its sequence or document, from 0. None counts from the start of the sequence."""
    documents: Tensor | None = None
    """Number of the document to which each token belongs. None means that each sequence is one document."""
    segments: Tensor | None = None
    """Number of the segment to which each token belongs, such as one of two sentences. None means no segments."""
    mask: Tensor | None = None
    """Whether each token may be attended to. None means that every token may."""

    @classmethod
    def from_ids(cls, ids: Tensor) -> Self:
        """Make a batch from `ids` [B, S + 1]. Every token except the first is predicted from the earlier tokens."""
        return cls(tokens=ids[:, :-1], targets=ids[:, 1:])

    @property
    def num_targets(self) -> Tensor:
        """Number of targets to predict: an integer scalar on the device."""
        return (self.targets != IGNORED).sum()

    def plain(self) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, for a model that uses nothing else. Raises `ConfigError` if the batch has more."""
        if unread := [name for name in self._given() if name not in ("tokens", "targets")]:
            raise ConfigError(
                f"A batch for this model must have tokens and targets alone, but also has {listed(unread)}, which the "
                "model would ignore. Leave them out."
            )
        return self.tokens, self.targets

    def chunk(self, num_parts: int) -> list[Self]:
        """Split the sequences into equal parts, in order. Raises `ConfigError` if their number does not allow it."""
        if len(self.tokens) % num_parts:
            raise ConfigError(
                f"The parts of a batch must divide its sequences ({len(self.tokens)}), but there are {num_parts}. "
                f"Try {listed(divisors(len(self.tokens)))}."
            )
        parts = {name: tensor.chunk(num_parts) for name, tensor in self._given().items()}
        return [replace(self, **{name: part[i] for name, part in parts.items()}) for i in range(num_parts)]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that are given, in the order of the fields."""
        return iter(self._given().values())

    def to_device(self, device: torch.device) -> Self:
        """Copy the batch to a device. The copy to a GPU goes through pinned memory and is queued on the current stream,
        so the host does not wait for it.
        """
        return replace(self, **{name: _on_device(tensor, device) for name, tensor in self._given().items()})

    def record_stream(self, stream: "torch.cuda.Stream") -> None:
        """Keep the memory of all tensors until `stream` has used them, if another stream allocated them."""
        for tensor in self.tensors():
            tensor.record_stream(stream)

    def _given(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    # Make it contiguous first: other tensors are copied through extra memory, and the host waits.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
