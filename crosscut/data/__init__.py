"""Conversion of text to reproducible batches: documents, tokenizer, token shards, sampler (paper, section 4.1.3).

The package takes ranks and sizes as integers and does not import torch. docs/data.md describes the files and their
guarantees.
"""

from crosscut.data.masked.samples import (
    MaskedSampler,
    MaskedValidation,
    masked_samples,
    masked_validation,
)
from crosscut.data.mixture import TokenMixture, Tokens, folders_of, open_tokens, training_samples, validation_samples
from crosscut.data.prepare import prepare
from crosscut.data.sampler import Sampler
from crosscut.data.shards.reading import Shard, TokenFolder
from crosscut.data.text.documents import TextDocument, read_documents
from crosscut.data.tokenization.tokenizer import Tokenizer
from crosscut.data.validation import ValidationSampler

__all__ = [
    "MaskedSampler",
    "MaskedValidation",
    "Sampler",
    "Shard",
    "TextDocument",
    "TokenFolder",
    "TokenMixture",
    "Tokenizer",
    "Tokens",
    "ValidationSampler",
    "folders_of",
    "masked_samples",
    "masked_validation",
    "open_tokens",
    "prepare",
    "read_documents",
    "training_samples",
    "validation_samples",
]
