"""Sublayers of a model: one file for each, with its parameters and its steps."""
