"""Audit of a corpus: which documents were dropped and why, whether duplicates are gone, and whether test data leaked
in.

`samples` inspects every part, `corpus_report` combines the counts of all stages, `page` shows the report in a browser,
and `explain` gives the history of one document.
"""
