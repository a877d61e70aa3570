"""Remove duplicates: documents with the same text, and documents that share most of their n-grams (paper, 4.1.2).

A MinHash search with a stated recall proposes pairs of near-duplicates. Each pair is then checked exactly, so that no
document is dropped wrongly.
"""

from crosscut.corpus.duplicates.stages import duplicate_stages

__all__ = ["duplicate_stages"]
