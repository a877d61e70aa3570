"""Filters drop whole documents: by URL, by language and by length.

The module `judging` contains the task that all filters share.
"""
