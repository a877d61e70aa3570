"""Audit of a corpus: the dropped documents and the reasons, the remaining duplicates, and leaked test data.

The module `samples` counts and samples the documents of each part (an Arrow file of documents). `corpus_report`
combines the counts of all stages, `page` writes the report as an HTML page, and `explain` gives the history of one
document.
"""
