"""Hostile inputs for everything in Crosscut that reads or listens: parts of `benchmarks/fuzz.py`."""
