"""Audit of a corpus: which documents were dropped and why, whether duplicates are gone, and what test data leaked in.

The module `samples` counts and samples the documents of each part (an Arrow file of documents). `corpus_report`
combines the counts of all stages, `page` writes the report as an HTML page, and `explain` gives the history of one
document.
"""
