"""Compute the tensors that the layers of a model share (`Shared`) from a batch.

Shapes: B batch, S sequence.
"""

from dataclasses import replace

import torch
from torch import Tensor

from crosscut.architecture import Decoder
from crosscut.architecture.needs import Share
from crosscut.config import ModelConfig
from crosscut.config.layout import ContextAttention
from crosscut.model.batch import Batch
from crosscut.model.documents import AttentionMask, attention_mask, document_numbers, shared_mask
from crosscut.model.shared import Shared
from crosscut.model.sublayers.rotary import rotations
from crosscut.parallel import ParallelMesh


class Sharing:
    """Tensors that the layers of a model share on one rank. `described` describes the whole model."""

    def __init__(
        self, described: Decoder, config: ModelConfig, mesh: ParallelMesh, context_attention: ContextAttention
    ) -> None:
        self.config, self.mesh, self.context_attention = config, mesh, context_attention
        self.shares, self.is_causal = described.shares, described.embedding.is_causal

    def of(self, batch: Batch, places: Tensor | None, *, length: int, dtype: torch.dtype) -> Shared:
        """Compute the tensors that the layers read, in the element type `dtype`. `places` are the tokens' positions, by
        default their indexes. `length` is the length of the whole sequences, without padding.
        """
        rotation = mask = documents = None
        if self.shares & {Share.MASK, Share.DOCUMENTS}:
            documents = document_numbers(batch.documents, None if batch.places is None else self.mesh.context)
        if Share.ROTATION in self.shares:
            places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) if places is None else places
            rotation = rotations(places, self.config, dtype, length=length)
        if Share.MASK in self.shares and documents is not None:
            mask = self._mask(replace(batch, documents=documents.numbers), dtype)
        return Shared(rotation, mask, documents if Share.DOCUMENTS in self.shares else None)

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

    def _mask(self, batch: Batch, dtype: torch.dtype) -> AttentionMask | None:
        """Make the attention mask. `batch` has the documents of the whole sequences."""
        is_causal = self.is_causal
        if batch.places is None:
            return attention_mask(batch, dtype, is_causal=is_causal)
        return shared_mask(batch, dtype, is_causal=is_causal, axis=self.mesh.context, way=self.context_attention)
