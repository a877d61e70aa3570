"""Heads of a model besides the output projection."""
