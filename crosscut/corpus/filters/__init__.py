"""Filters drop whole documents: by URL, by language and by length. `judging` is the part that they share."""
