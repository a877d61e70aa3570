"""Turn raw text into token shards that are clean, free of duplicates and free of test data (paper, 4.1.2).

The command `crosscut prepare corpus.toml` runs this package. The package records why each document was dropped.
docs/corpus.md describes the stages and the guarantees of each stage.
"""

from crosscut.corpus.finished import cleaned_otherwise
from crosscut.corpus.pipeline import CorpusResult, explain_document, prepare_corpus
from crosscut.corpus.summary import print_summary

__all__ = ["CorpusResult", "cleaned_otherwise", "explain_document", "prepare_corpus", "print_summary"]
