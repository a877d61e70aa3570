"""Compute the tensors that the layers of a model share (`Shared`) from a batch.

Shapes: B batch, S sequence.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crosscut.architecture import Decoder
from crosscut.architecture.needs import Share
from crosscut.config import ModelConfig
from crosscut.config.layout import ContextAttention
from crosscut.model.batch import Batch
from crosscut.model.documents import AttentionMask, attention_mask, document_numbers, real_tokens, shared_mask
from crosscut.model.shared import Shared
from crosscut.model.sublayers.rotary import rotations
from crosscut.parallel import ParallelMesh

_OF_DOCUMENTS = {Share.MASK, Share.WINDOW_MASK, Share.DOCUMENTS}
"""Shared tensors that depend on the tokens' documents."""


class Sharing:
    """Tensors that the layers of a model share on one rank. `described` describes the whole model."""

    def __init__(
        self, described: Decoder, config: ModelConfig, mesh: ParallelMesh, context_attention: ContextAttention
    ) -> None:
        self.config, self.mesh, self.context_attention = config, mesh, context_attention
        self.shares, self.is_causal = described.shares, described.embedding.is_causal
        self._rotations = (
            (Share.ROTATION, "rotation", config),
            (Share.WINDOW_ROTATION, "window_rotation", config.in_windows),
        )

    def of(self, batch: Batch, places: Tensor | None, *, length: int, dtype: torch.dtype) -> Shared:
        """Compute the tensors that the layers read, in the element type `dtype`. `places` are the tokens' positions, by
        default their indexes. `length` is the length of the whole sequences, without padding. 0 stands for tokens
        that continue texts: the memory of the layers knows what these tokens see.
        """
        made: dict[str, Any] = {}
        for share, name, config in self._rotations:
            if share in self.shares:
                places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) if places is None else places
                made[name] = rotations(places, config, dtype, length=length)
        if length and self.shares & _OF_DOCUMENTS:
            documents = document_numbers(batch.documents, None if batch.places is None else self.mesh.context)
            made |= self._masks(replace(batch, documents=documents.numbers), length, dtype)
            made |= {"documents": documents} if Share.DOCUMENTS in self.shares else {}
        if length and Share.REAL_TOKENS in self.shares:
            made["real"] = real_tokens(batch.mask, None if batch.places is None else self.mesh.context)
        return Shared(**made)

    def _masks(self, batch: Batch, length: int, dtype: torch.dtype) -> dict[str, AttentionMask | None]:
        """Make the masks that the layers read. `batch` has the documents of the whole sequences."""
        made, window = {}, self.config.sliding_attention.window
        is_short = window < length  # texts that are continued have a mask of their own
        if Share.MASK in self.shares or (Share.WINDOW_MASK in self.shares and not is_short):
            made["mask"] = made["window_mask"] = self._mask(batch, dtype)
        if Share.WINDOW_MASK in self.shares and is_short:
            made["window_mask"] = self._mask(batch, dtype, window=window)
        return made

    def whole_length(self, batch: Batch) -> int:
        """Return the number of tokens in each whole sequence, which several context ranks may share."""
        return batch.tokens.shape[1] * (1 if batch.places is None else self.mesh.context.size)

    def filled(self, batch: Batch) -> tuple[Batch, int]:
        """Pad the sequences at their ends, so that they can be split over the ranks. Return the padded batch and the
        number of padding tokens of each sequence. A mask hides the padding, unless attention is causal: a token never
        attends to later tokens.
        """
        num_filled = self.num_filled(batch.tokens.shape[1])
        return batch.padded(num_filled, hides=not self.is_causal), num_filled

    def num_filled(self, length: int) -> int:
        """Return the number of padding tokens that sequences of `length` tokens need to be split over the ranks."""
        return -length % self.mesh.tensor.size if self.mesh.sequence_parallel else 0

    def _mask(self, batch: Batch, dtype: torch.dtype, *, window: int = 0) -> AttentionMask | None:
        """Make the attention mask, with a `window` above 0 that of layers with a sliding window."""
        how: Any = {"is_causal": self.is_causal, "window": window}
        if batch.places is None:
            return attention_mask(batch, dtype, **how)
        return shared_mask(batch, dtype, axis=self.mesh.context, way=self.context_attention, **how)
