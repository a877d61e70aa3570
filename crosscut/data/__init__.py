"""Conversion of text to reproducible batches: documents, tokenizer, token shards, sampler (paper, section 4.1.3).

The package takes ranks and sizes as integers and does not import torch. docs/data.md describes the files and their
guarantees.
"""

from crosscut.data.prepare import prepare
from crosscut.data.sampler import Sampler, ValidationSampler
from crosscut.data.shards.reading import Shard, TokenFolder
from crosscut.data.text.documents import Document, read_documents
from crosscut.data.tokenization.tokenizer import Tokenizer

__all__ = [
    "Document",
    "Sampler",
    "Shard",
    "TokenFolder",
    "Tokenizer",
    "ValidationSampler",
    "prepare",
    "read_documents",
]
