"""Benchmark of the extraction of the main text from HTML: real pages out of packages, fetched from public registries.

The pages are not part of this repository, because their licences do not allow it. `pages.json` names them.
"""
