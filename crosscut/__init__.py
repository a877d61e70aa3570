"""Crosscut trains transformers too big for one GPU by cutting every layer's matrices."""

__version__ = "0.1.0"
