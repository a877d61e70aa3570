"""Embeddings of texts by an encoder (docs/bert.md)."""

from crosscut.evaluation.embeddings.texts import TextOptions
from crosscut.evaluation.embeddings.vectors import embed, embeddings

__all__ = ["TextOptions", "embed", "embeddings"]
