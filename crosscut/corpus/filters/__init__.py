"""Filters drop whole documents: by URL, by language and by length. The module `judging` holds their common task."""
