"""Arithmetic on one device of mixers that read a sequence from its start: convolution, and recurrences in chunks."""
