"""Raw sources to clean, unique and unleaked token shards, with a record of why every document went (paper, 4.1.2).

`crosscut prepare corpus.toml` runs it; docs/corpus.md describes the stages and what each guarantees.
"""

from crosscut.corpus.pipeline import CorpusResult, explain_document, prepare_corpus
from crosscut.corpus.summary import print_summary

__all__ = ["CorpusResult", "explain_document", "prepare_corpus", "print_summary"]
