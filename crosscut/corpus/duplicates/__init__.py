"""Duplicates of a corpus: the same text, and texts whose n-grams of words are mostly the same (paper, 4.1.2).

Of near-duplicates a MinHash search proposes pairs, at a stated recall; each is then checked exactly, so that none goes
that is not.
"""

from crosscut.corpus.duplicates.stages import duplicate_stages

__all__ = ["duplicate_stages"]
