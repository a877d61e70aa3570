"""Embedding of a model: maps token ids to the hidden states before the first layer (paper, sections 2.2 and 3).

Shapes: B batch, S sequence, H hidden, V vocabulary, T tensor ranks.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from crosscut import architecture
from crosscut.config import ConfigError
from crosscut.flight import ModelPart
from crosscut.flight.places import enter
from crosscut.model.batch import Batch
from crosscut.model.building import Builder
from crosscut.parallel import PositionEmbedding, TiedWeight, TokenTypeEmbedding, VocabParallelEmbedding


class Embedding:
    """Embedding of tokens, positions and token types, with a norm and dropout, on one rank.

    A rank without the first stage of a pipeline has only the dropout and, if the last stage has a tied output
    projection, a copy of the token embedding. `part` describes the rank's stages. The modules belong to the model,
    under the names of `modules`, because parameter names have no prefix for the embedding.
    """

    def __init__(self, part: architecture.Decoder, build: Builder, compute_dtype: torch.dtype) -> None:
        place: Any = {"mesh": build.mesh, "dtype": build.dtype, "output_dtype": compute_dtype}
        own, is_first = part.embedding, part.is_first
        self.is_copy = part.has_copy
        """Whether the token embedding is a copy of that of the first stage."""
        self._is_tied_over_stages = part.head.uses_embedding and build.mesh.is_staged
        has_tokens = is_first or self.is_copy
        tokens = own.tokens
        self.tokens = VocabParallelEmbedding(*tokens.shape, padded_to=tokens.padded_to, **place) if has_tokens else None
        positions, types, norm = (own.positions, own.token_types, own.norm) if is_first else (None, None, None)
        self.positions = None if positions is None else PositionEmbedding(*positions.shape, **place)
        self.token_types = None if types is None else TokenTypeEmbedding(*types.shape, **place)
        self.norm = None if norm is None else build.stream_norm(norm)
        self.dropout, self.multiplier = build.dropout(own.dropout), own.multiplier

    @property
    def modules(self) -> dict[str, nn.Module | None]:
        """Modules by their names in the model; None for those that the rank or the model does not have."""
        return {
            "tokens": self.tokens,
            "positions": self.positions,
            "token_types": self.token_types,
            "embedding_norm": self.norm,
            "dropout": self.dropout,
        }

    @property
    def weight(self) -> nn.Parameter:
        """Weight [V, H] of the token embedding."""
        assert self.tokens is not None, "the stage has no embedding"
        return self.tokens.weight

    @property
    def is_trained_twice(self) -> bool:
        """Whether the token embedding is tied across two stages of a pipeline, and this rank trains one of its two
        copies.
        """
        return self._is_tied_over_stages and self.tokens is not None and self.weight.requires_grad

    @property
    def copies(self) -> list[nn.Parameter]:
        """List with this rank's copy of the tied embedding; empty if the rank has no copy. Sums over all stages leave
        the copy out, because the rank with the first stage counts the original.
        """
        return [self.weight] if self.is_copy else []

    def counted_once(self, parameters: Collection[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that this rank counts in sums over all stages: all except `copies`."""
        copies = self.copies
        return [parameter for parameter in parameters if all(parameter is not copy for copy in copies)]

    def embed(
        self, batch: Batch, places: Tensor | None, *, num_filled: int, with_weight: bool
    ) -> tuple[Tensor, TiedWeight | None]:
        """Return the hidden states [B, S, H] of the tokens [B, S] (under sequence parallelism [B, S/T, H]) and, with
        `with_weight`, the weight of the token embedding. `places` are the tokens' positions; None means that positions
        count from the start of the sequence. The last `num_filled` tokens of each sequence are padding. Raises
        `ConfigError` if segments are given but the model has no token types.
        """
        assert self.tokens is not None, "the stage has no embedding"
        enter(ModelPart.EMBEDDING)
        x, tied = self.tokens(batch.tokens, with_weight=True) if with_weight else (self.tokens(batch.tokens), None)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.positions is not None:
            length = batch.tokens.shape[1]
            of_sequence = {"num_filled": num_filled, "places": batch.places}
            rows = self.positions(length, **of_sequence) if places is None else self.positions.at(places)
            x = x + rows
        x = self._typed(x, batch)
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x)
        if torch.is_grad_enabled() and not x.requires_grad:  # frozen embeddings: layers expect an x with a gradient
            x = x.detach().requires_grad_()
        return x, tied

    def _typed(self, x: Tensor, batch: Batch) -> Tensor:
        """Add the embeddings of the tokens' types, if the model has types."""
        if self.token_types is not None:
            types = torch.zeros_like(batch.tokens) if batch.segments is None else batch.segments
            y: Tensor = x + self.token_types(types)
            return y
        if batch.segments is not None:
            raise ConfigError(
                "A batch for a model with `model.token_types` of 0 must not have segments, but has some. Make the "
                "batch without segments."
            )
        return x
