"""The audit of a corpus: what went where and why, whether duplicates are gone, and whether test data leaked in.

`samples` looks at every part, `report` puts together what all stages counted, `page` shows it in a browser, and
`explain` tells the story of one document.
"""
